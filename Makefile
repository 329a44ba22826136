# Everything a user or developer of Tandem runs. `make` alone lists the targets.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PY := .venv/bin/python
STAMP := .venv/tandem.stamp
REPORTS := .cache/reports
# One thread per process: the tests start several engines, and oversubscribed cores make all of them slower.
# With PYTHONDONTWRITEBYTECODE, which containers like to set, each of the many processes would compile all modules.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(PY) -m pytest
SELECT := not slow
# The files of tests that run alone: to collect all files takes half a minute.
ALONE = $(shell grep -rl --include='test_*.py' 'mark\.alone' tests | sort)

# $(call pytest,NAME,ARGUMENTS): runs pytest, then says how many tests passed, failed and were skipped, whatever
# pytest's exit status; that status (5, no tests, included) is kept.
define pytest
	@mkdir -p $(REPORTS) && rm -f $(REPORTS)/$(1).xml
	@status=0; $(PYTEST) --junit-xml=$(REPORTS)/$(1).xml $(2) || status=$$?; \
		$(PY) -m tools.test_summary $(REPORTS)/$(1).xml || exit 1; exit $$status
endef
# Most tests wait for processes more than they compute, so three workers keep two cores busy.
WORKERS := -n 3 --dist loadfile

.PHONY: help venv demo demo-env test test-fast test-all check check-format check-lint check-types check-imports check-protos
.PHONY: format proto freeze-protos lock clean check-cuda gpu-check bench-sync bench-train bench-demo check-turns check-adapters
.PHONY: chaos collect images

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

venv: $(STAMP) ## create or update .venv from the pins (3 to 6 GB, minutes; see requirements/README.md)

$(STAMP): requirements/lock.txt requirements/torch.txt requirements/torch-cuda.txt pyproject.toml tools/make_venv.sh
	@tools/make_venv.sh
	@touch $@

demo: venv ## post-train the example model with GRPO on this machine and show it (minutes)
	@.venv/bin/tandem demo

demo-env: venv ## post-train a tiny model to use a calculator: two turns and a tool (minutes)
	@.venv/bin/tandem run -c examples/calculator/calculator.yaml

test: venv ## checks and all tests but the slow ones (about 20 minutes on 2 cores)
	@$(MAKE) --no-print-directory --jobs=2 check collect
	$(call pytest,test,$(WORKERS) -m "($(SELECT)) and not alone")
	$(call pytest,test-alone,-m "($(SELECT)) and alone" $(ALONE))
	@$(PY) -m tools.test_summary $(REPORTS)/test.xml $(REPORTS)/test-alone.xml

# Beside the check of types, which keeps one core busy: the workers find the bytecode of the tests then.
collect: venv
	@mkdir -p $(REPORTS)
	@$(PYTEST) --collect-only -qq >$(REPORTS)/collected.txt || { tail -40 $(REPORTS)/collected.txt; exit 1; }

test-all: SELECT := slow or not slow
# Slow tests are many processes each: three at a time starved the beats of engines over several hosts.
test-all: WORKERS := -n 2 --dist loadfile
test-all: test ## checks and every test, slow ones and the CUDA environment's too
	@ALLOW_SKIP=1 tools/cuda/check.sh

test-fast: venv ## unit tests only, on both cores (under a minute)
	$(call pytest,test-fast,-n 2 -m "not slow" tests/unit)

check: venv check-format check-lint check-types check-imports check-protos ## format, lint, types, import contracts, protos

check-format: venv
	@.venv/bin/ruff format --check --output-format concise .

check-lint: venv
	@.venv/bin/ruff check --quiet .

check-types: venv
	@$(PY) -m mypy

check-imports: venv
	@.venv/bin/lint-imports --no-logo

check-protos: venv
	@.venv/bin/buf lint
	@.venv/bin/buf breaking --against protos/wire.binpb
	@$(PY) -m tools.proto check
	@$(PY) -m tools.wire_protocol check

freeze-protos: venv ## take the protos as they are for the wire that must not break (before a release)
	@.venv/bin/buf build --exclude-source-info -o protos/wire.binpb

format: venv ## rewrite the code as ruff formats it and fix what it can
	@.venv/bin/ruff check --fix-only --quiet .
	@.venv/bin/ruff format --quiet .

proto: venv ## generate tandem_api/ from protos/
	@.venv/bin/buf lint
	@$(PY) -m tools.proto write

lock: venv ## resolve requirements/cuda-*.txt and torch-cuda.txt anew
	@$(PY) -m tools.cuda.lock write

bench-sync: venv ## measure weight sync against SGLang's own updates (half an hour, both cores)
	@$(PY) -W ignore -m tools.bench_sync

bench-train: venv ## measure a train step against transformers, TRL and the matmul floor (45 minutes, both cores)
	@tools/make_side_venv.sh bench-train
	@$(PY) -W ignore -m tools.bench_train $(ARGS)

bench-demo: venv ## measure whole iterations of the demo against TRL's (15 minutes, both cores)
	@tools/make_side_venv.sh bench-train
	@$(PY) -W ignore -m tools.bench_train.demo $(ARGS)

check-turns: venv ## compare turns with another renderer, on 1,000 conversations of each template (10 minutes)
	@tools/make_side_venv.sh oracle
	$(call pytest,check-turns,tests/contract/test_turns_oracle.py)

check-adapters: venv ## run episodes of Gymnasium, TextArena, OpenEnv, verifiers and Reasoning Gym (5 minutes)
	@tools/make_side_venv.sh adapters
	$(call pytest,check-adapters,tests/contract/test_adapters.py)

chaos: venv ## harm a run on real engines 88 times, and prove its samples from the ledger (25 minutes, both cores, root)
	@$(PY) -W ignore -m tools.chaos $(ARGS)

images: ## build the container images with Docker: VARIANT=gpu, REGISTRY=..., PUSH=1 (docs/docker.md)
	@deploy/images/build.sh

check-cuda: venv ## imports, unit tests and layouts in the environment for NVIDIA GPUs, without a GPU (10 GB)
	@tools/cuda/check.sh $(TESTS)

# Not in `.venv`, which is the CPU's: on a machine with a GPU, PY names the python of requirements/gpu.md's environment.
gpu-check: ## real services and weight sync on this machine's GPUs: make gpu-check PY=...; exits 2 if nothing ran
	@$(PY) -m tools.gpu_check $(ARGS)

clean: ## remove caches and reports (environments and runs/ stay)
	@[ ! -d .cache ] || find .cache -mindepth 1 -maxdepth 1 ! -name '*-venv*' -exec rm -rf {} +
	@rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist ./*.egg-info
	@find . -name __pycache__ -type d -not -path './.venv/*' -not -path './.cache/*' -prune -exec rm -rf {} +
