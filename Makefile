# Every target prepares .venv itself. CONTRIBUTING.md lists the same things as plain
# commands.

PYTHON ?= python3
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check
RUN = .venv/bin/python

.PHONY: help venv demo test test-libraries lint docs bench clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:
	@echo "make demo   train a small network on handwritten digits with 4 replicas"
	@echo "make test   run all tests"
	@echo "make test-libraries  run the tests of datasets with torch, tf.data and others"
	@echo "make lint   check style, format and types"
	@echo "make docs   build the documentation into docs/_build/html"
	@echo "make bench  run the quick benchmarks"
	@echo "make venv   prepare .venv with everything that the targets need"
	@echo "make clean  remove .venv and all that was built"

demo: .venv/.examples
	$(RUN) examples/digits.py

test: .venv/.test
	$(RUN) -m pytest -n 2 --dist worksteal

# In an environment of its own, since these are heavy. The working directory must not be
# on the path: its folder `datasets` would shadow the library of that name.
test-libraries: .venv-libraries/.ready
	.venv-libraries/bin/python -P -m pytest -rs tests/test_datasets_adapters.py

.venv-libraries/.ready: pyproject.toml tests/requirements-libraries.txt
	$(PYTHON) -m venv .venv-libraries
	.venv-libraries/bin/python -m pip install --quiet --disable-pip-version-check \
	  -e ".[test]" -r tests/requirements-libraries.txt
	@touch $@

lint: .venv/.dev
	rm -rf build/types && mkdir -p build/types/replicax
	cd build/types/replicax && \
	  ln -s ../../../replicax/*.py ../../../strategies ../../../datasets .
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m pyright

docs: .venv/.docs
	$(RUN) -m sphinx -E -n -W --keep-going -q docs docs/_build/html
	@echo "docs: docs/_build/html/index.html"

bench: .venv/.test
	$(RUN) benchmarks/run.py

venv: .venv/.dev

clean:
	rm -rf .venv .venv-libraries build dist docs/_build .pytest_cache .ruff_cache .hypothesis
	rm -rf replicax.egg-info benchmarks/results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One mark a set of extras, so that the demo does not wait for the documentation's
# tools. A mark older than pyproject.toml is made anew.
.venv/.%: pyproject.toml | .venv/bin/python
	$(PIP) -e ".[$*]"
	@touch $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Replicax needs Python 3.11 or newer. $(PYTHON) is" \
	    "$$({ $(PYTHON) --version || echo not there; } 2>/dev/null)." >&2; \
	  echo "Name another one: make PYTHON=python3.13 $(MAKECMDGOALS)" >&2; \
	  exit 1; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
