# Everything a stranger needs; each target sets up what it needs itself.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
INSTALL = $(PYTHON) tools/install.py --venv $(VENV)
# What the product needs, and what its tests, checks and benchmarks need besides.
RUN    := $(VENV)/.installed-to-run
STAMP  := $(VENV)/.installed
LINT   := style types imports generated docs
# Two workers more than cores, since tests wait much, but few, since some are timed. tests/conftest.py says what runs together.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 3 ? cores + 2 : 5)))
# Tests start hundreds of Python processes, which share compiled modules whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE
PYTEST  := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadscope --no-loadscope-reorder

.PHONY: demo test nightly test-vllm test-clients test-package check quick-tests lint $(LINT) proto reference bench install

install: $(STAMP)

$(RUN): pyproject.toml constraints.txt
	$(INSTALL) edge verifier coordinator
	touch $@

# In one go, since pip takes half a minute to find that what is there already will do.
$(STAMP): pyproject.toml constraints.txt
	$(INSTALL) dev
	touch $(RUN) $@

demo: $(RUN)
	$(BIN)/outrider demo

test: $(STAMP)
	$(PYTEST)

# The engine's contract and whole programs with vLLM, in an environment of its own.
VLLM_VENV ?= $(CURDIR)/.venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

$(VLLM_STAMP): $(STAMP) cloud_verifier/vllm_environment.py cloud_verifier/engine/vllm_backend/requirements.txt
	$(BIN)/python -m cloud_verifier.vllm_environment $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt \
		pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis
	touch $@

test-vllm: $(VLLM_STAMP)
	LD_PRELOAD=$$(ls $(VLLM_VENV)/lib/libiomp5.so) OMP_NUM_THREADS=1 PYTHONPATH=. OUTRIDER_REQUIRE_VLLM=1 \
		$(VLLM_VENV)/bin/python -m pytest tests/engine_contract
	OUTRIDER_VLLM_PYTHON=$(VLLM_VENV)/bin/python $(BIN)/python -m pytest tests/e2e/test_e2e_vllm.py

# Client libraries as their users have them, of the newest versions, in an environment of their own.
CLIENTS_VENV ?= $(CURDIR)/.venv-clients
test-clients: $(STAMP)
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet uv
	$(CLIENTS_VENV)/bin/uv pip install --quiet --python $(CLIENTS_VENV)/bin/python \
		langchain-openai instructor litellm openai-agents openai
	OUTRIDER_CLIENTS_PYTHON=$(CLIENTS_VENV)/bin/python $(BIN)/python -m pytest tests/e2e/test_e2e_clients.py

# The package as its users install it, in a bare environment, away from the sources; then the demo from it.
PACKAGE_VENV ?= $(CURDIR)/.venv-package
test-package:
	rm -rf dist && $(PYTHON) -m venv --clear $(PACKAGE_VENV)
	$(PACKAGE_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt build twine
	$(PACKAGE_VENV)/bin/python -m build --outdir dist
	$(PACKAGE_VENV)/bin/twine check --strict dist/*
	$(PYTHON) -m venv --clear $(PACKAGE_VENV)
	$(PYTHON) tools/install.py --venv $(PACKAGE_VENV) --wheel dist/outrider-*.whl edge verifier coordinator
	cd / && $(PACKAGE_VENV)/bin/outrider demo

# Random secrets for docker/compose.yaml, in a file that its owner alone can read. One that exists is left as it is.
docker/.env: | docker/.env.example
	umask 077 && while IFS= read -r line; do case $$line in \
		[A-Z]*=) line=$$line$$($(PYTHON) -c 'import secrets; print(secrets.token_hex(24))');; \
	esac; printf '%s\n' "$$line"; done < docker/.env.example > $@

# All of it: every schedule, mutant and kernel shape, vLLM, and the clients of others.
nightly: $(STAMP)
	OUTRIDER_NIGHTLY=1 $(MAKE) test test-vllm test-clients test-package

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
	$(BIN)/python -m tools.reference --check

# The site, in build/site. A dead link or anchor fails.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --strict

proto: $(STAMP)
	$(BIN)/python -m tools.stubs

reference: $(STAMP)
	$(BIN)/python -m tools.reference

bench: $(STAMP)
	$(BIN)/python -m benchmarks all --quick
