#!/usr/bin/env bash
# Makes .venv of build-tools.txt and constraints.txt: every file that is installed is compared with a hash in there.
# Uses uv where present, else puts it into .venv. Until the new .venv is whole the old one is kept.
# PYTHON=python3.12 chooses the interpreter.
# TORCH=cpu, or cu126, or auto (uv's names of torch backends) takes another build of torch, which no hash is known of.
set -euo pipefail
cd "$(dirname "$0")/.."

usable() { "$1" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; }

for python in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
    if usable "$python"; then break; fi
    python=""
done
if [ -z "$python" ]; then
    echo "accordion_bench needs Python 3.11 to 3.14 and found none; install one, or type: make install PYTHON=/path/to/python3.12" >&2
    exit 1
fi

said=$SECONDS
beat() {
    local pause=8
    while sleep "$pause" >/dev/null 2>&1; do
        echo "still installing, for $((SECONDS - said)) s (torch alone is a download of several hundred MB)" >&2
        pause=$((pause < 60 ? 2 * pause : pause))
    done
}
beating=""
rest=""
there() { [ -e "$1" ] || [ -L "$1" ]; }
finish() {
    status=$?
    trap - EXIT INT TERM HUP
    [ -z "$beating" ] || kill "$beating" 2>/dev/null || true
    [ -z "$rest" ] || rm -f "$rest"
    if [ "$status" -ne 0 ] && there .venv.old; then
        rm -rf .venv
        mv .venv.old .venv
        echo "nothing has been installed; .venv is what it was before" >&2
    elif [ "$status" -ne 0 ] && [ -n "$first" ]; then
        rm -rf .venv
    fi
    exit "$status"
}

echo "installing into .venv" >&2
rm -rf .venv.gone
first=yes
if there .venv || there .venv.old; then first=""; fi
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
# an environment cannot be moved and used: scripts hold its path. So the old one makes room, and comes back if need be
if there .venv.old; then
    rm -rf .venv # of an installation that was killed
elif there .venv; then
    mv .venv .venv.old
fi

quiet=()
if [ ! -t 2 ]; then # on a terminal uv draws bars
    quiet=(--quiet)
    beat &
    beating=$!
fi

uv=$(command -v uv || true)
if [ -n "$uv" ]; then
    "$uv" venv --quiet --python "$(command -v "$python")" .venv
else
    "$python" -m venv .venv || { echo "install python3-venv, or uv, and try again" >&2; exit 1; }
    .venv/bin/python -m pip install ${quiet[@]+"${quiet[@]}"} --disable-pip-version-check --require-hashes --requirement build-tools.txt
    uv=.venv/bin/uv
fi
# what is built here (our package, and what others offer as source only) is built by the tools of build-tools.txt
add() { "$uv" pip install ${quiet[@]+"${quiet[@]}"} --python .venv/bin/python --no-build-isolation "$@"; }

add --require-hashes --requirements build-tools.txt
if [ -z "${TORCH:-}" ]; then
    add --require-hashes --requirements constraints.txt
    add --no-deps --compile-bytecode --editable .
else
    echo "TORCH=$TORCH: torch, torchvision and what these bring are not compared with hashes" >&2
    rest=$(mktemp)
    awk '/^[^ ]/ { keep = !/^(torch|torchvision|triton|nvidia-[a-z0-9-]*|cuda-[a-z0-9-]*)==/ } keep' constraints.txt >"$rest"
    add --require-hashes --no-deps --requirements "$rest"
    add --torch-backend "$TORCH" --compile-bytecode --editable .
fi
.venv/bin/python -m accordion_bench.conformance.compile_kernels >&2 # else the first runs would wait for it
versions=$(.venv/bin/python -c 'import importlib.metadata as m; print("torch", m.version("torch"), "torchvision", m.version("torchvision"))')
if there .venv.old; then
    mv .venv.old .venv.gone # at once, so that half of it is never taken for one
    rm -rf .venv.gone
fi
echo "installed into .venv: $versions"
echo "now type: source .venv/bin/activate    (then python -m accordion_bench --help works, and every command of README.md)"
