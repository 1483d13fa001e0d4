# Each target stands on a stamp file, so that the set-up happens once and again only when what it reads has changed.
# The bench extra is on no stamp of `run` or `test`: nobody needs it to train.

PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt
# processes that share the tests, each with two cores of its own where there are more
JOBS ?= 2
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: run test lint docs bench soak clean

run: $(VENV)/.installed
	$(VENV)/bin/fabric-template fit

test: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pytest -q -n $(JOBS) --dist worksteal

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

bench: $(VENV)/.installed-bench
	$(VENV)/bin/python benchmarks/import_time.py
	$(VENV)/bin/python benchmarks/checkpoint.py
	$(VENV)/bin/python benchmarks/overhead.py

# about two hours on two free cores; a part or a smaller number: $(VENV)/bin/python soak/run.py --help
soak: $(VENV)/.installed-dev
	$(VENV)/bin/python soak/run.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and pinned: asked for together with the rest, pip may choose a newer one with its CUDA libraries
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
