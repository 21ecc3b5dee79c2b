#!/usr/bin/env bash
# The papers' experiments at a scale that two CPU cores can do, on real CIFAR-10 and WikiText-2: runs, tables, figures.
#
#   scripts/studies/papers.sh DATA [PART...]     DATA holds cifar-10-batches-py and wikitext-2; PART: accordion alq local text report
#
# Every part can be stopped and started again: what is done is skipped.
set -euo pipefail
cd "$(dirname "$0")/../.."
data=$(realpath "${1:?type scripts/studies/papers.sh DATA}")
shift
parts=${*:-accordion alq local text report}
python=${PYTHON:-.venv/bin/python}
runs=results/runs/papers
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
sweep() {
    local experiment=$1
    shift
    "$python" -m accordion_bench -m "+experiment=$experiment" scale=small seed=0,1,2 resume_sweep=true \
        "paths.data=$data" "paths.runs=$runs/$part" "$@" || failed=1
}
images=(model=resnet8 dataset.subset=3000 dataset.limit_eval=2000 epochs=10)
failed=0

for part in $parts; do
    case $part in
    accordion)
        sweep accordion/table1_resnet18 "${images[@]}" measure.norms=true
        sweep accordion/table3_resnet18 "${images[@]}" measure.norms=true
        ;;
    alq)  # without the arm of one worker, which a typed number of epochs would cut short
        sweep alq/table2 "${images[@]}" measure.error=true \
            +arm=dense,alq_nuqsgd,alq_qsgdinf,alq_trn,alq,alq_n,alq_amq,alq_amq_n
        ;;
    local) sweep local_sgd/cifar "${images[@]}" ;;
    text)
        sweep accordion/lstm model=lstm_small dataset=pydocs
        sweep accordion/lstm model=lstm_small
        ;;
    report)
        for folder in "$runs"/*; do
            bash scripts/studies/report_kept.sh "$folder" "papers/${folder#"$runs"/}" comparison variance period
        done
        ;;
    esac
done
exit $failed
