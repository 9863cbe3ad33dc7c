# make demo is all that a newcomer needs; everything else is for work on the project.
#
#   PYTHON      the interpreter that makes .venv: the first found that is 3.11 or newer
#   PIP_ARGS    more for pip, such as --extra-index-url for torch without CUDA
#   DEMO_ARGS   for unisono demo, such as "--exit --json"
#   PYTEST_ARGS for pytest
#   TEST_JOBS   processes that run tests side by side, each a file at a time: 2

SHELL := /bin/bash
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
TEST_JOBS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast soak bench lint format types

help:
	@echo "make demo       a control plane, two workers and a training job on this machine"
	@echo "make setup      $(VENV) with all that is needed"
	@echo "make test       all tests; make test-fast leaves out the large matrices"
	@echo "make soak       a minute of random kills (UNISONO_SOAK_SECONDS=600: ten), and tensors of 2 GiB"
	@echo "make bench      the measurements of docs/performance.md (ten minutes, as root)"
	@echo "make lint       ruff and the import contracts; make format rewrites"
	@echo "make types      mypy, strict"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found; install one, or name it: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "error: $(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

# exec, so that a signal reaches the demo itself, with no shell in between
demo: $(STAMP)
	@exec $(BIN)/unisono demo $(DEMO_ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile $(PYTEST_ARGS)

test-fast: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile -m "not slow and not soak" $(PYTEST_ARGS)

soak: $(STAMP)
	$(BIN)/python -m pytest -m soak $(PYTEST_ARGS)

# the commands stand in the page itself; results and figures go back into it
bench: $(STAMP)
	mkdir -p build/bench
	sed -n '/^## How to measure/,/^```$$/ { /^```sh/,/^```$$/ { /^```/! p } }' docs/performance.md > build/bench/commands.sh
	cd build/bench && PATH="$(abspath $(BIN)):$$PATH" bash -euxo pipefail commands.sh
	$(BIN)/python docs/fill_tables.py build/bench

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy
