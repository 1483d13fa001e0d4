# The files .venv/.installed* record what is installed. make installs again when pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt
# The number of processes that run the tests.
JOBS ?= 2
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: run test coverage lint docs bench bench-gpu soak clean

run: $(VENV)/.installed
	$(VENV)/bin/fabric-template fit

test: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pytest -q -n $(JOBS) --dist worksteal

# Python 3.12 or later measures coverage at almost no cost. Earlier versions take about twice as long.
coverage: $(VENV)/.installed-dev
	COVERAGE_CORE=sysmon $(VENV)/bin/python -m pytest -q -n $(JOBS) --dist worksteal --cov --cov-report=term:skip-covered

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

# The commands of benchmarks/RESULTS.md, on the CPU. The last one needs valgrind.
bench: $(VENV)/.installed-bench
	$(VENV)/bin/python benchmarks/overhead.py --rounds 7
	$(VENV)/bin/python benchmarks/steps.py --rounds 15
	$(VENV)/bin/python benchmarks/import_time.py
	$(VENV)/bin/python benchmarks/scaling.py
	$(VENV)/bin/python benchmarks/once.py
	$(VENV)/bin/python benchmarks/loader.py
	$(VENV)/bin/python benchmarks/epoch.py --problem mnist --device cpu
	$(VENV)/bin/python benchmarks/checkpoint.py
	$(VENV)/bin/python benchmarks/tuned.py --rounds 3
	$(VENV)/bin/python benchmarks/killed.py --runs 30 --seed 1
	$(VENV)/bin/python benchmarks/instructions.py

bench-gpu: $(VENV)/.installed-bench
	$(VENV)/bin/python -m pytest -q -m gpu
	$(VENV)/bin/python benchmarks/epoch.py --problem mnist
	$(VENV)/bin/python benchmarks/transformer.py
	$(VENV)/bin/python benchmarks/epoch.py --problem cifar

# Takes about two hours on two free cores. For one part or fewer runs, see $(VENV)/bin/python soak/run.py --help.
soak: $(VENV)/.installed-dev
	$(VENV)/bin/python soak/run.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch is installed first. Otherwise pip may choose a newer version with several gigabytes of CUDA libraries.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once; a few minutes)"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet $(TORCH)
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(INSTALL) --editable '.[dev]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@$(INSTALL) --editable '.[docs]'
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed-dev
	@$(INSTALL) --editable '.[dev,bench]'
	@touch $@
