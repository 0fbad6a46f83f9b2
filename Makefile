# make train   the embedded run, from nothing: environment, packages, 300 updates on two CPU cores (resumes if run again)
# make test    the test suite            make test-all   with the slow ones
# make lint    ruff and pyright          make clean      remove what the above made, the runs excepted
# make aot EXTRA=tpu    docs/aot.md anew: full-size programs compiled for TPUs that are not there (hours; ARGS='--only=CASE')
#
# PYTHON=...   the interpreter to build .venv with (3.11 to 3.13)
# EXTRA=tpu | cuda12 | cuda13            add JAX's packages for that accelerator
# ARGS='...'   passed on: make train ARGS='--config.updates=20', make test ARGS='-k lag'

SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
UV := $(VENV)/bin/uv pip install --quiet --python $(PY)
UV_VERSION := 0.13.9
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3.11 python3.13 python3.12 python3 python; do \
	$$p -c '$(SUPPORTED)' 2>/dev/null && { echo $$p; break; }; done)
PINS_OF := import sys; print("requirements/py311.txt" if sys.version_info[:2] == (3, 11) else "requirements/py312.txt")
EXTRA ?=
STAMP := $(VENV)/.installed$(addprefix -,$(EXTRA))

.PHONY: train test test-all lint aot clean venv

train: $(STAMP)
	$(PY) -m jaxrl_sat.main --config=configs/sat_grpo.py --workdir=runs/sat_grpo $(ARGS)

test: $(STAMP)
	$(PY) -m pytest $(ARGS)

test-all: $(STAMP)
	$(PY) -m pytest -m '' $(ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m pyright

aot: $(STAMP)
	$(PY) -m jaxrl_sat.report.aot_table $(ARGS)

venv: $(STAMP)

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache

# uv comes by pip, into the environment itself. Its override leaves out the TensorFlow that JetStream's seqio asks for.
$(STAMP): requirements/py311.txt requirements/py312.txt requirements/overrides.txt
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
	  [ -n "$(PYTHON)" ] || { echo "no Python 3.11, 3.12 or 3.13 found: give one as PYTHON=/path/to/python" >&2; exit 2; }; \
	  echo "making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@$(PY) -c '$(SUPPORTED)' || { echo "$(VENV) holds a Python that is not 3.11 to 3.13: remove it" >&2; exit 2; }
	@echo "installing the pinned packages of $$($(PY) -c '$(PINS_OF)')"
	@$(PY) -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@pins=$$($(PY) -c '$(PINS_OF)'); \
	  $(UV) --override requirements/overrides.txt -r $$pins $(if $(EXTRA),"jax[$(EXTRA)]==$$(sed -n 's/^jax==//p' $$pins)")
	@$(UV) --no-deps --no-build-isolation --editable .
	@touch $@
