# Everything a stranger needs; each target sets up what it needs itself.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test lint proto bench install

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/outrider demo

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.stubs --check

proto: $(STAMP)
	$(BIN)/python -m tools.stubs

bench: $(STAMP)
	$(BIN)/python -m benchmarks.lossless --quick
	$(BIN)/python -m benchmarks.failover --quick
	$(BIN)/python -m benchmarks.latency --quick
