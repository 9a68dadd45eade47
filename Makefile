# Every target but gpu-check sets up what it needs: a private virtual environment in .venv, made once and reused.

PYTHON ?= python3
TORCH ?= torch==2.13.0
RANKS ?= 2
WORKERS ?= 2
BIN := .venv/bin
RUN := OMP_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help venv demo test quick nightly lint format bench gpu-check env-report clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | awk -F'\t' '{printf "make %-12s %s\n", $$1, $$2}'

.venv/ready: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "setting up .venv (about a minute the first time)"
	@$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)" 2>&1 | grep -v "^WARNING" || true
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[test,lint]"
	@touch $@

venv: .venv/ready  ## make the virtual environment in .venv

demo: .venv/ready  ## train a tensor-parallel Llama with plain Inductor and with flashoverlap, and compare (RANKS=4 for 4 ranks)
	$(RUN) $(BIN)/torchrun --nproc-per-node $(RANKS) examples/train_tensor_parallel.py $(ARGS)

test: .venv/ready  ## run all tests (under 15 minutes on 2 cores)
	$(RUN) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

quick: .venv/ready  ## run the fast tests (under 90 seconds)
	$(RUN) FO_TEST_EXAMPLES=5 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not nightly"

nightly: .venv/ready  ## run what takes minutes to hours: long fuzzing, soak
	$(RUN) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --timeout 0 -m nightly
	$(RUN) FO_TEST_EXAMPLES=3000 $(BIN)/python -m pytest -n $(WORKERS) --timeout 0 tests/passes/test_rewrite_properties.py tests/passes/test_gradient_properties.py tests/passes/test_data_parallel.py

lint: .venv/ready  ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/ready  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/ready  ## measure (benchmarks/); results go to benchmarks/results/
	@$(BIN)/pip install --quiet --disable-pip-version-check -e ".[bench]"
	$(RUN) $(BIN)/python -m benchmarks

gpu-check:  ## check and measure kernels on the GPUs of this machine (under 8 minutes; PYTHON= the one with torch for CUDA)
	$(PYTHON) -m benchmarks.gpu_check $(ARGS)

env-report: .venv/ready  ## versions, devices and effective options, for a bug report
	@$(BIN)/fo-compiler env

clean:  ## remove the virtual environment and what was built
	rm -rf .venv build dist *.egg-info runs
