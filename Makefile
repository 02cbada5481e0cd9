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
SAMPLES ?=
DUMP ?=
ENGINE ?=
RESUME ?=
SET ?=
RUNTIME ?=
PYTHON ?= python3.11
SGLANG_PYTHON ?=
VENV := .venv
SGLANG := .venv-sglang
HOSTS := .venv-ansible
# In containers the stages need no virtual environment on this machine.
ifeq ($(RUNTIME),docker)
RUN := bash docker/run.sh
READY :=
else
RUN := $(VENV)/bin/python -m pipeline.cli
READY := $(VENV)/ready
endif
# Overrides are split at blanks; a value with a blank goes into a profile file.
OPTIONS = --profile "$(PROFILE)" $(foreach pair,$(SET),--set '$(pair)') \
	$(if $(RUNTIME),--set 'run.runtime=$(RUNTIME)')
SOURCE = $(if $(INPUT),--input "$(INPUT)") $(if $(ANSWERS),--answers "$(ANSWERS)")
WHO = $(if $(ENGINE),--engine "$(ENGINE)")
FROM = $(if $(SAMPLES),--samples "$(SAMPLES)") $(if $(DUMP),--dump "$(DUMP)")
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
	echo "  ENGINE=transformers|sglang (of prepare's answers, of extract, of evaluate)"
	echo "  SET='section.key=value ...'  PYTHON=python3.11     this: PROFILE=$(PROFILE)"
	echo "  RUNTIME=local|docker (the profile's run.runtime decides; docker needs make images once)"

# A stage is never "up to date" for make: asked for by name, it starts over.
.PHONY: $(STAGES)
target: $(READY) ## Make the target's folder (done by itself when needed)
prepare: $(READY) ## Conversations to token ids and supervised tokens
extract: $(READY) ## Capture the target's states for every token, proven complete
train: $(READY) ## Train the drafter
export: $(READY) ## Write the drafter as SGLang and vLLM load it (done by itself)
evaluate: $(READY) ## Measure acceptance on held-out prompts
report: $(READY) ## One HTML page and PNGs about the run
$(STAGES):
	@$(RUN) $@ $(OPTIONS) $(SOURCE) $(FROM) $(WHO) $(AGAIN)
.PHONY: adopt
adopt: $(READY) ## Take states that another system dumped as the output of extract (DUMP= SAMPLES=)
	@$(RUN) adopt $(OPTIONS) $(SOURCE) $(FROM) $(AGAIN)

.PHONY: serve show verify repair clean-slate release
serve: $(READY) ## Serve the target with its drafter by SGLang, until Ctrl-C
	@exec $(RUN) serve $(OPTIONS) $(SOURCE) $(WHO)
show: $(READY) ## Every setting, its value and where it comes from
	@$(RUN) show $(OPTIONS) $(SOURCE)
verify: $(READY) ## Re-read everything that is sealed: what is whole, what to do (JSON=1)
	@$(RUN) verify $(OPTIONS) $(SOURCE) $(if $(filter 1 yes true,$(JSON)),--json)
repair: $(READY) ## Capture again exactly the samples of extract that verify finds damaged
	@$(RUN) repair $(OPTIONS) $(SOURCE)
clean-slate: $(READY) ## Wipe what this project owns in the run's folder
	@$(RUN) clean-slate $(OPTIONS) $(SOURCE)
release: ## End the containers that a crashed start of this run left
	@bash docker/run.sh release $(OPTIONS) $(SOURCE)

HOST_FILE ?= ansible/group_vars/gpu_hosts.yml
STAGE ?=
JSON ?=
.PHONY: preflight
preflight: $(VENV)/ready ## Is this host ready (as root: all of it; STAGE= JSON=1 HOST_FILE=)
	@$(VENV)/bin/python -m pipeline.cli preflight --host "$(HOST_FILE)" $(if $(STAGE),--stage "$(STAGE)") \
		$(if $(filter-out file,$(origin PROFILE))$(SET),$(OPTIONS)) $(if $(filter 1 yes true,$(JSON)),--json)

GPUS ?=
TRAIN_GPUS ?=
OUT ?=
LL128 ?=
.PHONY: tune-nccl
tune-nccl: $(VENV)/ready ## Measure NCCL's variables (GPUS=0,1 TRAIN_GPUS= OUT=runs/host/nccl.json RESUME=1 LL128=1)
	@$(VENV)/bin/python -m pipeline.cli tune-nccl $(if $(GPUS),--gpus "$(GPUS)") \
		$(if $(TRAIN_GPUS),--train-gpus "$(TRAIN_GPUS)") $(if $(OUT),--out "$(OUT)") $(AGAIN) \
		$(if $(filter 1 yes true,$(LL128)),--ll128)

.PHONY: setup test test-faults test-quick test-sglang test-gpu test-docker test-host sglang-cpu lint lock
setup: $(VENV)/ready ## Install what the stages need (done by itself when needed)
sglang-cpu: $(SGLANG)/ready ## Install real SGLang for machines without a GPU (6.4 GB)
test: $(VENV)/ready-for-tests ## All tests but those of `make test-sglang`
	@$(VENV)/bin/python -m pytest -q -m "not sglang and not gpu and not docker and not images and not host and not faults"
