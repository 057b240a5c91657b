# make demo   text -> paired comparison of block and rd, on the CPU
# make test   style and tests; WORKERS=4 on four cores
# make soak   kill a run at random moments; SOAK="--kills 200 --seed 7"
# All set up .venv first.
PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
SHELL := /bin/bash
.DELETE_ON_ERROR:

.PHONY: demo test soak clean
demo: .venv/runtime
	$(BIN)/python prepare_data.py --source docs --tokenizer bytes --out data/docs-bytes --wait
	PATH="$(CURDIR)/$(BIN):$$PATH" JOBS=2 OMP_NUM_THREADS=1 runs/pairs.sh configs/demo.toml "block rd" "1 2 3" --device=cpu
	OMP_NUM_THREADS=1 $(BIN)/python diagnose.py out/demo

test: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist=worksteal tests

soak: .venv/test
	$(BIN)/python tests/soak.py $(SOAK)

.venv/runtime: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed; name one with: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -r requirements.txt
	touch $@

.venv/test: .venv/runtime requirements-test.txt
	$(BIN)/pip install -r requirements-test.txt
	touch $@

clean:  # keeps data/ and out/
	rm -rf .venv .pytest_cache .ruff_cache {.,kernels,lib,tests}/__pycache__
