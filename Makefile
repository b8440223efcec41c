# Every target sets up what it needs in .venv, on any machine with Python 3.11; a second run skips that.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(shell command -v python3.11 python3))
MODEL ?= smollm2
TP ?= 1
PRESET ?= recall-mla-tp2
ARGS ?=

BIN := .venv/bin
CORE := .venv/.core-done
VLLM := .venv/.vllm-done
EVAL := .venv-eval/.eval-done
TESTKIT := $(wildcard scripts/testkit/* scripts/vllm_stub/*)

.PHONY: help run eval test check lint setup-core setup-vllm setup-eval clean

help:  ## What there is to run
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 18
	@echo 'make run takes MODEL=smollm2|tiny-mla|tiny-mla-gqa-draft|tiny-mqa|tiny-llama|tiny-qwen3|tiny-gemma3,'
	@echo 'TP=1|2, or TP=2,1: restarted at another number of ranks, and ARGS="--keep --json out.json"'

run: $(VLLM)  ## Serve a real model twice on one store: cold, then from kvtier's disk
	@$(BIN)/python -m scripts.serve_demo --model $(MODEL) --tp $(TP) $(ARGS)

eval: $(VLLM) $(EVAL)  ## lm-eval cold, restarted warm, warm again: PRESET=recall-mla-tp2
	@$(BIN)/python scripts/lm_eval_runs.py --preset $(PRESET) $(ARGS)

test: check $(VLLM) $(EVAL)  ## All tests, those with the real vLLM too
	@$(BIN)/pytest tests/unit -q -m slow -n 2
	@$(BIN)/pytest tests/integration $(ARGS)

check: lint  ## Style, types and the quick unit tests, without vLLM
	@$(BIN)/pytest tests/unit -x -q -m "not slow" -n 2 $(ARGS)

lint: $(CORE)  ## Style and types alone
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --strict storage tiering scripts

setup-core: $(CORE)  ## Only install what `make check` needs
setup-vllm: $(VLLM)  ## Only install vLLM as well, about 2 GB
setup-eval: $(EVAL)  ## Only install lm_eval, in a venv of its own, 0.8 GB

$(CORE): pyproject.toml scripts/setup_env.py
	@$(PYTHON) scripts/setup_env.py core
	@touch $@

$(VLLM): $(CORE) $(TESTKIT)
	@$(PYTHON) scripts/setup_env.py vllm
	@touch $@

$(EVAL): $(CORE) pyproject.toml
	@$(PYTHON) scripts/setup_env.py eval
	@touch $@

clean:  ## Remove the venv, the caches, the models and the demo's stores
	rm -rf .venv .venv-eval .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find storage tiering scripts tests -name __pycache__ -prune -exec rm -rf {} +
