# Two commands are all a newcomer needs: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# One thread per process: two test processes share two cores without fighting over them.
ONE_THREAD := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE

.PHONY: demo test test-long lint format clean

demo: $(INSTALLED)
	$(BIN)/optcov demo

test: $(INSTALLED)
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist loadfile

test-long: $(INSTALLED)
	$(ONE_THREAD) $(BIN)/python -m pytest -m long

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist site

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@
