# One environment in .venv, made when it is missing or pyproject.toml is newer; everything runs in it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export OMP_NUM_THREADS ?= 1
# Compiled files are kept: tests run copies of the source, and take its compiled files along.
export PYTHONDONTWRITEBYTECODE :=
# Two at a time, each beginning with one half: most fixtures of a module are made once.
WORKERS := -n 2 --dist worksteal

.PHONY: replay test whole check fast lint types perf peers docs clean

replay: $(READY)  ## the main job: the trained model, every event, both sides
	$(BIN)/instep replay fixtures/traces/adaptive.jsonl

# The main trace is `make replay`, which CI runs, too.
test: $(READY)  ## every test; a few of the recorded traces, in which all happens that happens in any
	$(BIN)/python -m pytest -q $(WORKERS) -m "not timing" -p no:benchmark tests --instep-traces=fixtures/traces --instep-ops=ledger --instep-ops=plain
	$(BIN)/python -m pytest -q -m timing tests/harness/test_gate.py tests/perf

whole: $(READY)  ## of what `make test` runs a covering part of: every row
	$(BIN)/python -m pytest -q $(WORKERS) --whole -m "whole or instep" -p no:benchmark tests --instep-traces=fixtures/traces --instep-ops=ledger --instep-ops=plain

check: lint types fast  ## what must hold before every commit, under a minute

lint: $(READY)
	$(BIN)/ruff check

types: $(READY)
	$(BIN)/mypy

fast: $(READY)
	$(BIN)/python -m pytest -q $(WORKERS) -m "not slow and not gpu and not timing and not interpreted" -p no:benchmark tests/test_house.py tests/test_language.py tests/reference tests/optimized tests/harness

perf: $(READY)  ## the benchmarks; a speed counts only where the states were checked
	$(BIN)/python -m pytest -q tests/perf --benchmark-enable

peers: $(READY)  ## other people's kernels and engines, in .venv-peers; writes fixtures/results/peers.json
	PYTHONPATH=reference:optimized:harness:tests $(BIN)/python -m peers

docs: $(VENV)/.docs  ## the pages as a site in build/site; a link that leads nowhere is an error
	PYTHONPATH=tests $(BIN)/python -m support.site copy
	$(BIN)/zensical build --strict --clean
	PYTHONPATH=tests $(BIN)/python -m support.site check

$(VENV)/.docs: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --group docs
	@touch $@

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else "instep needs Python 3.11, 3.12 or 3.13; $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.11 ..." % v)'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments: install python3-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(BIN)/pip install --quiet --disable-pip-version-check "torch>=2.11,<2.14"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable . --group dev
	@touch $@

clean:
	rm -rf $(VENV) build .venv-peers .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
