# Every action is one verb; `make help` lists them. The first one that needs it sets up .venv from requirements.txt.
# With PY=python3 the given interpreter and what is installed beside it are used, and nothing is set up.
VENV := .venv
READY := $(VENV)/.ready
ARGS ?=

ifdef PY
PYTHON := PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PY)
SETUP :=
else
BASE_PYTHON ?= python3
PYTHON := $(VENV)/bin/python
SETUP := $(READY)
endif

.PHONY: help setup demo test test-gpu lint bench

help:
	@echo "make setup     make .venv and install the pinned versions of requirements.txt into it"
	@echo "make demo      attention over a real text: on a Hopper GPU its error and speed; without one its error and"
	@echo "               memory, and the kernel compiled to sm_90a"
	@echo "make test      all tests; those that need a Hopper GPU are skipped where there is none"
	@echo "make test-gpu  the tests that need a Hopper GPU; fails where there is none"
	@echo "make lint      ruff: rules and formatting"
	@echo "make bench     ours beside PyTorch and FlashAttention-4 on a Hopper GPU; ARGS='--graph --host' and more: ARGS=--help"
	@echo
	@echo "PY=python3     use this interpreter and what is installed there; set up nothing"
	@echo "ARGS=...       further arguments of demo, pytest or the benchmark"

setup: $(SETUP)

# Remade when the pins change. The stamp comes last: an installation that was cut short starts over.
$(VENV)/.ready: requirements.txt pyproject.toml
	@echo "setting up $(VENV) (some minutes at the first time: PyTorch is large)"
	@$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed: make BASE_PYTHON=..." >&2; exit 1; }
	$(BASE_PYTHON) -m venv --clear $(VENV)
	$(PYTHON) -m pip install --disable-pip-version-check -r requirements.txt
	$(PYTHON) -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(SETUP)
	@$(PYTHON) -m hopper_fa3 demo $(ARGS)

test: $(SETUP)
	$(PYTHON) -m pytest $(ARGS)

test-gpu: $(SETUP)
	$(PYTHON) -m pytest -m gpu --require-gpu $(ARGS)

lint: $(SETUP)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

bench: $(SETUP)
	@$(PYTHON) profiling/bench.py $(ARGS)
