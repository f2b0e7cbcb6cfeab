# Everything runs from a virtual environment that the first target makes and later ones reuse.
# Needs Python 3.10 or newer with venv and pip:  make test PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
# Three at a time on two cores, each with ranks of its own: some tests wait for timeouts. The longest
# files first, as tests/conftest.py orders them, so that all end at the same time.
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder
ARGS ?=
# Bytecode is kept even where the environment asks for none: every process of the tests would compile
# the package and the test files again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train test test-torch test-fast test-poison ecosystem check docs package house bench-guard coverage clean

train: $(STAMP)
	@procs=$$($(BIN)/python -c "import torch; print(torch.cuda.device_count() or 2)") && \
	threads=$$($(BIN)/python -c "import os; print(max(1, (os.cpu_count() or 1) // $$procs))") && \
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$threads} $(BIN)/python \
		tutorials/train_language_model.py --ranks $$procs $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m tests.common.device
	@$(BIN)/python -m pytest -q $(PARALLEL) $(ARGS)

# On another torch, in an environment of its own:  make test-torch VERSION=2.11.0
test-torch:
	@$(MAKE) --no-print-directory test VENV=.venv-$(VERSION)

# For the inner loop, in less than a minute: what is marked "fast". That is all that needs no ranks
# and little time, and of each other test file some tests that compare a step, a file or a message.
test-fast: $(STAMP)
	@$(BIN)/python -m pytest -q -m "fast and not device" $(PARALLEL) $(ARGS)

# With NaN in memory that nobody may read: freed, just allocated, or written by a gather in flight.
# Without the tests that count what is allocated and called, and those of the device, which does it itself.
test-poison: $(STAMP)
	@COMPOSABLE_SHARD_POISON=1 $(BIN)/python -m pytest -q -m "not counts and not device" \
		--ignore tests/device --ignore tests/benchmarks $(PARALLEL) $(ARGS)

# The tools that tests marked "ecosystem" run; without them these are skipped by name.
ecosystem: $(VENV)/.ecosystem

check: $(STAMP)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

# A warning is an error. The pages are in build/docs, index.html the first.
docs: $(VENV)/.docs
	@$(BIN)/python -m sphinx -q -W --keep-going -E -b html -d build/doctrees docs build/docs

# The sdist and the wheel in dist/, checked; the README's program with the wheel alone and whatever
# torch pip takes, in a fresh environment; then the fast tests in the unpacked sdist.
package: $(STAMP)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check build twine
	@rm -rf dist build/sdist build/wheel && mkdir -p build/sdist
	@$(BIN)/python -m build . > build/package.log || { cat build/package.log; exit 1; }
	@$(BIN)/python -m twine check --strict dist/*
	@$(PYTHON) -m venv build/wheel
	@build/wheel/bin/python -m pip install -qq --disable-pip-version-check --no-compile dist/*.whl
	@sed -n '/^# train.py/,/^```$$/p' README.md | sed '$$d' > build/wheel/train.py
	@cd build/wheel && PYTHONPATH= bin/python train.py
	@tar xf dist/*.tar.gz -C build/sdist --strip-components 1
	@$(MAKE) --no-print-directory -C build/sdist test-fast

house: $(STAMP)
	@$(BIN)/python -m tests.house $(ARGS)

# Is this tree more than 5 % dearer than the last release?  make bench-guard ARGS="--base COMMIT"
bench-guard: $(STAMP)
	@$(BIN)/python -m benchmarks.guard $(ARGS)

coverage: $(STAMP)
	@$(BIN)/coverage erase
	@COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml $(BIN)/coverage run -m pytest -q $(ARGS)
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report

clean:
	rm -rf .venv .venv-* build dist docs/generated *.egg-info .pytest_cache .mypy_cache .ruff_cache \
		.import_linter_cache .hypothesis .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Of torch and what it needs, most modules are never imported: the others compile when they are.
$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@sed 's/^torch==.*/torch==$(VERSION)/' constraints.txt > $(VENV)/constraints.txt
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile \
		--constraint $(VENV)/constraints.txt --editable '.[test,check,plot]'
	@touch $@

$(VENV)/.ecosystem: $(STAMP)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile \
		--constraint $(VENV)/constraints.txt --editable '.[test-ecosystem]'
	@touch $@

# Not the package itself: `make test` may be importing it.
$(VENV)/.docs: $(STAMP)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --constraint constraints.txt \
		$$($(BIN)/python -c "from importlib.metadata import requires; \
		print(*(r.split(';')[0] for r in requires('composable_shard') if '\"docs\"' in r))")
	@touch $@
