# The front door. `make help` lists the targets; each is a few lines that call the command line.
SHELL := bash
.SHELLFLAGS := -Eeuo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PROFILE ?= smollm2
INPUT ?=
ANSWERS ?=
RESUME ?=
SET ?=
PYTHON ?= python3.11
VENV := .venv
RUN := $(VENV)/bin/python -m pipeline.cli
# Overrides are split at blanks; a value with a blank goes into a profile file.
OPTIONS = --profile "$(PROFILE)" $(foreach pair,$(SET),--set '$(pair)')
SOURCE = $(if $(INPUT),--input "$(INPUT)") $(if $(ANSWERS),--answers "$(ANSWERS)")
AGAIN = $(if $(filter 1 yes true,$(RESUME)),--resume)
STAGES := target prepare extract train export evaluate report

.PHONY: help
help: ## What there is
	@echo "Cleanslate $$(cat VERSION): from a target model and conversations to an EAGLE-3 drafter"
	echo
	echo "  make extract && make train && make evaluate     the whole job with the default profile"
	echo "  make extract train evaluate PROFILE=tiny        all stages in about a minute"
	echo
	grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 18
	echo
	echo "  PROFILE=name|file.yaml  INPUT=conversations  ANSWERS=file|target  RESUME=1"
	echo "  SET='section.key=value ...'  PYTHON=python3.11     this: PROFILE=$(PROFILE)"

# A stage is never "up to date" for make: asked for by name, it starts over.
.PHONY: $(STAGES)
target: $(VENV)/ready ## Make the target's folder (done by itself when needed)
prepare: $(VENV)/ready ## Conversations to token ids and supervised tokens
extract: $(VENV)/ready ## Capture the target's states for every token, proven complete
train: $(VENV)/ready ## Train the drafter
export: $(VENV)/ready ## Write the drafter as SGLang and vLLM load it (done by itself)
evaluate: $(VENV)/ready ## Measure acceptance on held-out prompts
report: $(VENV)/ready ## One HTML page and PNGs about the run
$(STAGES):
	@$(RUN) $@ $(OPTIONS) $(SOURCE) $(AGAIN)

.PHONY: show verify clean-slate
show: $(VENV)/ready ## Every setting, its value and where it comes from
	@$(RUN) show $(OPTIONS) $(SOURCE)
verify: $(VENV)/ready ## Re-read everything that is sealed
	@$(RUN) verify $(OPTIONS) $(SOURCE)
clean-slate: $(VENV)/ready ## Wipe what this project owns in the run's folder
	@$(RUN) clean-slate $(OPTIONS) $(SOURCE)

.PHONY: setup test test-quick lint lock
setup: $(VENV)/ready ## Install what the stages need (done by itself when needed)
test: $(VENV)/ready-for-tests ## All tests
	@$(VENV)/bin/python -m pytest -q
test-quick: $(VENV)/ready-for-tests ## Tests without those that need minutes
	@$(VENV)/bin/python -m pytest -q -m "not slow"
lint: $(VENV)/ready-for-tests ## ruff, mypy, shellcheck
	@$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/shellcheck docker/setup.sh .ci/run
lock: $(VENV)/ready-for-tests ## Write the hash-locked requirements anew
	@$(VENV)/bin/python docker/lock.py

LOCKS := $(wildcard docker/trainer/requirements*.txt)
$(VENV)/ready: docker/setup.sh $(LOCKS)
	@bash docker/setup.sh "$(PYTHON)" "$(VENV)" docker/trainer/requirements.txt
$(VENV)/ready-for-tests: $(VENV)/ready tests/requirements.txt
	@$(VENV)/bin/python -m pip install --quiet --require-hashes --no-deps -r tests/requirements.txt
	touch $@
