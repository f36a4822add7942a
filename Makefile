# Needs make and a Python >= 3.11 with pip and venv; all else goes into .venv.
# Another interpreter: PYTHON=python3.13 make test (rebuilds .venv when it differs).
# The site without running its notebooks: DOCS_EXECUTE=off make docs (see docs/conf.py).
# Options for pytest:  make test PYTEST_ARGS="-n 2 -k coal"; two processes by default.

PYTHON ?= python3
PYTEST_ARGS ?= -n 2 --dist worksteal

VENV := .venv
BIN := $(VENV)/bin

# What tells one interpreter from another; runs on any Python, to refuse the old ones.
IDENTITY := import sys; print(sys.version.split()[0] + " " + getattr(sys, "base_prefix", sys.prefix))

.PHONY: help install test slow demo papers lint docs docs-serve clean distclean FORCE
.DELETE_ON_ERROR:
.NOTPARALLEL:

help:
	@echo "make install    the package, editable, in $(VENV)"
	@echo "make test       install with the test extra, then run the tests"
	@echo "make slow       the tests marked slow, which make test leaves out"
	@echo "make demo       the coal-mining example with its default options"
	@echo "make papers DATA=folder    the tables of the papers (hours; goes on)"
	@echo "make lint       ruff and mypy"
	@echo "make docs       the site, in docs/_build/html; runs its tutorials (minutes)"
	@echo "make docs-serve the same site at http://localhost:8000"
	@echo "make clean      remove caches and build outputs"
	@echo "make distclean  the same, and $(VENV)"

install: $(VENV)/.installed

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# These run with what XLA does by itself; make test compiles in haste (tests/conftest.py).
slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

demo: $(VENV)/.installed-mcmc
	$(BIN)/python examples/coal_mining.py

papers: $(VENV)/.installed
	@test -n "$(DATA)" || { echo "error: make papers DATA=folder-with-the-data" >&2; exit 1; }
	$(BIN)/python benchmarks/papers.py --data "$(DATA)"

lint: $(VENV)/.installed-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

# Pages of source code have anchors for what is documented; old ones would not be mended.
docs: $(VENV)/.installed-docs
	rm -rf docs/_build/html/_modules
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	$(BIN)/python docs/check_links.py docs/_build/html

docs-serve:
	@test -e docs/_build/html/index.html || { echo "error: run make docs first" >&2; exit 1; }
	$(BIN)/python -m http.server --bind localhost --directory docs/_build/html 8000

# The stamp's time changes only when .venv is made anew, so what depends on it is
# installed again then, and when pyproject.toml changes, and not otherwise.
$(VENV)/.interpreter: FORCE
	@wanted=$$($(PYTHON) -c '$(IDENTITY)') || { \
	  echo "error: cannot run '$(PYTHON)'; name a Python >= 3.11, e.g. make PYTHON=python3.13 $(MAKECMDGOALS)" >&2; \
	  exit 1; }; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: numpyro-sgp needs Python >= 3.11, but '$(PYTHON)' is Python $${wanted%% *}; name another, e.g. make PYTHON=python3.13 $(MAKECMDGOALS)" >&2; \
	  exit 1; }; \
	found=$$($(BIN)/python -c '$(IDENTITY)' 2>/dev/null) || found=; \
	if [ "$$found" != "$$wanted" ]; then \
	  echo "making $(VENV) with Python $$wanted"; \
	  rm -rf $(VENV); \
	  $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; \
	  touch $@; \
	elif [ ! -e $@ ]; then \
	  touch $@; \
	fi

$(VENV)/.installed: $(VENV)/.interpreter pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-%: $(VENV)/.interpreter pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	@touch $(VENV)/.installed $@

clean:
	rm -rf build dist docs/_build docs/reference/api .pytest_cache .ruff_cache .hypothesis .jax_cache
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
