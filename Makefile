# `make help` lists the targets. An environment is built when first needed, and updated when its lock file changes.
PYTHON ?= python3
PIP := -m pip --disable-pip-version-check -q
PYTEST_ARGS ?=
# Which tests a target runs, and how: two processes, each with whole files, so that a file's fixtures are made once. In
# alphabetical order, which ends in light files; files with many tests first, as is usual, would end in heavy ones.
SELECT := not full
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder
PROMPT ?= Ada has 6 bags of 7 coins. Ben takes 15. How many are there now?

CORE := .venv/.ready
NPU := .venv-npu/.ready
SGLANG := .venv-sglang/.ready
OLDEST := .venv-oldest/.ready
# What `make test` runs, one environment each. "core" is everything that a plain pytest collects.
SUITES := core npu sglang

# Engines import thousands of modules in several processes: let Python keep what it compiles.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-full test-core test-npu test-sglang test-oldest lint bench env-core env-npu env-sglang \
        env-oldest clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(CORE) ## let the small trained checkpoint solve some problems, and PROMPT
	.venv/bin/kimi-k3-npu eval gsm --model weights/tiny/model --limit 4 --show 4
	echo "$(PROMPT)" | .venv/bin/kimi-k3-npu chat --model weights/tiny/model

test: $(SUITES:%=test-%) ## run every suite, each in its own environment

test-full: SELECT := full or not full
test-full: $(SUITES:%=test-%) test-oldest ## whole matrices where `make test` takes samples, and the lowest versions

test-core: $(CORE) ## run what needs neither torch_npu nor an engine
	.venv/bin/python -m pytest -m "$(SELECT)" $(WORKERS) $(PYTEST_ARGS)

# Otherwise `import torch` loads torch_npu by itself, before the tests have prepared CANN.
test-npu: export TORCH_DEVICE_BACKEND_AUTOLOAD := 0
test-npu: $(NPU) ## run tests/npu with the real torch_npu, no device needed, in one process: docs/evidence.md is of them all
	.venv-npu/bin/python -m pytest tests/npu -m "$(SELECT)" $(PYTEST_ARGS)

test-sglang: $(SGLANG) ## run tests/engines/sglang with the real SGLang on a CPU
	.venv-sglang/bin/python -m pytest tests/engines/sglang -m "$(SELECT)" $(WORKERS) $(PYTEST_ARGS)

test-oldest: $(OLDEST) ## run what test-core runs on the lowest versions of every dependency; 6 GB to install
	.venv-oldest/bin/python -m pytest -m "$(SELECT)" $(WORKERS) $(PYTEST_ARGS)

lint: $(CORE) ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy kimi_k3_npu

# Launches are counted with torch_npu; what else benchmarks compare with lies in build/bench.
BENCHMARKS = $(filter-out %/launches.py,$(sort $(shell grep -l __main__ benchmarks/*.py)))
bench: $(CORE) $(NPU) build/bench/.ready ## run every benchmark; its numbers go to benchmarks/results/
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; PYTHONPATH=build/bench .venv/bin/python $$script; done
	.venv-npu/bin/python benchmarks/launches.py

env-core: $(CORE) ## build .venv
env-npu: $(NPU) ## build .venv-npu
env-sglang: $(SGLANG) ## build .venv-sglang
env-oldest: $(OLDEST) ## build .venv-oldest

clean: ## remove environments, build output and caches
	rm -rf .venv .venv-npu .venv-sglang .venv-oldest build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

define make-venv
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
$(PYTHON) -m venv $(@D)
endef

# .venv*/.locked: torch with whatever its wheel needs on this machine, then exactly the lock file.
.venv/.locked: lock := requirements/core.txt
.venv-npu/.locked: lock := requirements/npu.txt
.venv-sglang/.locked: lock := requirements/sglang.txt
.venv/.locked .venv-npu/.locked: requirements/core.txt
.venv-npu/.locked: requirements/npu.txt
.venv-sglang/.locked: requirements/sglang.txt
.venv/.locked .venv-npu/.locked .venv-sglang/.locked: requirements/constraints.txt
	$(make-venv)
	$(@D)/bin/python $(PIP) install -c requirements/constraints.txt torch
	$(@D)/bin/python $(PIP) install -c requirements/constraints.txt --no-deps -r $(lock)
	touch $@

# The lowest torch is in no constraints, and its lock file names all that it needs to be imported.
.venv-oldest/.locked: requirements/oldest.txt
	$(make-venv)
	$(@D)/bin/python $(PIP) install --no-deps -r $<
	touch $@

build/bench/.ready: requirements/bench.txt .venv/.locked
	rm -rf $(@D)
	.venv/bin/python $(PIP) install --no-deps --target $(@D) -r requirements/bench.txt
	touch $@

# .venv*/.ready: the package itself, editable; again when its metadata changes.
$(CORE) $(NPU) $(OLDEST): %/.ready: %/.locked pyproject.toml
	$(@D)/bin/python $(PIP) install --no-deps --no-build-isolation -e .
	touch $@

# SGLang's processes run the package as users install it, a wheel, which also holds the guard; again when it changes.
PACKAGE_FILES := $(shell find kimi_k3_npu recipes weights -type f -not -name '*.pyc' -not -name '.*')
$(SGLANG): .venv-sglang/.locked pyproject.toml $(PACKAGE_FILES)
	$(@D)/bin/python $(PIP) install --no-deps --no-build-isolation --force-reinstall .
	touch $@

# SGLang on a CPU needs a platform package and torchvision's operator names, both for tests only.
CPU_PLATFORM := tests/engines/sglang/cpu_platform
CPU_PLATFORM_FILES := $(wildcard $(addprefix $(CPU_PLATFORM)/,pyproject.toml *.py */*.py))
$(SGLANG): .venv-sglang/.cpu_platform
.venv-sglang/.cpu_platform: .venv-sglang/.locked $(CPU_PLATFORM_FILES)
	.venv-sglang/bin/python $(PIP) install --no-deps --no-build-isolation --force-reinstall ./$(CPU_PLATFORM)
	.venv-sglang/bin/python $(CPU_PLATFORM)/declare_torchvision_ops.py
	.venv-sglang/bin/python -m compileall -qq -j 0 .venv-sglang/lib || true  # some ship templates that are not Python
	touch $@
