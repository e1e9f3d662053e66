# `make run` and `make test` on a fresh clone do all their own set-up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: run test setup setup-test lint typecheck format gpu clean

# A recording to measure beside the published layers; without one, a small network is trained and recorded.
SPIKES ?= $(firstword $(wildcard ../shared/data/*.npz))

run: setup
	@spikes="$(SPIKES)"; \
	if [ -z "$$spikes" ]; then \
	    mkdir -p runs && $(BIN)/python examples/record_digits.py runs/digits.npz && spikes=runs/digits.npz; \
	fi; \
	$(BIN)/spikemark run --preset quick --spikes "$$spikes"

setup: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[digits]"
	touch $@

setup-test: $(VENV)/.installed-test
$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[test,dev]"
	touch $@

test: setup-test lint typecheck
	$(BIN)/python -m pytest tests

lint: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy must see the repository root as the package `spikemark`, as the install does.
typecheck: setup-test
	mkdir -p $(VENV)/typecheck && ln -sfn $(CURDIR) $(VENV)/typecheck/spikemark
	cd $(VENV)/typecheck && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p spikemark.kernels -p spikemark.harness -p spikemark.suites -p spikemark.reports -p spikemark.commands -m spikemark.runner

# On a machine with an NVIDIA GPU: tests marked gpu, verify, the full preset; leaves gpu-check/<date-time>.
gpu: setup-test
	scripts/gpu.sh

clean:
	rm -rf $(VENV) build dist *.egg-info
