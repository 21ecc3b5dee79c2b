#!/usr/bin/env bash
# Writes constraints.txt, build-tools.txt and docs-tools.txt from pyproject.toml: versions and hashes, for all platforms and Pythons.
# Versions that are there stay; --upgrade takes the newest ones. Needs a package index.
set -euo pipefail
cd "$(dirname "$0")/.."
lock() {
    .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate "$@"
}
lock --extra dev pyproject.toml --output-file constraints.txt "$@"
printf '%s\n' uv hatchling editables setuptools | lock --constraints constraints.txt - --output-file build-tools.txt "$@"
.venv/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
    | lock - --output-file docs-tools.txt "$@"
