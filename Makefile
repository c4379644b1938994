# Everything a stranger needs; each target sets up what it needs itself.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
INSTALL = $(PYTHON) tools/install.py --venv $(VENV)
# What the product needs, and what its tests, checks and benchmarks need besides.
RUN    := $(VENV)/.installed-to-run
STAMP  := $(VENV)/.installed

.PHONY: demo test lint proto reference bench install

install: $(STAMP)

$(RUN): pyproject.toml constraints.txt
	$(INSTALL) edge verifier coordinator
	touch $@

$(STAMP): $(RUN)
	$(INSTALL) dev
	touch $@

demo: $(RUN)
	$(BIN)/outrider demo

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.stubs --check
	$(BIN)/python -m tools.settings --check
	$(BIN)/python -m tools.reference --check

proto: $(STAMP)
	$(BIN)/python -m tools.stubs

reference: $(STAMP)
	$(BIN)/python -m tools.reference

bench: $(STAMP)
	$(BIN)/python -m benchmarks.lossless --quick
	$(BIN)/python -m benchmarks.failover --quick
	$(BIN)/python -m benchmarks.latency --quick
