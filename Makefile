# One environment in .venv, with the versions in constraints/. It is made when it is missing or older than its sources.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VERSIONS := 3.11 3.12 3.13
# The pinned versions for the Python of the environment.
CONSTRAINTS = constraints/python$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt
# Python compiles what is imported. pip would compile the 10,000 files of all packages, which takes 40 s.
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
export OMP_NUM_THREADS ?= 1
# Compiled files are kept: tests run copies of the source, and take its compiled files along.
export PYTHONDONTWRITEBYTECODE :=
# Two at a time, each beginning with one half: most fixtures of a module are made once.
WORKERS := -n 2 --dist worksteal

# Warnings are errors in `make check` and in CI. Elsewhere they are only listed, as a new release of a dependency may warn.
STRICT := -W error -W "ignore:Synchronization debug mode:UserWarning"
FAST = -m pytest -q $(WORKERS) $(STRICT) -m "not slow and not gpu and not timing and not interpreted and not whole" \
	-p no:benchmark tests/reference tests/optimized tests/harness
TIMING = $(BIN)/python -m pytest -q $(if $(CI),$(STRICT)) -m timing tests/harness/test_gate.py tests/perf
TESTS = $(BIN)/python -m pytest -q $(if $(CI),$(STRICT)) $(WORKERS)
REPLAYED := replay-adaptive replay-slots replay-slots-overlapped
EVERYTHING := -p no:benchmark tests --instep-traces=fixtures/traces --instep-ops=ledger --instep-ops=plain

.PHONY: replay $(REPLAYED) test whole everything check fast lint types perf sanitize peers docs constraints newest newest-installed newest-tested clean

replay: $(REPLAYED)  ## the main job: the trained model, every event, both sides, and step counts by batch size

$(REPLAYED): replay-%: $(READY)
	$(BIN)/instep replay fixtures/traces/$*.jsonl

# The main trace is `make replay`, which CI runs, too.
test: $(READY)  ## the tests that cover every check and command, in seven minutes; its last line counts the others
	$(TIMING)
	$(TESTS) -m "not timing" $(EVERYTHING)

whole: $(READY)  ## the tests that `make test` leaves out, and every recorded trace
	$(TESTS) --whole -m "whole or instep" $(EVERYTHING)

everything: $(READY)  ## both at once, as CI does: what the tests of a file share is made once
	$(TIMING)
	$(TESTS) --whole -m "whole or not timing" $(EVERYTHING)

check: lint types fast  ## what must hold before every commit, under a minute

lint: $(READY)
	$(BIN)/ruff check

types: $(READY)
	$(BIN)/mypy

fast: $(READY)
	$(BIN)/python $(FAST) tests/test_house.py tests/test_language.py

perf: $(READY)  ## the benchmarks; a speed counts only where the states were checked
	$(BIN)/python -m pytest -q tests/perf --benchmark-enable

sanitize: $(READY)  ## compute-sanitizer over replays on a GPU: a verdict for each tool, recurrence and planted access
	PYTHONPATH=reference:optimized:harness:tests $(BIN)/python -m support.running.sanitized

constraints: $(READY)  ## the newest releases for every Python version; `make` then installs these
	$(BIN)/python $(INSTALL) uv
	mkdir -p build
	for version in $(VERSIONS); do \
		$(BIN)/uv pip compile --quiet --upgrade --no-python-downloads --python-version $$version --python-platform linux \
			--no-annotate --no-header --group dev --group docs pyproject.toml --output-file build/constraints.txt && \
		{ echo "# The versions that \`make\` installs for Python $$version. Written by \`make constraints\`; torch brings its CUDA libraries."; \
			grep -vE '^(cuda|nvidia)-' build/constraints.txt; } > constraints/python$$version.txt || exit 1; \
	done

newest: newest-installed  ## the fast tests on the newest releases, in .venv-newest
	$(MAKE) newest-tested

newest-installed:
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/python $(INSTALL) --upgrade "pip>=25.1"
	.venv-newest/bin/python $(INSTALL) --editable . --group dev

newest-tested:  # without the tests of house and language, which use no package
	.venv-newest/bin/python $(FAST)

peers: $(READY)  ## other people's kernels, engines and step controllers, in .venv-peers; writes fixtures/results/peers.json
	PYTHONPATH=reference:optimized:harness:tests $(BIN)/python -m peers
	PYTHONPATH=reference:optimized:harness:tests $(BIN)/python -m peers.controllers

docs: $(VENV)/.docs  ## the pages as a site in build/site; a link that leads nowhere is an error
	PYTHONPATH=tests $(BIN)/python -m documentation.site copy
	$(BIN)/zensical build --strict --clean
	PYTHONPATH=tests $(BIN)/python -m documentation.site check

$(VENV)/.docs: $(READY)
	$(BIN)/python $(INSTALL) --constraint $(CONSTRAINTS) --group docs
	@touch $@

$(READY): pyproject.toml $(wildcard constraints/*.txt)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else "instep needs Python 3.11, 3.12 or 3.13; $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.11 ..." % v)'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments: install python3-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) --upgrade "pip>=25.1"
	$(BIN)/python $(INSTALL) --constraint $(CONSTRAINTS) --editable . --group dev
	@touch $@

clean:
	rm -rf $(VENV) build .venv-newest .venv-peers .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
