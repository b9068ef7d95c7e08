# Two commands matter: `make demo` and `make test`. Both make .venv first.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test test-all lint types clean

demo: .venv/installed
	$(BIN)/deepsimplex demo

# Warnings are errors; the slow tier (long fuzzing, every row of every method) is test-all.
test: .venv/installed-test lint types
	$(BIN)/python -m pytest -n 2 -q

test-all: .venv/installed-test lint types
	$(BIN)/python -m pytest -n 2 -q -m "slow or not slow"

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed-test
	$(BIN)/mypy

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "deepsimplex needs Python 3.11 or newer; try: make PYTHON=python3.12 demo"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	@echo "Installing deepsimplex into .venv (once; torch is large) ..."
	$(PIP) install --constraint constraints.txt --editable .
	@touch $@

.venv/installed-test: .venv/installed
	$(PIP) install --constraint constraints.txt --editable ".[test]"
	@touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
