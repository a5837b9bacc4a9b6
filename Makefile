# Two commands do all set-up on a fresh Debian or Ubuntu: `make run` and `make test`.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
# As root nothing may be written into the tree that its owner cannot remove.
SUDO := $(if $(filter 0,$(shell id -u)),,sudo -E env PYTHONDONTWRITEBYTECODE=1 HYPOTHESIS_STORAGE_DIRECTORY=/tmp/sysom-hypothesis)
PLAIN := $(if $(filter 0,$(shell id -u)),,-p no:cacheprovider)
PYTEST_ARGS ?=

.PHONY: run test lint format bench setup clean

run: ## Everything on this machine; without Slack tokens with a local workspace and a demo job
	@deploy/setup run
	@if [ -n "$(SUDO)" ] && command -v sudo >/dev/null && sudo -v; then $(SUDO) $(BIN)/sysom up --demo; else $(BIN)/sysom up --demo; fi

test: lint ## All tests, set-up included
	@$(SUDO) $(BIN)/python -m pytest -n 2 $(PLAIN) $(PYTEST_ARGS)

lint: ## ruff and strict type checks
	@deploy/setup test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format:
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: ## Measurements; see docs/benchmarks.md
	@deploy/setup test
	@$(SUDO) $(BIN)/python -m bench

setup: ## Only the set-up of `make run`
	@deploy/setup run

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build *.egg-info
