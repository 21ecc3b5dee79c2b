#!/usr/bin/env bash
# Builds the wheel into dist/, installs it into a new environment, and uses it from an empty folder, without kernels and
# with them (the extra `fast`). PYTHON=python3.13 tries it on another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=$PWD/.venv/bin/uv
python=${PYTHON:-$PWD/.venv/bin/python}
constraints=$PWD/constraints.txt
rm -rf dist
"$uv" build --quiet --wheel --no-build-isolation --python .venv/bin/python
wheel=$(echo "$PWD"/dist/*.whl)

there=$(mktemp -d)
trap 'rm -rf "$there"' EXIT
"$uv" venv --quiet --python "$python" "$there/env"
"$uv" pip install --quiet --python "$there/env/bin/python" --constraint "$constraints" "$wheel"
cd "$there"
unset PYTHONPATH
env/bin/accordion-bench --version
env/bin/accordion-bench epochs=1 compressor=powersgd
env/bin/accordion-bench demo --epochs 1
test -s results/report/comparison.png
env/bin/python -m accordion_bench.report results/runs | tee said
grep "no report.html.*type pip install 'accordion-bench\[report\]'" said
env/bin/python - <<'PYTHON'
from importlib.resources import files
from importlib.util import find_spec

package = files("accordion_bench")
for name in ("py.typed", "conf/config.yaml", "conf/compressor/powersgd.yaml"):
    assert package.joinpath(name).is_file(), f"{name} must be in the wheel"
assert find_spec("wandb") is None, "a run must need no telemetry"
PYTHON
if env/bin/accordion-bench tracker=wandb 2>said; then
    echo "tracker=wandb must be refused without wandb" >&2
    exit 1
fi
grep "type pip install 'accordion-bench\[wandb\]'" said

faster="type pip install 'accordion-bench\[fast\]'"
env/bin/accordion-bench epochs=1 compressor=qsgd | tee said
grep --quiet "$faster" said
"$uv" pip install --quiet --python env/bin/python --constraint "$constraints" "accordion-bench[fast] @ file://$wheel"
env/bin/python -m accordion_bench.conformance.compile_kernels
env/bin/accordion-bench epochs=1 compressor=qsgd | tee said
if grep --quiet "$faster" said; then
    echo "with numba nothing more must be asked for" >&2
    exit 1
fi
"$uv" pip install --quiet --python env/bin/python --constraint "$constraints" "accordion-bench[report] @ file://$wheel"
env/bin/python -m accordion_bench.report results/runs
test -s results/report/report.html
echo "the wheel works: $(basename "$wheel")"
