# Every target that works on a container takes HOST= and CT=, and INVENTORY= for another inventory than inventory.yaml.
.DEFAULT_GOAL := help
SHELL := /bin/sh
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m orchestrator.cli

# Only what is given on make's own command line counts: some shells export HOST. As it stands there: a $ is a $.
given = $(if $(filter command line,$(origin $(1))),$(value $(1)))
# A value is one word to the shell, whatever is in it; a line break would end make's line.
define newline


endef
quoted = $(if $(findstring $(newline),$(1)),$(error a value holds a line break: $(1)),'$(subst ','\'',$(1))')
# An option with the value of a variable, if that is given; with each of its words; the value alone; its words alone.
option = $(if $(call given,$(2)),$(1) $(call quoted,$(call given,$(2))))
options = $(foreach word,$(call given,$(2)),$(1) $(call quoted,$(word)))
argument = $(if $(call given,$(1)),$(call quoted,$(call given,$(1))))
arguments = $(foreach word,$(call given,$(1)),$(call quoted,$(word)))
export DFLASH_HOST := $(call given,HOST)
export DFLASH_CT := $(call given,CT)
export DFLASH_INVENTORY := $(or $(call given,INVENTORY),inventory.yaml)
export DFLASH_RECIPE := $(call given,RECIPE)
ifeq ($(DFLASH_RECIPE),)
unexport DFLASH_RECIPE
endif
# A switch is on when it is given and does not say no.
on = $(filter-out 0 no false off,$(call given,$(1)))

.PHONY: help
help: ## Show the targets
	@echo 'usage: make TARGET HOST=<host> CT=<container id> [INVENTORY=<file>] [NAME=value ...]'; echo
	@sed -n 's/^\([a-z][a-z-]*\):.*## /  make \1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-22s %s\n", $$1, $$2}'

$(VENV)/.desk: requirements/desk.txt orchestrator/bootstrap.py pyproject.toml
	@$(PYTHON) orchestrator/bootstrap.py --venv $(VENV) --requirements requirements/desk.txt --project . --compile
	@touch $@

$(VENV)/.dev: $(VENV)/.desk requirements/dev.txt payload/requirements.txt
	@$(PYTHON) orchestrator/bootstrap.py --venv $(VENV) --requirements requirements/dev.txt --project .
	@$(VENV)/bin/python -m orchestrator.desk
	@touch $@

.PHONY: setup
setup: $(VENV)/.desk ## Make .venv with the controller's packages

.PHONY: demo
demo: $(VENV)/.desk ## The whole story on this machine: embedded node, deploy, venv, warmup, train, fetch
	@$(RUN) demo

.PHONY: node-start node-stop
node-start: $(VENV)/.desk ## Start the embedded node and leave it running
	@$(RUN) node start
node-stop: $(VENV)/.desk ## Stop the embedded node
	@$(RUN) node stop

.PHONY: deploy venv warmup train logs status stop fetch evaluate estimate probe doctor put script prune locks cache race
deploy: $(VENV)/.desk ## Bring the payload into the container (of many: HOST=all, HOST=a,b CT=200,210-217)
	@$(RUN) deploy
venv: $(VENV)/.desk ## Build the pinned venv (WHEELHOUSE=1: wheels from the desk; FORCE=1: anew)
	@$(RUN) venv $(if $(call on,WHEELHOUSE),--wheelhouse) $(if $(call on,FORCE),--force)
warmup: $(VENV)/.desk ## Compile what training will call (PROVE=1: a second process must miss nothing)
	@$(RUN) warmup $(call options,--set,SET) $(if $(call on,PROVE),--prove)
train: $(VENV)/.desk ## Whatever is missing before, then the job; follows its log (RECIPE=, SET="a=b c=d", DETACH=1, RESUME=, COLD=1, ANYWAY=1)
	@$(RUN) train $(call options,--set,SET) $(if $(call on,WHEELHOUSE),--wheelhouse) $(if $(call on,DETACH),--detach) $(if $(call on,COLD),--cold) $(if $(call on,ANYWAY),--anyway) $(call option,--resume,RESUME)
