#!/usr/bin/env bash
# A report with all figures in results/report/NAME, and what stays in the repository of it in results/NAME: the page with
# its table, the table as CSV, and the figures that are named; the first is on the page.
#
#   scripts/studies/report_kept.sh RUNS NAME FIGURE...
set -euo pipefail
cd "$(dirname "$0")/../.."
runs=$1 name=$2
shift 2
python=${PYTHON:-.venv/bin/python}
out=results/report/$name kept=results/$name
"$python" -m accordion_bench.report "$runs" --out "$out" --figures png
mkdir -p "$kept"
cp "$out/table.csv" "$kept"
sed "s/!\[comparison\](comparison.png)/![$1]($1.png)/" "$out/README.md" >"$kept/README.md"
for figure in "$@"; do
    if [ -f "$out/$figure.png" ]; then cp "$out/$figure.png" "$kept"; fi
done
"$python" -m scripts.few_colours "$kept"/*.png
