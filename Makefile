# All commands of the project. Each sets up what it needs in .venv first; nothing else is touched.

PYTHON ?= python3
WORKERS ?= 2
# Their programs are compiled one at a time in each process, which takes longer than running them.
GPU_WORKERS ?= 8
BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt
# One thread a worker: more would only compete for the same cores.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help test slow gpu demo lint format docs wheel clean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' Makefile

test: .venv/.stamp-test  ## run the tests (at most ten minutes on two cores)
	$(PYTEST) -n $(WORKERS) --durations=15

slow: .venv/.stamp-slow  ## run the slow proofs (minutes to hours)
	$(PYTEST) -m "slow and not gpu" --timeout=7200 --durations=0

gpu: .venv/.stamp-test  ## run the tests that need a GPU (a few minutes)
	$(PYTEST) -m gpu -n $(GPU_WORKERS) --durations=15 tests/gpu

demo: .venv/.stamp-lab  ## train NC-GRU, GRU and LSTM on the parenthesis task and write a report (about three minutes)
	$(BIN)/ncgru compare parenthesis-100 --models nc-gru-c,gru,lstm --quick --seeds 2

lint: .venv/.stamp-dev  ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.stamp-dev  ## rewrite the files in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/.stamp-dev  ## build the documentation into site/; every warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict

wheel: .venv/.stamp-test  ## build the wheel into dist/
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

clean:  ## remove everything that these commands made
	rm -rf .venv build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "ncgru needs Python 3.11 or newer; say which with: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv .venv

# The stamps say which set-up is done, so that it is repeated only when what it depends on has changed.
.venv/.stamp-test: pyproject.toml .ci/constraints.txt | .venv/bin/python
	$(INSTALL) -e '.[test]'
	@touch $@

.venv/.stamp-lab: pyproject.toml .ci/constraints.txt | .venv/bin/python
	$(INSTALL) -e '.[lab]'
	@touch $@

.venv/.stamp-slow: .venv/.stamp-test
	$(INSTALL) -e '.[test,ray]'
	@touch $@

.venv/.stamp-dev: .venv/.stamp-test
	$(INSTALL) -e '.[dev]'
	@touch $@
