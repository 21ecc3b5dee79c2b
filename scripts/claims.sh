#!/usr/bin/env bash
# A claim's runs, records and tables; stopped, it goes on where it was: scripts/claims.sh CLAIM [--data DATA] [--minutes M]
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-.venv/bin/python}" -m scripts.claims "$@"
