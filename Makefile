# Every action is one verb; `make help` lists them. The first one that needs it sets up .venv from requirements.txt.
# With PY=python3 the given interpreter and what is installed beside it are used, and nothing is set up.
VENV := .venv
READY := $(VENV)/.ready
ARGS ?=
# CASE=d128-causal: what sass, profile, timeline, ablation and roofline look at; DIFF=rev: what sass compares with
CASE_WORDS = $(if $(CASE),--case "$(CASE)")

ifdef PY
PYTHON := PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PY)
SETUP :=
else
BASE_PYTHON ?= python3
PYTHON := $(VENV)/bin/python
SETUP := $(READY)
endif

.PHONY: help setup demo test test-gpu lint sass bench profile timeline ablation roofline training

help:
	@echo "make setup     make .venv and install the pinned versions of requirements.txt into it"
	@echo "make demo      attention over a real text: on a Hopper GPU its error and speed; without one its error and"
	@echo "               memory, and the kernel compiled to sm_90a"
	@echo "make test      all tests; those that need a Hopper GPU are skipped where there is none"
	@echo "make test-gpu  the tests that need a Hopper GPU; fails where there is none"
	@echo "               JOBS=8, also of make test: dealt out to so many processes; compiling takes most of the time"
	@echo "make lint      ruff: rules and formatting"
	@echo "make sass      registers, spills and main-loop instructions of the forward kernels and the gradients' main ones;"
	@echo "               needs no GPU"
	@echo "               CASE=d128-causal: of this one; DIFF=rev: what changed in them since that commit"
	@echo
	@echo "On a Hopper GPU; results go to profiling/results; ARGS=--help lists the options of each:"
	@echo "make bench     ours beside PyTorch and FlashAttention-4; ARGS='--suite forward|backward|training|decode|windows|varlen|scores --others --deterministic --graph --host'"
	@echo "make profile   CASE=d128-causal: Nsight Compute on one launch, and one page read from it"
	@echo "make timeline  CASE=d128-causal: what each warpgroup does over time, as a picture and for Perfetto"
	@echo "make ablation  the kernel without ping-pong, without overlap, without both; CASE as above, or four"
	@echo "make roofline  intensity against speed, and the generations of attention against the matrix product; likewise"
	@echo "make training  a small language model trained with our attention and PyTorch's: loss curves, do they agree"
	@echo
	@echo "PY=python3     use this interpreter and what is installed there; set up nothing"
	@echo "ARGS=...       further arguments of the demo, of pytest or of the script behind the verb"

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
ifdef JOBS
	@$(PYTHON) tests/parallel.py $(JOBS) $(ARGS)
else
	$(PYTHON) -m pytest $(ARGS)
endif

test-gpu: $(SETUP)
ifdef JOBS
	@$(PYTHON) tests/parallel.py $(JOBS) -m gpu --require-gpu $(ARGS)
else
	$(PYTHON) -m pytest -m gpu --require-gpu $(ARGS)
endif

lint: $(SETUP)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

sass: $(SETUP)
	@$(PYTHON) profiling/sass.py $(if $(DIFF),--diff "$(DIFF)") $(CASE_WORDS) $(ARGS)

bench: $(SETUP)
	@$(if $(CASE),echo "bench takes no CASE: its cases are ARGS='--head-dims 128 --seqlens 8192 --causal yes'" >&2; exit 2)
	@$(PYTHON) profiling/bench.py $(ARGS)

profile: $(SETUP)
	@$(PYTHON) profiling/ncu.py $(CASE_WORDS) $(ARGS)

timeline: $(SETUP)
	@$(PYTHON) profiling/timeline.py $(CASE_WORDS) $(ARGS)

ablation: $(SETUP)
	@$(PYTHON) profiling/ablation.py $(CASE_WORDS) $(ARGS)

roofline: $(SETUP)
	@$(PYTHON) profiling/roofline.py $(CASE_WORDS) $(ARGS)

training: $(SETUP)
	@$(PYTHON) profiling/training.py $(ARGS)
