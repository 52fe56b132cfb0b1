# `make demo` and `make test` set up all they need in .venv, once, and then run.

PYTHON  ?= python3
JOBS    ?= 2        # pytest workers; 0 runs in one process
TIMEOUT ?= 120      # seconds a single test may take
ARGS    ?=

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP   := $(BIN)/python -m pip --disable-pip-version-check

# Ranks are processes, so each gets one thread. Some virtual machines announce AMX and cannot run it.
export OMP_NUM_THREADS ?= 1
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench docs tables clean

help:
	@echo "make demo    see weft at work"
	@echo "make test    lint, type check, test (ARGS='-k name' picks tests, JOBS=2 runs them in two processes)"
	@echo "make lint    ruff and mypy alone"
	@echo "make bench   list the benchmarks (ARGS='NAME --json' runs one)"
	@echo "make docs    write the references anew and build the documentation in site/"
	@echo "make tables  write the measured tables of the documentation anew, from build/bench or FROM='a.json folder'"
	@echo "make clean   remove caches; .venv stays"

setup: $(STAMP)

# setuptools first and pinned: without build isolation the build fetches nothing of its own.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) ..."
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "weft needs Python 3.11 to 3.13, found $$($(PYTHON) --version 2>&1); try: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -qq -c constraints.txt setuptools
	@$(PIP) install -qq -c constraints.txt --no-build-isolation -e '.[all]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python examples/demo.py $(ARGS)

test: lint
	@$(BIN)/python -m pytest --timeout=$(strip $(TIMEOUT)) -n $(strip $(JOBS)) $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: $(STAMP)
	@$(BIN)/weft bench $(ARGS)

docs: $(STAMP)
	@$(BIN)/python -m tools.refusals
	@$(BIN)/python -m tools.reference
	@$(BIN)/python -m tools.site site

tables: $(STAMP)
	@$(BIN)/python -m tools.tables $(FROM)

clean:
	rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
