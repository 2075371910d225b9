# Every target sets up .venv by itself the first time.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test test-slow check bench fixtures docs fuzz mutate clean

help:
	@echo "make demo      run the main job on the shipped example"
	@echo "make test      run all tests but the slow ones"
	@echo "make test-slow run the tests that take minutes (ONLY='a pattern of pytest -k')"
	@echo "make check     ruff and mypy --strict"
	@echo "make bench     the speed and memory table"
	@echo "make fixtures  make the example data anew"
	@echo "make docs      write the generated pages and the README's output anew"
	@echo "make fuzz      a longer fuzz of every reader (SECONDS=600)"
	@echo "make mutate    mutation testing of core and checks (ARGS='core/masks --sample 50')"

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/opdtool demo demo-out --force

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q -m "not slow"

test-slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q -m slow $(if $(ONLY),-k "$(ONLY)")

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

fixtures: $(READY)
	$(BIN)/python fixtures/make_fixtures.py

docs: $(READY)
	$(BIN)/python docs/generate.py

fuzz: $(READY)
	OPDTOOL_FUZZ_SECONDS=$(or $(SECONDS),600) $(BIN)/python -m pytest -q -m slow tests/attacks

mutate: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.mutation $(ARGS)

clean:
	rm -rf $(VENV) demo-out build dist *.egg-info
