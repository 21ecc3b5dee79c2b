.DEFAULT_GOAL := help
SHELL := /bin/bash
BIN := .venv/bin
RUN := $(BIN)/python
# one process more than there are cores, since some tests wait; a file stays in one of them, since its tests share what
# they have made; what Python has compiled is kept, or each process compiles all tests anew
CORES := $(shell getconf _NPROCESSORS_ONLN)
TESTS := PYTHONDONTWRITEBYTECODE= $(RUN) -m pytest -n $(shell expr $(CORES) + 1) --maxprocesses 8 --dist loadfile --no-loadscope-reorder

.PHONY: help install demo demo-report test test-slow test-integrations test-browser test-avx2 check test-multigpu gpu-report lint wheel docs bench netlab figures methods clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: .venv/.installed  ## set up .venv (every other target does this by itself); TORCH=cpu: another build of torch

ifeq ($(origin TORCH),command line)
.PHONY: .venv/.installed
endif
.venv/.installed: pyproject.toml constraints.txt build-tools.txt scripts/setup.sh
	@bash scripts/setup.sh
	@touch $@

demo: install  ## dense, PowerSGD weak, PowerSGD strong and Accordion on real data; one table, one figure
	@$(RUN) -m accordion_bench demo

demo-report: install  ## the report of kept runs in seconds: the same arms on CIFAR-10 with five seeds, nothing trained
	@bash scripts/demo_report.sh

test: install  ## the default test suite, with links between network namespaces where this machine has them
	@$(TESTS) -m 'not slow and not gpu and not integrations and not browser'

test-slow: install  ## what takes minutes and is not in the default suite
	@$(TESTS) -m slow

test-integrations: install  ## the examples of other people's trainers: Lightning, Accelerate, Hugging Face
	@$(RUN) -m pytest -m integrations tests/examples

test-browser: install  ## the report's page in a real browser (on Debian: apt-get install chromium)
	@$(TESTS) -m browser tests/report

test-avx2: install  ## precision, forward pass and codecs as on a processor without AVX-512
	@ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx2,+f16c,+fma \
		$(TESTS) tests/forward tests/compressors

test-multigpu: install  ## what needs two GPUs or more
	@$(RUN) -m pytest -m gpu -rs tests/processes/test_multigpu.py

gpu-report: install  ## what a GPU must still show: correctness, launches, times, memory; results/gpu
	@$(RUN) -m scripts.gpu.report

check: lint test  ## lint, types, imports, tests

lint: install  ## lint, types, imports
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache --no-logo

wheel: install  ## the wheel in dist/, tried in an environment of its own
	@bash scripts/try_wheel.sh

docs: install  ## the documentation site, build/site/html/index.html; its tools stay out of .venv
	@$(RUN) -m scripts.site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/uv run --quiet --no-project --with-requirements docs-tools.txt mkdocs build --quiet --config-file build/site/mkdocs.yml

bench: install  ## step-time ratios against plain PyTorch and DistributedDataParallel; codec speed next to a copy
	@$(RUN) -m scripts.bench.step
	@$(RUN) -m scripts.bench.codec
	@$(RUN) -m scripts.bench.codec --flat

netlab: install  ## step times behind shaped links next to DistributedDataParallel (root)
	@$(RUN) -m scripts.bench.netlab

figures: install  ## the figures and tables of results/demo and results/compressors, from new runs
	@bash scripts/studies/figures.sh

methods: install  ## those of results/local_methods; DATA=FOLDER with cifar-10-batches-py, else digits only
	@$(RUN) -m scripts.studies.local_methods $(if $(DATA),--data $(DATA))

clean:  ## remove the environment and caches; keeps results
	rm -rf .venv .venv.old .venv.gone build dist .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
