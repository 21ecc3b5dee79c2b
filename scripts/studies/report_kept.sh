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
# of several settings a figure is FIGURE-SETTING.png
sed -E "s/!\[comparison(-[^]]*)?\]\(comparison(-[^)]*)?\.png\)/![$1\1]($1\2.png)/" "$out/README.md" >"$kept/README.md"
shopt -s nullglob
for figure in "$@"; do
    for drawn in "$out/$figure.png" "$out/$figure"-*.png; do
        if [ -f "$drawn" ]; then cp "$drawn" "$kept"; fi
    done
done
"$python" -m scripts.claims.kept "$kept/README.md"
