PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help setup demo test test-slow test-all check format proto bench clean

help:            ## Show this list
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */  make \1 \t/' | expand -t 20

setup: $(READY)  ## Make the virtual environment and install everything

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"Lorry needs Python 3.11 to 3.13, this is {v[0]}.{v[1]}; say which: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all,dev]'
	@touch $(READY)

demo: $(READY)   ## Train a real model through the real queue: progress, answers before and after, loss plot
	$(BIN)/python examples/demo.py

test: $(READY)   ## All tests but the slow ones (under 15 minutes on 2 cores)
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(READY) ## Only the slow tests
	$(BIN)/python -m pytest -m slow

test-all: test test-slow ## Every test

check: $(READY)  ## Lint, format, types and import rules, as CI runs them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY) ## Put the code into the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(READY)  ## Generate the wire format's code from wire.proto
	cd jobs && ../$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. lorry_jobs/wire.proto

bench: $(READY)  ## Run every benchmark; each prints a table and one line of JSON
	@for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean:           ## Remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
