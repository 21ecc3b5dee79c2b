#!/usr/bin/env bash
# Time to a fixed accuracy behind shaped links: real runs of 4 hosts at 100 Mbit/s, one host of them slow in the last
# part. Tables and figures go to results/time_to_accuracy.
#
#   scripts/studies/time_to_accuracy.sh DATA [PART...]   DATA holds cifar-10-batches-py; PART: digits cifar10 straggler report
#
# Every part can be stopped and started again: what is done is skipped. Needs root (network namespaces).
set -euo pipefail
cd "$(dirname "$0")/../.."
data=$(realpath "${1:?type scripts/studies/time_to_accuracy.sh DATA}")
shift
parts=${*:-digits cifar10 straggler report}
python=${PYTHON:-.venv/bin/python}
runs=results/runs/time_to_accuracy
seeds=${SEEDS:-0 1 2}
export OMP_NUM_THREADS=1
failed=0

cells=(
    "comm.engine=ddp"
    ""
    "compressor=powersgd compressor.rank=4"
    "compressor=powersgd compressor.rank=1"
    "compressor=powersgd adaptive=accordion adaptive.accordion.interval=INTERVAL"
    "compressor=efsignsgd"
    "compressor=distefblocksgd"
    "compressor=qsgd adaptive=alq compressor.norm=linf compressor.bucket_size=1024"
    "adaptive=local_sgd"
    "adaptive=slowmo"
)
straggling=(
    ""
    "compressor=powersgd compressor.rank=1"
    "compressor=efsignsgd"
    "adaptive=local_sgd"
    "adaptive=slowmo"
    "adaptive=accordion_sync adaptive.accordion_sync.interval=INTERVAL"
)

# run NAME INTERVAL NETLAB... -- OVERRIDES...: every cell with every seed
run() {
    local part=$1 interval=$2 lab=() cell
    shift 2
    while [ "$1" != "--" ]; do lab+=("$1"); shift; done
    shift
    for seed in $seeds; do
        for cell in "${chosen[@]}"; do
            # shellcheck disable=SC2086
            "$python" -m accordion_bench.netlab --hosts 4 --rate 100mbit "${lab[@]}" -- "$@" ${cell//INTERVAL/$interval} \
                "seed=$seed" model=resnet8 optimizer.nesterov=false network=100mbit resume_sweep=true "paths.data=$data" "paths.runs=$runs/$part" \
                || failed=1
        done
    done
}

for part in $parts; do
    chosen=("${cells[@]}")
    case $part in
    digits) run digits 3 -- dataset=digits epochs=30 target=0.9 ;;
    cifar10) run cifar10 1 -- dataset=cifar10 dataset.subset=3000 dataset.limit_eval=2000 epochs=10 target=0.3 ;;
    straggler)
        chosen=("${straggling[@]}")
        run straggler 3 --slow-host 2:20mbit -- dataset=digits epochs=30 target=0.9
        ;;
    report)
        for folder in "$runs"/*; do
            bash scripts/studies/report_kept.sh "$folder" "time_to_accuracy/${folder#"$runs"/}" comparison time_to_target
        done
        ;;
    esac
done
exit $failed
