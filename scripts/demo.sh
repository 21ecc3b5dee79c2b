#!/usr/bin/env bash
# Four arms on scikit-learn's digits: dense, PowerSGD weak, PowerSGD strong, Accordion between the two; one table, one figure.
# bash scripts/demo.sh [SEEDS [OUT]]: SEEDS such as 0 (default) or 0,1,2; OUT for table and figure (default: results/report)
set -euo pipefail
cd "$(dirname "$0")/.."
seeds=${1:-0}
out=${2:-results/report}
runs=results/runs/demo/$(date +%Y%m%d-%H%M%S)-$$  # a new folder: the report sees this demo's runs only

# layers this small gain nothing from two threads, and lose much where another process is busy
export OMP_NUM_THREADS=1

arm() {
    local sweep=()
    if [[ $seeds == *,* ]]; then sweep=(-m); fi
    local command=(-m accordion_bench ${sweep[@]+"${sweep[@]}"} "$@" model=resnet20 epochs=40 "seed=$seeds" "paths.runs=$runs")
    echo
    echo "\$ python ${command[*]}"
    .venv/bin/python "${command[@]}"
}

arm compressor=none
arm compressor=powersgd compressor.rank=4
arm compressor=powersgd compressor.rank=1
arm compressor=powersgd adaptive=accordion adaptive.accordion.weak=4 adaptive.accordion.strong=1

echo
echo "\$ python -m accordion_bench.report $runs --out $out --pdf"
.venv/bin/python -m accordion_bench.report "$runs" --out "$out" --pdf
echo "the figure: $out/comparison.png"