logs: $(VENV)/.desk ## A run's output (RUN_ID=, FOLLOW=1, TAIL=<lines>, SINCE=10m)
	@$(RUN) logs $(if $(call on,FOLLOW),--follow) $(call option,--tail,TAIL) $(call option,--since,SINCE) $(call argument,RUN_ID)
status: $(VENV)/.desk ## The container's runs (JSON=1; HOST=all, CT=all)
	@$(RUN) status $(if $(call on,JSON),--json) $(call argument,RUN_ID)
stop: $(VENV)/.desk ## End a run for good (RUN_ID=, GRACE=<seconds>)
	@$(RUN) stop $(call option,--grace,GRACE) $(call argument,RUN_ID)
fetch: $(VENV)/.desk ## Bring a run's results home (RUN_ID=, TO=<folder>)
	@$(RUN) fetch $(call option,--to,TO) $(call argument,RUN_ID)
doctor: $(VENV)/.desk ## Whether the container is fit for a run, each finding with its fix (RECIPE=, SET=, JSON=1; HOST=all, CT=all)
	@$(RUN) doctor $(call options,--set,SET) $(if $(call on,JSON),--json)
evaluate: $(VENV)/.desk ## A drafter's held-out accepted length (RUN_ID=, CHECKPOINT=best, RECIPE=, PROMPTS=, TEMPERATURE=, SET=, DRAFTER=, AT_ONCE=1, BESIDE=1, JSON=1)
	@$(RUN) evaluate $(call options,--set,SET) $(call option,--checkpoint,CHECKPOINT) $(call option,--prompts,PROMPTS) $(call option,--temperature,TEMPERATURE) $(call option,--drafter,DRAFTER) $(call option,--at-once,AT_ONCE) $(if $(call on,BESIDE),--beside) $(if $(call on,JSON),--json) $(call argument,RUN_ID)
estimate: $(VENV)/.desk ## GPU memory that each role of a recipe needs (RECIPE=, SET=, CONFIG=<the target's config.json>, JSON=1; HOST= CT= asks a container)
	@$(RUN) estimate $(call options,--set,SET) $(call option,--config,CONFIG) $(if $(call on,JSON),--json)
probe: $(VENV)/.desk ## What the container and its torch really are (JSON=1)
	@$(RUN) probe $(if $(call on,JSON),--json)

put: $(VENV)/.desk ## Bring a file or folder of the desk into the container (FILE=, TO=<path below root>, DELETE=1: remove what is not at home)
	@$(RUN) put $(if $(call on,DELETE),--delete) $(call option,--to,TO) $(if $(call given,FILE),-- $(call argument,FILE))
script: $(VENV)/.desk ## Run a file of the desk in the container (FILE=, ARGS="a b", IN_VENV=1, TIMEOUT=<seconds>)
	@$(RUN) script $(if $(call on,IN_VENV),--venv) $(call option,--timeout,TIMEOUT) $(if $(call given,FILE),-- $(call argument,FILE) $(call arguments,ARGS))
prune: $(VENV)/.desk ## Remove releases, venvs and uploads that no run pins (RUNS=<how many to keep> or RUN_ID=: runs too; DATA="answers packed features": data too; APPLY=1)
	@$(RUN) prune $(call option,--keep-runs,RUNS) $(call options,--run,RUN_ID) $(call options,--data,DATA) $(if $(call on,APPLY),--apply)
locks: $(VENV)/.desk ## Who is changing the container, and for how long (BREAK=<lock>: end that one; JSON=1)
	@$(RUN) locks $(call option,--break,BREAK) $(if $(call on,JSON),--json)
cache: $(VENV)/.desk ## Compile caches (ACTION=list, show, verify or prune; FINGERPRINT=, APPLY=1)
	@$(RUN) cache $(or $(call argument,ACTION),list) $(if $(call on,APPLY),--apply) $(if $(call on,JSON),--json) $(call argument,FINGERPRINT)
race: $(VENV)/.dev ## Show what happens when threads trace and compile at once on this torch (GUARD=on, JSON=1)
	@$(VENV)/bin/python -m payload.compile.race $(call option,--guard,GUARD) $(if $(call on,JSON),--json)

