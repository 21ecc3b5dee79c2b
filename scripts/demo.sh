#!/usr/bin/env bash
# Four arms on scikit-learn's digits: dense, PowerSGD weak, PowerSGD strong, Accordion between the two; one table, one figure.
# bash scripts/demo.sh [SEEDS [OUT]]: SEEDS such as 0 (default) or 0,1,2; OUT for table and figure (default: results/report)
# As many arms run side by side as there are cores (JOBS=1: one after another). EPOCHS=6 is a trial: Accordion looks
# eight times in a run, or after each epoch, so that it acts in a short one, too.
set -euo pipefail
cd "$(dirname "$0")/.."
seeds=${1:-0}
out=${2:-results/report}
python=${PYTHON:-.venv/bin/python}
epochs=${EPOCHS:-40}
interval=$((epochs < 16 ? 1 : epochs / 8))
jobs=${JOBS:-$(getconf _NPROCESSORS_ONLN)}
runs=results/runs/demo/$(date +%Y%m%d-%H%M%S)-$$  # a new folder: the report sees this demo's runs only
export OMP_NUM_THREADS=1  # layers this small gain nothing from two threads
ended=$(mktemp)  # a line for each arm that is done
trap 'kill $(jobs -p) 2>/dev/null || true; rm -f "$ended"' EXIT

arm() {
    local name=$1 sweep=()
    shift
    if [[ $seeds == *,* ]]; then sweep=(-m); fi
    local command=(-m accordion_bench ${sweep[@]+"${sweep[@]}"} "$@" model=resnet20 "epochs=$epochs" "seed=$seeds" "paths.runs=$runs")
    echo "$name: \$ python ${command[*]}"
    "$python" "${command[@]}" 2>&1 | sed -u "s/^/$name: /"
    echo "$name" >> "$ended"
    echo "$(wc -l < "$ended" | tr -d ' ') of 4 arms are done ($name)"
}

running=()
begin() {
    if ((${#running[@]} == jobs)); then  # in the order of their start: bash 3 of macOS cannot wait for any
        wait "${running[0]}"
        running=("${running[@]:1}")
    fi
    arm "$@" &
    running+=($!)
}

begin dense compressor=none
begin "rank 4" compressor=powersgd compressor.rank=4
begin "rank 1" compressor=powersgd compressor.rank=1
begin Accordion compressor=powersgd adaptive=accordion adaptive.accordion.weak=4 adaptive.accordion.strong=1 adaptive.accordion.eta=1 "adaptive.accordion.interval=$interval"
for one in "${running[@]}"; do wait "$one"; done

echo
echo "\$ python -m accordion_bench.report $runs --out $out"
"$python" -m accordion_bench.report "$runs" --out "$out"
echo "the figure: $out/comparison.png"
