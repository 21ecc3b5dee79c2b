#!/usr/bin/env bash
# Makes .venv from pyproject.toml at the versions of constraints.txt. Uses uv where present, else puts it into .venv.
# PYTHON=python3.12 chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

usable() { "$1" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; }

for python in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if usable "$python"; then break; fi
    python=""
done
if [ -z "$python" ]; then
    echo "accordion_bench needs Python 3.11, 3.12 or 3.13 and found none; install one, or type: make install PYTHON=/path/to/python3.12" >&2
    exit 1
fi

said=$SECONDS
beat() { while sleep 8 >/dev/null 2>&1; do echo "still installing, for $((SECONDS - said)) s (torch alone is a download of several hundred MB)" >&2; done; }
quiet=()
if [ ! -t 2 ]; then  # on a terminal uv draws bars
    quiet=(--quiet)
    beat &
    trap "kill $! 2>/dev/null || true" EXIT
fi

echo "installing into .venv" >&2
rm -rf .venv
uv=$(command -v uv || true)
if [ -n "$uv" ]; then
    "$uv" venv --quiet --python "$(command -v "$python")" .venv
else
    "$python" -m venv .venv || { echo "install python3-venv, or uv, and try again" >&2; exit 1; }
    .venv/bin/python -m pip install ${quiet[@]+"${quiet[@]}"} --disable-pip-version-check uv
    uv=.venv/bin/uv
fi
"$uv" pip install ${quiet[@]+"${quiet[@]}"} --compile-bytecode --python .venv/bin/python --constraint constraints.txt --editable '.[dev]'
echo "installed into .venv: $(.venv/bin/python -c 'import importlib.metadata as m; print("torch", m.version("torch"), "torchvision", m.version("torchvision"))')"
echo "now type: source .venv/bin/activate    (then python -m accordion_bench --help works, and every command of README.md)"
