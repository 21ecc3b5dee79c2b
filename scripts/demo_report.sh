#!/usr/bin/env bash
# A report in seconds, from runs that are kept here: dense, PowerSGD weak and strong, and Accordion between the two, on
# a narrow VGG-19 and CIFAR-10 with five seeds. bash scripts/demo_report.sh [OUT] (default: results/demo_report)
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-results/demo_report}
python=${PYTHON:-.venv/bin/python}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m tarfile -e results/claims/rank/runs.tar.xz "$scratch"
"$python" -m accordion_bench.report "$scratch"/rank/vgg19/count/{dense,weak,strong,accordion}-* --out "$out"
echo "the figure: $out/comparison.png; the page: $out/report.html"