test-quick: $(VENV)/ready-for-tests ## Tests without those that need minutes
	@$(VENV)/bin/python -m pytest -q -m "not slow and not sglang and not gpu and not docker and not images and not host and not faults"
test-sglang: $(VENV)/ready-for-tests $(SGLANG)/ready ## Tests with the real SGLang server
	@$(VENV)/bin/python -m pytest -q -m sglang
test-gpu: $(VENV)/ready-for-tests ## Tests that want two GPUs (SGLANG_PYTHON= of an interpreter with SGLang)
	@$(VENV)/bin/python -m pytest -q -m gpu --sglang-python "$(SGLANG_PYTHON)"
test-docker: $(VENV)/ready-for-tests ## Tests that run stages in containers (make images first)
	@$(VENV)/bin/python -m pytest -q -m docker
test-faults: $(VENV)/ready-for-tests ## Stages under kill -9, full and broken disks (as root, with strace)
	@$(VENV)/bin/python -m pytest -q -m faults
test-host: $(VENV)/ready-for-tests $(HOSTS)/ready ## The playbook against a container with systemd (Docker, Debian's apt)
	@$(VENV)/bin/python -m pytest -q -m host
lint: $(VENV)/ready-for-tests $(HOSTS)/ready ## ruff, mypy, shellcheck, hadolint, ansible-lint
	@$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/shellcheck docker/*.sh docker/*/*.sh ansible/roles/*/files/*.sh .ci/run
	$(VENV)/bin/hadolint Dockerfile
	cd ansible && PATH="$(abspath $(HOSTS)/bin):$$PATH" ansible-lint --offline --profile production -q
VARIANT ?= cuda
CA ?= $(SSL_CERT_FILE)
WHEELS ?= $(if $(wildcard $(PIP_FIND_LINKS)/),$(PIP_FIND_LINKS))
FOR_IMAGES = --variant "$(VARIANT)" $(if $(BASE),--base "$(BASE)") $(if $(MIRROR),--mirror "$(MIRROR)") \
	$(if $(NETWORK),--network "$(NETWORK)") $(if $(CA),--ca "$(CA)") \
	$(if $(WHEELS),--wheels "$(WHEELS)") $(if $(PIP_CONF),--pip-conf "$(PIP_CONF)")
.PHONY: images base
images: ## Build the images (VARIANT=cpu|cuda BASE=name@digest NETWORK= CA= WHEELS= PIP_CONF=)
	@bash docker/images.sh $(FOR_IMAGES)
base: ## Build the images' base from Debian packages (MIRROR=)
	@MIRROR="$(MIRROR)" bash docker/base/build.sh docker/base/packages.txt
# Of the command line alone: some shells export a HOST of their own.
ASKED = $(if $(filter command,$(firstword $(origin HOST))),$(HOST),local://)
.PHONY: host-test
host-test: $(VENV)/ready-for-tests ## Is HOST=ssh://root@gpu1 ready (also local://, docker://; GPUS=required HOST_FILE=)
	@$(VENV)/bin/python -m pytest -q tests/host --hosts="$(ASKED)" --host-wanted="$(HOST_FILE)" \
		$(if $(GPUS),--host-gpus="$(GPUS)")
.PHONY: ansible
ansible: $(HOSTS)/ready ## Install ansible-playbook and ansible-lint into $(HOSTS)
.PHONY: images-test sbom
images-test: $(VENV)/ready-for-tests sbom ## Tests of the built images
	@$(VENV)/bin/python -m pytest -q -m images
sbom: ## List what the built images hold, as CycloneDX in images/
	@bash docker/sbom.sh
lock: $(VENV)/ready-for-tests ## Write the hash-locked requirements anew
	@$(VENV)/bin/python docker/lock.py
	$(VENV)/bin/python docker/lock_extractor.py

LOCKS := $(wildcard docker/trainer/requirements*.txt)
$(VENV)/ready: docker/setup.sh $(LOCKS)
	@bash docker/setup.sh "$(PYTHON)" "$(VENV)" docker/trainer/requirements.txt
$(VENV)/ready-for-tests: $(VENV)/ready tests/requirements.txt
	@$(VENV)/bin/python -m pip install --quiet --require-hashes --no-deps -r tests/requirements.txt
	touch $@
$(HOSTS)/ready: ansible/requirements.txt
	@$(PYTHON) -m venv $(HOSTS)
	$(HOSTS)/bin/python -m pip install --quiet --require-hashes --no-deps -r ansible/requirements.txt
	touch $@
CPU_SERVER := docker/extractor/requirements-cpu.txt docker/extractor/cpu/pyproject.toml pyproject.toml
$(SGLANG)/ready: docker/setup-sglang-cpu.sh $(CPU_SERVER)
	@bash docker/setup-sglang-cpu.sh "$(PYTHON)" "$(SGLANG)"
