# make demo    a real language model through the backend, checked against the uncompiled one
# make test    the tests
# make check   lint, types and tests, as CI runs them
#
# Each needs only Python 3.10+ and make: the first run creates $(VENV) and installs into it, later
# ones reuse it until pyproject.toml or one of the variables below changes.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers==5.17.0

# Searched for torch alone, beside pip's own index. A CPU build is a "+cpu" version, which pip ranks
# above the plain one, so it wins where this index can be reached; elsewhere pip warns once and takes
# the plain one, which on Linux x86-64 may be the larger CUDA build.
# For CUDA: make test TORCH_INDEX=https://download.pytorch.org/whl/cu130 (empty: pip's index only).
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_SEARCH := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX) --retries 1 --timeout 30)

# Test processes; each computes on one thread, so that they do not fight over the cores.
WORKERS ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
SETTINGS := $(VENV)/settings

.PHONY: demo demo-engine test lint format types check clean FORCE

demo: $(INSTALLED)
	$(BIN)/python examples/smollm2_demo.py $(DEMO_ARGS)

demo-engine: $(INSTALLED)
	$(BIN)/python examples/engine.py $(DEMO_ARGS)

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED)
	$(BIN)/mypy

check: lint types test

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

# Forced, as pip takes an installed +cpu build for as good as the +cu130 one that is now asked for.
$(INSTALLED): pyproject.toml $(SETTINGS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-deps --force-reinstall '$(TORCH)' $(TORCH_SEARCH)
	$(BIN)/python -m pip install '$(TORCH)' '$(TRANSFORMERS)' --editable '.[hf,demo,dev]'
	touch $@

# Rewritten only when a value changed, so that another torch is installed and the same one is not.
$(SETTINGS): FORCE
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "fx_prefill needs Python 3.10 or later; choose one with make PYTHON=/path/to/python3")'
	@mkdir -p $(VENV)
	@echo '$(PYTHON) $(TORCH) $(TORCH_INDEX) $(TRANSFORMERS)' > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
