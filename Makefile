# Every target works in a fresh clone with Python 3.11, 3.12 or 3.13, make and git only, whatever environment is active.
# The first of them that starts (shims of pyenv may not) and can make environments (Debian packs ensurepip apart).
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13,$(shell $(name) -c 'import ensurepip' 2> /dev/null && echo $(name))))
NO_PYTHON = no Python 3.11, 3.12 or 3.13 that can make environments is on the PATH. Install one, for instance with \
	apt install python3.13-venv, brew install python@3.13 or pyenv install 3.13, or name it: make PYTHON=/path/to/python3.13
VENV := .venv
VENV_OLDEST := .venv-oldest
VENV_NEWEST := .venv-newest
KERNELS := .venv-kernels
INSTALLED := $(VENV)/.installed
INSTALLED_KERNELS := $(KERNELS)/.installed
INSTALLED_OLDEST := $(VENV_OLDEST)/.installed
# Two single-threaded workers are faster than two that fight over the cores. A file goes to one of them, so that what its
# tests share is made once.
PYTEST := -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# `make test-all EACH=6` runs each sixth case of a slow test, and each second of hybrids; the others are for kernels and
# releases.
EACH := 1
EACH_KERNEL := 1
EACH_RELEASE := 3
# What touches Transformers, Accelerate or PEFT.
OF_RELEASES := $(addprefix tests/,checkpoints cli harness hybrids models surgery trainers)
export TOKENIZERS_PARALLELISM := false

# An environment that happens to be active must not leak into ours.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-slow test-kernels test-oldest test-newest lint format bench bench-full evidence docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(INSTALLED) ## train, fail, state passing, report: writes demo-output/
	$(VENV)/bin/lengthgen demo --output demo-output

test: export OMP_NUM_THREADS := 1
test: $(INSTALLED) ## run the tests that take a few minutes together
	$(VENV)/bin/python $(PYTEST) -m "not slow"

test-all: test-slow test-kernels test-oldest test-newest ## run all the other tests, too

test-slow: export OMP_NUM_THREADS := 1
test-slow: $(INSTALLED) ## run what `make test` leaves out
	$(VENV)/bin/python $(PYTEST) -m slow --each $(EACH)

test-kernels: export OMP_NUM_THREADS := 1
test-kernels: export TRITON_INTERPRET := 1
test-kernels: $(INSTALLED_KERNELS) ## run GPU kernels on the CPU, in Triton's interpreter
	PYTHONPATH=$(KERNELS) $(VENV)/bin/python $(PYTEST) --each $(EACH_KERNEL) tests/kernels

test-oldest: export OMP_NUM_THREADS := 1
test-oldest: $(INSTALLED_OLDEST) ## run those that touch Transformers with the oldest supported versions
	$(VENV_OLDEST)/bin/python $(PYTEST) -m "not slow" --each $(EACH_RELEASE) $(OF_RELEASES)

test-newest: export OMP_NUM_THREADS := 1
test-newest: $(INSTALLED) ## run them with the newest releases of the registry, if any is newer than the pinned one
	$(VENV)/bin/python .ci/newest.py $(VENV_NEWEST)
	if [ -e $(VENV_NEWEST) ]; then $(VENV_NEWEST)/bin/python $(PYTEST) -m "not slow" --each $(EACH_RELEASE) $(OF_RELEASES); fi

lint: $(INSTALLED) ## check style, formatting and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(INSTALLED) ## fix what can be fixed automatically
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(INSTALLED) ## measure the ratios that matter most in minutes, and say which fell
	$(VENV)/bin/python benchmarks/guard.py

bench-full: $(INSTALLED) ## measure speed and memory against Transformers
	$(VENV)/bin/python benchmarks/run.py

evidence: $(INSTALLED) ## repeat the studies of examples/ (hours; the same command goes on)
	$(VENV)/bin/python examples/evidence.py

docs: $(INSTALLED) ## build the documentation: writes site/
	$(VENV)/bin/python -m mkdocs build --strict

clean: ## remove builds, results and caches; the environments stay
	rm -rf build dist *.egg-info demo-output site .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(INSTALLED): constraints.txt
$(INSTALLED_OLDEST): constraints-oldest.txt
# torch comes first and alone: together with other requirements pip may prefer a far larger build for other hardware.
# setuptools comes before the build without isolation, so that it is pinned, too.
$(INSTALLED) $(INSTALLED_OLDEST): pyproject.toml
	$(if $(PYTHON),,$(error $(NO_PYTHON)))
	@echo "Installing into $(@D); this takes about two minutes the first time."
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --constraint $(filter constraints%,$^) torch
	$(@D)/bin/python -m pip install --quiet --constraint $(filter constraints%,$^) setuptools
	$(@D)/bin/python -m pip install --quiet --constraint $(filter constraints%,$^) --no-build-isolation --editable '.[dev]'
	@touch $@

# Beside the packages of the first environment, for a process that has this folder in its PYTHONPATH.
$(INSTALLED_KERNELS): constraints-kernels.txt $(INSTALLED)
	MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE $(VENV)/bin/python -m pip install --quiet --upgrade --no-deps \
		--no-build-isolation --target $(KERNELS) --requirement $<
	@touch $@
