# Everything a stranger needs; each target sets up what it needs itself.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
INSTALL = $(PYTHON) tools/install.py --venv $(VENV)
# What the product needs, and what its tests, checks and benchmarks need besides.
RUN    := $(VENV)/.installed-to-run
STAMP  := $(VENV)/.installed
LINT   := style types imports generated structure
# One worker more than cores, since tests wait much, but few, since some are timed. tests/conftest.py says what runs together.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores + 1 : 5)))
# Tests start hundreds of Python processes, which share compiled modules whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE
PYTEST  := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadscope --no-loadscope-reorder

.PHONY: demo test check quick-tests lint $(LINT) proto reference bench install

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
	$(PYTEST)

# For those who change code: everything that is quick, in a few minutes.
check: $(STAMP)
	$(MAKE) --jobs 2 --keep-going lint quick-tests

quick-tests: $(STAMP)
	$(PYTEST) -m "not e2e and not slow"

lint: $(LINT)

style: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

generated: $(STAMP)
	$(BIN)/python -m tools.stubs --check
	$(BIN)/python -m tools.settings --check
	$(BIN)/python -m tools.reference --check

structure: $(STAMP)
	$(BIN)/python -m tools.structure --check

proto: $(STAMP)
	$(BIN)/python -m tools.stubs

reference: $(STAMP)
	$(BIN)/python -m tools.reference

bench: $(STAMP)
	$(BIN)/python -m benchmarks.lossless --quick
	$(BIN)/python -m benchmarks.failover --quick
	$(BIN)/python -m benchmarks.latency --quick
