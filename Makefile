# `make demo` and `make test` set themselves up on a machine that has Python 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLD := .venv-oldest
OLDEST := 5.17.0

.PHONY: demo demo-short test check model slow oldest docs clean
.DEFAULT_GOAL := test

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo,docs,dev]'
	touch $@

$(OLD)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLD)
	$(OLD)/bin/python -m pip install --quiet --upgrade pip
	$(OLD)/bin/python -m pip install --quiet -c constraints.txt -e '.[demo,dev]' 'transformers==$(OLDEST)'
	touch $@

demo: $(VENV)/installed  ## A real model under several policies beside the full cache; writes demo.png
	$(BIN)/python examples/demo.py

demo-short: $(VENV)/installed
	mkdir -p build && $(BIN)/python examples/demo.py --short --out build/demo-short.png

test: check  ## Lint, types and all tests that take seconds
	$(BIN)/python -m pytest -n 2 -m "not slow and not model"

check: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

model: $(VENV)/installed  ## Tests on the demo model, which they fetch
	$(BIN)/python -m pytest -m "model and not slow"

slow: $(VENV)/installed  ## Tests that take minutes
	$(BIN)/python -m pytest -m slow

oldest: $(OLD)/installed  ## The contract tests on the oldest transformers
	$(OLD)/bin/python -m pytest -n 2 -p no:cacheprovider tests/contract

docs: $(VENV)/installed  ## The documentation site, strictly, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) $(OLD) build .pytest_cache .ruff_cache .hypothesis