.PHONY: bench-features bench-colocated bench-topology bench-link bench-first-step bench-step
bench-step: $(VENV)/.dev ## One step of the drafter: its speed on a GPU; on a CPU, whether it equals the reference (ARGS=, JSON=1)
	@$(VENV)/bin/python -m benchmarks.step $(if $(call on,JSON),--json) $(call arguments,ARGS)
bench-features: $(VENV)/.dev ## Tokens a second of the target's features against transformers' own forward (PROFILE=1, JSON=1)
	@$(VENV)/bin/python -m benchmarks.features $(if $(call on,PROFILE),--profile) $(if $(call on,JSON),--json)
bench-first-step: $(VENV)/.dev ## The first training step cold, warmed and from a shipped artifact; what the guard costs (JSON=1)
	@$(VENV)/bin/python -m benchmarks.first_step $(if $(call on,JSON),--json)
bench-colocated: $(VENV)/.dev ## Target and drafter on one device, each alone and together (JSON=1)
	@$(VENV)/bin/python -m benchmarks.colocated $(if $(call on,JSON),--json)
bench-topology: $(VENV)/.dev ## A whole job with its roles on these ranks (TARGETS="0" DRAFTERS="1", SHAPE=, DOCUMENT=<tokens>, CACHE=<folder>, JSON=1)
	@$(VENV)/bin/python -m benchmarks.topology $(if $(call given,TARGETS),--targets $(call arguments,TARGETS)) $(if $(call given,DRAFTERS),--drafters $(call arguments,DRAFTERS)) $(call option,--shape,SHAPE) $(call option,--document,DOCUMENT) $(call option,--cache,CACHE) $(if $(call on,JSON),--json)
bench-link: $(VENV)/.dev ## Features and gradients between two ranks, and what a wait costs beside matrix products (JSON=1)
	@$(VENV)/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.link $(if $(call on,JSON),--json)

.PHONY: bench-remote
bench-remote: $(VENV)/.desk ## First deploy, deploy with nothing to do, script, logs, 64 containers; beside Ansible (QUICK=1: without; HOST=, CT=, INVENTORY=: there)
	@$(VENV)/bin/python -m benchmarks.remote $(if $(call given,HOST),--inventory $(call quoted,$(DFLASH_INVENTORY)) $(call option,--host,HOST) $(call option,--ct,CT)) $(if $(call on,QUICK),--without-ansible --rounds 3 --containers 8) $(call option,--rounds,ROUNDS)

.PHONY: test test-slow test-gpu test-lxc lint types check
test: $(VENV)/.dev ## The fast tests
	@$(VENV)/bin/python -m pytest -q -n 2 --dist worksteal
test-slow: $(VENV)/.dev ## The tests that take minutes
	@$(VENV)/bin/python -m pytest -q -n 2 --dist worksteal -m 'slow and not lxc' --timeout 900
test-lxc: $(VENV)/.dev ## The tests on real OpenSSH, LXC and systemd (root; see tests/lxc/README.md; SLOW=1: with torch)
	@$(VENV)/bin/python -m tests.lxc.rootfs
	@$(VENV)/bin/python -m pytest -q -rs -n 2 --dist loadfile --no-loadscope-reorder -m 'lxc$(if $(call on,SLOW),, and not slow)' tests/lxc
test-gpu: $(VENV)/.dev ## The tests that need a CUDA GPU
	@$(VENV)/bin/python -m pytest -q -m gpu --timeout 600
lint: $(VENV)/.dev ## ruff: lint and format
	@$(VENV)/bin/python -m ruff check . && $(VENV)/bin/python -m ruff format --check .
types: $(VENV)/.dev ## mypy on the product and its benchmarks (tests are checked by running)
	@$(VENV)/bin/python -m mypy orchestrator payload benchmarks

.PHONY: lock
LOCK := $(VENV)/bin/uv pip compile --quiet --universal --python-version 3.10 --no-header --no-annotate --excludes requirements/excludes.txt
# The desk and the payload share a venv where this is developed: one version of what both need.
lock: $(VENV)/.desk ## Pin again what pyproject.toml asks for
	@$(LOCK) pyproject.toml -o requirements/desk.txt
	@$(LOCK) pyproject.toml --group dev -o requirements/dev.txt
	@$(LOCK) --group pyproject.toml:payload --constraints requirements/desk.txt -o payload/requirements.txt
