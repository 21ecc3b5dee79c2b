#!/usr/bin/env bash
# Methods that the seed papers cite and the field uses, on digits (ResNet-8, 20 epochs) and on a small transformer
# (gpt_nano, 32,768 bytes of Python's documentation, 3 epochs): 4 workers, three seeds; then the tables of
# results/cited_methods, whose README is written by hand.
#
#   scripts/studies/cited_methods.sh            # JOBS=2 runs two arms at a time
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
runs=${RUNS:-results/runs/cited_methods}
export OMP_NUM_THREADS=1 python runs
one_bit="compressor=demo compressor.value_bits=1 compressor.k=8 optimizer.momentum=0"
digits=(
  "compressor=none"
  "compressor=topk compressor.density=0.01"
  "compressor=topk compressor.density=0.01 compressor.collective=tree"
  "compressor=powersgd"
  "compressor=gradiveq"
  "compressor=arctopk"
  "sync=gossip"
  "sync=gossip sync.graph=ring"
  "sync=adpsgd"
  "sync=drawn_times sync.first=3"
  "sync=drawn_times sync.rule=k_async sync.first=1"
  "sync=drawn_times sync.rule=anytime"
  "$one_bit optimizer.lr=0.005 schedule.lr_scaling=linear"
  "$one_bit optimizer.lr=0.005 schedule.lr_scaling=linear compressor.look_ahead=true"
  "optimizer=lion"
  "optimizer=lion compressor=lion"
  "optimizer=adamw"
  "optimizer=adamw sync=desloc sync.period=8"
  "optimizer=adamw compressor=dion2"
)
gpt=(
  "compressor=none"
  "compressor=topk compressor.density=0.01 compressor.collective=tree"
  "compressor=powersgd"
  "compressor=gradiveq"
  "compressor=arctopk"
  "sync=gossip"
  "sync=adpsgd"
  "sync=desloc sync.period=8"
  "compressor=dion2"
  "optimizer=lion optimizer.lr=0.0005"
  "optimizer=lion compressor=lion optimizer.lr=0.0005"
)
# arms of each network: its name, what all have, the arms
study() {
  local name=$1 common=$2
  shift 2
  printf '%s\n' "$@" | common=$common name=$name xargs -P "${JOBS:-1}" -I{} bash -c \
    '$python -m accordion_bench -m $common {} seed=0,1,2 workers=4 comm=simulated paths.runs="$runs/$name"'
  scratch=$(mktemp -d)
  $python -m accordion_bench.report "$runs/$name"/* --out "$scratch"
  mkdir -p results/cited_methods
  cp "$scratch"/table.csv results/cited_methods/"$name".csv
  rm -rf "$scratch"
}
study digits "epochs=20" "${digits[@]}"
study gpt "+experiment=gpt/quick scale=small dataset.subset=32768 dataset.limit_eval=8000" "${gpt[@]}"
echo "kept in results/cited_methods"
