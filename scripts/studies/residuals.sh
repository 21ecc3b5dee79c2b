#!/usr/bin/env bash
# What eight bits for the residual cost on digits: ResNet-8, 4 workers, 20 epochs, three seeds; then the table and figure
# of results/residuals, whose README is written by hand.
#
#   scripts/studies/residuals.sh            # JOBS=2 runs two arms at a time
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
runs=${RUNS:-results/runs/residuals}
export OMP_NUM_THREADS=1 python runs
arms=("compressor=none")
for method in "compressor=topk compressor.density=0.01"; do
  arms+=(
    "$method compressor.error_feedback=true"
    "$method compressor.error_feedback=true compressor.residual_bits=8"
    "$method compressor.error_feedback=loco"
    "$method compressor.error_feedback=false"
  )
done
printf '%s\n' "${arms[@]}" | xargs -P "${JOBS:-1}" -I{} bash -c \
  '$python -m accordion_bench -m {} seed=0,1,2 epochs=20 workers=4 comm=simulated paths.runs="$runs"'

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
$python -m accordion_bench.report "$runs"/* --out "$scratch"
kept=results/residuals
mkdir -p "$kept"
cp "$scratch"/table.csv "$kept"
echo "kept in $kept"
