# Every target sets up what it needs in .venv, on any machine with Python 3.11; a second run skips that.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(shell command -v python3.11 python3))
MODEL ?= smollm2
TP ?= 1
ARGS ?=

BIN := .venv/bin
CORE := .venv/.core-done
VLLM := .venv/.vllm-done
TESTKIT := $(wildcard scripts/testkit/* scripts/vllm_stub/*)

.PHONY: help run test check lint setup-core setup-vllm clean

help:  ## What there is to run
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 18
	@echo 'make run takes MODEL=smollm2|tiny-mla|tiny-mla-gqa-draft|tiny-mqa|tiny-llama|tiny-qwen3,'
	@echo 'TP=1|2, or TP=2,1: restarted at another number of ranks, and ARGS="--keep --json out.json"'

run: $(VLLM)  ## Serve a real model twice on one store: cold, then from kvtier's disk
	@$(BIN)/python -m scripts.serve_demo --model $(MODEL) --tp $(TP) $(ARGS)

test: check $(VLLM)  ## All tests, those with the real vLLM too
	@$(BIN)/pytest tests/integration $(ARGS)

check: lint  ## Style, types and unit tests, without vLLM
	@$(BIN)/pytest tests/unit -x -q $(ARGS)

lint: $(CORE)  ## Style and types alone
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --strict storage tiering scripts

setup-core: $(CORE)  ## Only install what `make check` needs
setup-vllm: $(VLLM)  ## Only install everything, about 2 GB

$(CORE): pyproject.toml scripts/setup_env.py
	@$(PYTHON) scripts/setup_env.py core
	@touch $@

$(VLLM): $(CORE) $(TESTKIT)
	@$(PYTHON) scripts/setup_env.py vllm
	@touch $@

clean:  ## Remove the venv, the caches, the models and the demo's stores
	rm -rf .venv .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find storage tiering scripts tests -name __pycache__ -prune -exec rm -rf {} +
