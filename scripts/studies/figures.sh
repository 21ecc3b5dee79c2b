#!/usr/bin/env bash
# The figures and tables kept under results/, from new runs: the demo's four arms and every compressor, with three seeds
# (about 25 minutes on two cores).
set -euo pipefail
cd "$(dirname "$0")/../.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-.venv/bin/python}" -m accordion_bench demo --seeds 0,1,2 --out "$scratch"

kept=results/demo
mkdir -p "$kept"
cp "$scratch"/{table.csv,comparison.png} "$kept"
"${PYTHON:-.venv/bin/python}" -m scripts.few_colours "$kept"/*.png
{
    cat <<'TEXT'
# Demo: dense, PowerSGD weak and strong, and Accordion between the two

`make figures` makes this folder from new runs with three seeds; `make demo` runs the same four arms with seed 0. Options
that are not in the commands below have their defaults in `conf/`. Why ResNet-20 and 40 epochs: [tried.md](tried.md).

TEXT
    cat "$scratch/README.md"
} >"$kept/README.md"
echo "kept in $kept"
JOBS=2 bash scripts/studies/compressors.sh
