# `make help` lists what can be made. Everything runs in .venv, which `make setup` creates.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.rl-lab-setup
RL_LAB := $(BIN)/rl-lab
JOBS ?= logical

.DEFAULT_GOAL := help
.PHONY: torture help setup demo demo-offline test test-ui web lint format learn bench datasets

help:  ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP)  ## create .venv and install RL Lab with every environment family (again only when versions change)

$(STAMP): pyproject.toml constraints.txt scripts/setup_system.sh
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "RL Lab needs Python 3.11 or newer; $(PYTHON) is older. Try: make setup PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[all,dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps gym-pusht # its pygame is pygame-ce here
	bash scripts/setup_system.sh
	touch $@

demo: setup  ## train the default experiment (DreamerV3 on CartPole) and print where its report is
	$(RL_LAB) train

DEMONSTRATIONS := experiments/demonstrations/detour.npz
$(DEMONSTRATIONS): | setup
	mkdir -p $(@D)
	$(RL_LAB) data record expert:detour --episodes 100 --output $@

demo-offline: setup $(DEMONSTRATIONS)  ## record 100 episodes, train a Diffusion Policy on them, evaluate it, say where its report is
	$(RL_LAB) train +experiment=diffusion_policy_detour data_sources.demos.expert=null \
		data_sources.demos.path=$(DEMONSTRATIONS) experiment.name=demo_offline workflow.decay_updates=3_000

test: setup  ## unit and integration tests, shared over the cores (JOBS=1: in one process)
	$(BIN)/python -m pytest -n $(JOBS) --maxprocesses 8 --dist worksteal

datasets: datasets/doorkey_ppo.npz datasets/half_cheetah_ppo.npz  ## demonstrations of PPO agents trained here (20 minutes)

datasets/doorkey_ppo.npz: | setup
	$(RL_LAB) train +experiment=ppo_minigrid_doorkey
	$(RL_LAB) data record ppo_minigrid_doorkey --episodes 200 --output $@

# Seed 1: of the seeds in results/ppo_half_cheetah.json the one whose episodes are alike.
datasets/half_cheetah_ppo.npz: | setup
	$(RL_LAB) train +experiment=ppo_half_cheetah experiment.seed=1
	$(RL_LAB) data record ppo_half_cheetah --episodes 25 --output $@

test-ui: setup web  ## the web pages in headless Chromium (installs Chromium and Node where it may)
	git diff --exit-code --stat -- src/rl_lab/ui/static || \
		{ echo "src/rl_lab/ui/static is not what web/ builds: commit what 'make web' wrote."; exit 1; }
	$(BIN)/python -m pytest tests/ui -m browser

web:  ## build the web pages into the package
	bash scripts/setup_browser.sh
	cd web && npm run --silent check && npm run --silent build

lint: setup  ## ruff, mypy and the layers' import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup  ## let ruff rewrite the code's layout
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

learn: setup  ## tests that train for minutes
	$(BIN)/python -m pytest -m learning --timeout 3600

bench: setup  ## speed of replay, the loop, DQN and the command line
	$(BIN)/python benchmarks/replay.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/dqn.py
	$(BIN)/python benchmarks/startup.py

HOURS ?= 0.1
SOAK ?= 0
torture: setup  ## kills, full disks, damage, hostile runs, bad environments, fuzz: HOURS=1 for an hour, SOAK=60 for minutes more
	$(BIN)/python -m tests.torture --hours $(HOURS)
	test $(SOAK) = 0 || $(BIN)/python -m tests.torture.soak --minutes $(SOAK)
