#!/usr/bin/env bash
# Modelled against measured time: a probe of the link gives latency, rate and burst; other runs on that link are then
# modelled with these and measured. Table: results/validate_model.
#
#   scripts/studies/validate_model.sh [HOSTS] [RATE...]       2 hosts, 100mbit and 1gbit; needs root (network namespaces)
set -euo pipefail
cd "$(dirname "$0")/../.."
hosts=${1:-2}
shift || true
rates=${*:-100mbit 1gbit}
python=${PYTHON:-.venv/bin/python}
runs=results/runs/validate_model
export OMP_NUM_THREADS=1

for rate in $rates; do
    probe=$runs/probe-$hosts-$rate
    if [ ! -f "$probe/probe.json" ]; then
        "$python" -m accordion_bench.netlab --hosts "$hosts" --rate "$rate" --probe --out "$probe"
    fi
    link=$("$python" -c 'import json, sys; from accordion_bench.netlab.__main__ import to_type; print(to_type(json.load(open(sys.argv[1]))))' \
        "$probe/probe.json")
    for compressor in none powersgd topk efsignsgd; do
        for seed in ${SEEDS:-0 1 2}; do
            # shellcheck disable=SC2086
            "$python" -m accordion_bench.netlab --hosts "$hosts" --rate "$rate" -- $link "compressor=$compressor" \
                model=resnet20 dataset=digits epochs=3 "seed=$seed" resume_sweep=true "paths.runs=$runs/$hosts-$rate"
        done
    done
    bash scripts/studies/report_kept.sh "$runs/$hosts-$rate" "validate_model/$hosts-hosts-$rate" breakdown
done
