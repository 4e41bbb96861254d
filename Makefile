# Two commands matter: `make demo` and `make test`. Everything else is a part of them or a long run.
#
# .venv is made once; two stamps say what is in it (demo = the product, test = with the test extra).
# Versions come from constraints.txt: `make constraints` renews it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# More than cores: half the time of a test is waiting for a process, a socket or a deadline.
WORKERS ?= 4
# Through the links, so that ruff sees kvplane.index and not a bare index.
PACKAGES := index events bootstrap transfer router engine
SOURCE := src $(PACKAGES:%=src/kvplane/%) tests bench

# Processes start here by the hundred, in half the time where what was compiled is kept (.gitignore).
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test check test-transfer bench soak constraints clean

help:
	@echo "make demo [ARGS=--once]  a whole plane with two prefill and two decode engines"
	@echo "make test                lint, types and all tests"
	@echo "make test-transfer       the transfer backends that need a package: Mooncake, NIXL (half a gigabyte)"
	@echo "make check | bench | soak | constraints | clean"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("kvplane needs Python 3.11 or newer: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	-$(BIN)/python -m pip install -q --disable-pip-version-check uv

# uv where it could be had, else pip: same files, same versions, slower.
install = echo "installing into $(VENV) ..."; if [ -x $(BIN)/uv ]; then $(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt $(1); \
	else $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt $(1); fi

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@$(call install,-e .)
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	@$(call install,-e '.[test]')
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	@exec $(BIN)/kvplane demo $(ARGS)

check: $(VENV)/.test
	$(BIN)/ruff format --check $(SOURCE)
	$(BIN)/ruff check $(SOURCE)
	$(BIN)/mypy

# The workers of a fresh copy would each compile all of it at once: here one does, beside mypy.
$(VENV)/.warm: $(VENV)/.test
	@touch $@; $(BIN)/pytest --collect-only -q >/dev/null 2>&1 &

# A file stays with one worker, so that planes of processes are started once; in the order of conftest.py.
test: $(VENV)/.warm check
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# The packages of these backends are big, and nixl-cu12 asks for torch, which host memory needs not:
# they have a venv of their own, nothing else is tested there, and what cannot run says why.
EXTRA := .venv-transfer
MOONCAKE ?= mooncake-transfer-engine-non-cuda==0.3.13.post1
NIXL ?= nixl-cu12==1.5.1

$(EXTRA)/.extra: pyproject.toml constraints.txt
	@$(MAKE) --no-print-directory VENV=$(EXTRA) $(EXTRA)/.test
	@echo "installing $(MOONCAKE) and $(NIXL) ..."
	-@$(EXTRA)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt '$(MOONCAKE)' && \
		$(EXTRA)/bin/python -m pip install -q --disable-pip-version-check --no-deps '$(NIXL)' && touch $@

test-transfer: $(EXTRA)/.extra
	$(EXTRA)/bin/python tests/transfer_extra/run.py $(ARGS)

bench: $(VENV)/.test
	$(BIN)/python -m bench $(ARGS)

soak: $(VENV)/.test
	$(BIN)/pytest -m hypothesis --hypothesis-profile=search -n $(WORKERS) --override-ini=timeout=1200
	$(BIN)/pytest tests/soak/soak_index.py tests/soak/soak_faults.py tests/soak/soak_aborts.py tests/soak/soak_openapi.py tests/soak/soak_long.py -s --override-ini=timeout=3600 $(ARGS)

constraints: $(VENV)/.test
	$(BIN)/uv pip compile --universal -q --no-header --no-emit-index-url --no-annotate --python-version 3.11 \
		--extra test --extra otel --extra envoy --extra k8s --upgrade pyproject.toml -o constraints.txt

clean:
	rm -rf $(VENV) .venv-transfer .run build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
