# `make demo` and `make test` each do all of their own set-up on a fresh machine (Python 3.11 or newer with venv).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_BIN := .venv-vllm/bin
# Where the machine forbids it, every process that tests start would compile all of transformers anew: 20 s of processor.
export PYTHONDONTWRITEBYTECODE :=
OFFLINE := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# what `make test-fast` runs: no server, no vLLM, no model but docs-lm
FAST := $(wildcard tests/test_*.py tests/find tests/levels tests/guards tests/index tests/store tests/trust tests/reuse tests/testing tests/encoder_cache)

.PHONY: demo gpu model dist docs models-page workloads ablation test test-fast test-core test-vllm soak lint format types train-shapes train-docs train-lckv clean

## the main job: prompts of a real workload through a real language model, with prefix caching and with DejaKV; about five minutes on two cores, set-up included
demo: model
	rm -rf runs/demo
	HF_HUB_OFFLINE=1 $(BIN)/dejakv run --preset repo --max-samples 12 --max-new-tokens 8 --arms prefix,cache --rounding 4 --brief --output runs/demo

## on a machine with a GPU: is DejaKV right there, and how fast; a page and a JSON file in runs/gpu, in under ten minutes
gpu: $(VENV)/.installed
	$(OFFLINE) $(BIN)/python -m research.gpu

## repo, rag and sessions with blend at three qualities against prefix caching, through transformers and vLLM; an hour, and it goes on where it was stopped
workloads: $(VENV)/.installed-report model .venv-vllm/.installed
	$(OFFLINE) $(BIN)/python -m research.workloads
	$(OFFLINE) $(BIN)/python -m research.workloads --rounded
	$(OFFLINE) $(VLLM_BIN)/python -m research.workloads --engine vllm
	$(OFFLINE) $(VLLM_BIN)/python -m research.workloads --engine vllm --rounded
	$(BIN)/python -m research.workloads --report

## levels, thresholds, guards and ways of reuse, each alone, and a report of them; about half an hour, and it goes on where it was stopped
ablation: $(VENV)/.installed model
	mkdir -p runs/ablation
	for name in shapes smollm2; do \
	    log=runs/ablation/$$name.csv; \
	    $(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/dejakv sweep --specs research/specs/ablation-$$name.json --log-file $$log \
	        $$(test -e $$log && echo --resume) || exit; \
	done
	$(BIN)/dejakv report runs/ablation/shapes.csv runs/ablation/smollm2.csv --output runs/ablation/report.html

## all tests, vLLM's included
test: test-core test-vllm

## under two minutes on two free cores, for all day
test-fast: $(VENV)/.installed-dev
	$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -q $(FAST) -m "not soak and not slow"

## all tests but vLLM's
test-core: $(VENV)/.installed-dev model $(VENV)/.browser $(VENV)/.promtool
	$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests --ignore=tests/engines/vllm --ignore=tests/gpu -m "not soak"

## the tests that run a real vLLM engine on the CPU, and its worker side on a pretended GPU, in their own environment
test-vllm: .venv-vllm/.installed model
	$(OFFLINE) $(VLLM_BIN)/python -m pytest -n 2 --dist loadfile tests/engines/vllm tests/gpu -m "not soak"

## long runs that CI leaves out: an hour, from another seed each time, and vLLM's; a run is repeated by its seed
soak: export DEJAKV_SOAK_MINUTES ?= 60
soak: export DEJAKV_SOAK_ROUNDS ?= 5
soak: export DEJAKV_SOAK_SEED := $(or $(DEJAKV_SOAK_SEED),$(shell date +%s))
soak: $(VENV)/.installed-dev model .venv-vllm/.installed
	@echo "to repeat it: make soak DEJAKV_SOAK_SEED=$$DEJAKV_SOAK_SEED DEJAKV_SOAK_ROUNDS=$$DEJAKV_SOAK_ROUNDS"
	$(OFFLINE) $(BIN)/python -m pytest tests/security tests/reliability tests/exactness tests/engines/transformers/test_every_model_type.py \
	    tests/store/test_store_model.py tests/store/test_store_quota.py -s --timeout 0
	$(OFFLINE) $(VLLM_BIN)/python -m pytest tests/engines/vllm -m soak --timeout 7200

## wheels and source archives of dejakv and dejakv-models, in dist/; the build backend is all that is installed for it
dist: build/.venv-dist/bin/hatchling
	for place in . packages/dejakv-models; do (cd $$place && $(CURDIR)/$< build --directory $(CURDIR)/dist) || exit; done

build/.venv-dist/bin/hatchling: pyproject.toml
	$(PYTHON) -m venv build/.venv-dist
	build/.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check \
	    $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("$<", "rb"))["build-system"]["requires"])')
	touch $@

## the documentation as a site in build/site, which is opened without a server or a network; a broken link stops it
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

## docs/reference/models.md, from a run of the tests that show a model; half an hour
models-page: export DEJAKV_RECORD = docs/reference/models.json
models-page: $(VENV)/.installed-dev model .venv-vllm/.installed
	rm -f $(DEJAKV_RECORD)
	$(OFFLINE) $(BIN)/python -m pytest tests --ignore=tests/engines/vllm --ignore=tests/gpu -m shows
	$(OFFLINE) $(VLLM_BIN)/python -m pytest tests/engines/vllm -m shows
	$(BIN)/python -m scripts.reference_pages

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/pyright

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

## the bundled models, trained from nothing (resumable)
train-shapes: $(VENV)/.installed-dev
	$(BIN)/python -m research.training.shapes

train-docs: $(VENV)/.installed-dev
	$(BIN)/python -m research.training.docs

## docs-lckv and the Llama twin that it is compared with, both from docs-lm
train-lckv: $(VENV)/.installed-dev
	$(BIN)/python -m research.training.lckv
	$(BIN)/python -m research.training.lckv --twin --out runs/docs-llama

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# --no-compile: Python compiles the modules that it imports, a small part of what is installed
$(VENV)/.installed: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -e packages/dejakv-models -e '.[gguf,rag,models]'
	touch $@

$(VENV)/.installed-report: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'matplotlib>=3.9,<4'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e packages/dejakv-models -e '.[dev]'
	touch $@

# SmolLM2 in the user's cache folder: fetched once a machine, then only checked. No stamp: another user has another folder
model: $(VENV)/.installed
	$(BIN)/dejakv models get smollm2-135m

# reports are looked at in a real browser; where none can be installed, their tests say so and are not run
$(VENV)/.browser: $(BIN)/python
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	    && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
	    || echo "no chromium, and none could be installed: the tests that look at reports in a browser are not run"
	touch $@

# the alerts' rules are run by Prometheus' own tool: its program alone is unpacked, since the package would start a server
$(VENV)/.promtool: $(BIN)/python
	@command -v promtool >/dev/null || { command -v apt-get >/dev/null && { test "$$(id -u)" != 0 || apt-get update -qq; } \
	    && cd $(VENV) && apt-get download -qq prometheus && dpkg -x prometheus_*.deb promtool && rm prometheus_*.deb \
	    && ln -sf ../promtool/usr/bin/promtool bin/promtool; } \
	    || echo "no promtool, and none could be unpacked: the tests that run the alerts' rules are not run"
	touch $@

.venv-vllm/.installed: scripts/setup-vllm-env.sh pyproject.toml
	PYTHON=$(PYTHON) bash scripts/setup-vllm-env.sh
	touch $@

clean:
	rm -rf $(VENV) .venv-vllm runs .pytest_cache .ruff_cache .hypothesis
