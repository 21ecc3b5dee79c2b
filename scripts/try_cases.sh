#!/usr/bin/env bash
# Tries each case of a folder, such as reproductions of reported faults, and prints a line for it: `ok`, or `FAILS` with
# the last line that it has printed. Ends with 1 where one fails.
#
#     bash scripts/try_cases.sh FOLDER [NAME ...]
#
# A case is a *.py or *.sh whose name begins with a digit; other files are its helpers. It runs from the root of this
# checkout, with the folder and the root on PYTHONPATH and Python's path in PY, and is right when it ends with 0 within
# TIMEOUT seconds (300). NAMEs are beginnings of the cases to try; none = all. PYTHON=... takes another Python.
set -uo pipefail
[ -d "${1:-}" ] || { echo "FOLDER must be a folder of cases, got ${1:-nothing}; type bash $0 FOLDER" >&2; exit 2; }
folder=$(cd "$1" && pwd) && shift
cd "$(dirname "$0")/.." || exit 2
export PY=${PYTHON:-$PWD/.venv/bin/python} PYTHONPATH=$PWD:$folder
log=$(mktemp)
trap 'rm -f "$log"' EXIT
[ $# -gt 0 ] || set -- ""

tried=0 failed=0
for case in "$folder"/[0-9]*; do
    [[ $case == *.py || $case == *.sh ]] || continue
    name=$(basename "$case") wanted=""
    for begin in "$@"; do [[ $name != "$begin"* ]] || wanted=yes; done
    [ -f "$case" ] && [ -n "$wanted" ] || continue
    with=bash
    [[ $case != *.py ]] || with=$PY
    began=$SECONDS status=0
    timeout --kill-after=10 "${TIMEOUT:-300}" "$with" "$case" >"$log" 2>&1 </dev/null || status=$?
    took=$((SECONDS - began)) tried=$((tried + 1))
    last=$(tr -d '\000' <"$log" | tr '\r' '\n' | grep '[^[:space:]]' | tail -n 1 | cut -c 1-300)
    case $status in
    0) printf 'ok    %4d s  %s\n' "$took" "$name" && continue ;;
    124 | 137) last="not over after ${TIMEOUT:-300} s; $last" ;;
    esac
    printf 'FAILS %4d s  %s: %s\n' "$took" "$name" "${last:-exit status $status}"
    failed=$((failed + 1))
done
[ "$tried" -gt 0 ] || { echo "FOLDER must hold cases, files such as 01_name.py, got none in $folder" >&2; exit 2; }
echo "$failed of $tried fail"
[ "$failed" -eq 0 ]
