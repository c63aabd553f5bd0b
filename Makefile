# Everything a newcomer types. Each target makes what it needs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint bench clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/' | expand -t 14

setup:  ## make .venv and install everything (about 2 minutes, 4 GB)
	@$(PYTHON) molt/bootstrap.py $(VENV)

demo: setup  ## train a real model on two CPU cores, about 6 minutes (ARGS="--set run.dir=runs/two")
	@$(BIN)/molt train molt/recipes/demo.toml $(ARGS)

test test-slow: export HF_HUB_OFFLINE = 1
test: setup  ## the test suite, real vLLM, Ray and FSDP2 included
	$(BIN)/python -m pytest $(ARGS)

test-slow: export MOLT_RESULTS ?= tests/faults/RESULTS.md
test-slow: setup  ## the long fault, soak and learning tests; counts go to tests/faults/RESULTS.md
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy

bench: setup  ## every benchmark of tests/bench beside its peers (ARGS="--only append,read")
	$(BIN)/python tests/bench/run.py $(ARGS)

clean:  ## remove the environment and caches; logs in runs/ stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
