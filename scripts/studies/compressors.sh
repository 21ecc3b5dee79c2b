#!/usr/bin/env bash
# Every compressor on digits: ResNet-8, 4 workers, 40 epochs, three seeds; then the table and figure
# of results/compressors (about 13 minutes on two cores).
#
#   scripts/studies/compressors.sh            # JOBS=2 runs two arms at a time
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
runs=${RUNS:-results/runs/compressors}
export OMP_NUM_THREADS=1 python runs
arms=(
  "compressor=none"
  "compressor=fp16"
  "compressor=fp8"
  "compressor=int8"
  "compressor=qsgd compressor.bits=3"
  "compressor=qsgd compressor.bits=3 adaptive=alq"
  "compressor=nuqsgd compressor.bits=3"
  "compressor=qsgdinf compressor.bits=3"
  "compressor=trn"
  "compressor=terngrad"
  "compressor=natural"
  "compressor=onebit"
  "compressor=efsignsgd"
  "compressor=distefblocksgd optimizer.nesterov=false"
  "compressor=signsgd optimizer.lr=0.0005 schedule.lr_scaling=linear"
  "compressor=signum optimizer.lr=0.001 schedule.lr_scaling=linear"
  "compressor=topk compressor.density=0.01"
  "compressor=threshold compressor.density=0.01"
  "compressor=randomk compressor.density=0.1"
  "compressor=dgc compressor.density=0.01"
  "compressor=powersgd"
  "compressor=atomo"
  "compressor=demo optimizer.momentum=0 optimizer.lr=0.005 schedule.lr_scaling=linear"
)
printf '%s\n' "${arms[@]}" | xargs -P "${JOBS:-1}" -I{} bash -c \
  '$python -m accordion_bench -m {} seed=0,1,2 epochs=40 workers=4 comm=simulated paths.runs="$runs"'

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
$python -m accordion_bench.report "$runs"/* --out "$scratch"
kept=results/compressors
mkdir -p "$kept"
cp "$scratch"/{table.csv,comparison.png} "$kept"
$python -m scripts.few_colours "$kept"/*.png
{
    cat <<'TEXT'
# Every compressor on digits

`JOBS=2 scripts/studies/compressors.sh`. ResNet-8 (75 thousand parameters) on 8×8 images: a check that every method trains, and
what it sends; no evidence about large models. **No method can be told from dense here, and none from most others**:
with 360 test images and three seeds the intervals are ±0.4 to ±4 points. The learning rates of signsgd, signum and DeMo
were chosen from {0.0005, 0.001, 0.002, 0.005} at seed 7; everything else keeps dense's. **Times are no measurement**:
two arms ran at a time beside other work, hence their intervals.

TEXT
    cat "$scratch/README.md"
} >"$kept/README.md"
echo "kept in $kept"
