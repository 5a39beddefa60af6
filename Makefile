# Everything from a fresh clone: needs make, a Python of at least 3.11 (or uv), and a package index.

PYTHON ?= python3
OUT ?=
ARGS ?=
# CPU builds of torch lie on an index of their own on most machines: TORCH="torch --index-url ..." as its site says.
# The pins of the oracle (torch, transformers) were tried with Python 3.11.
TORCH ?= torch==2.13.0
# Its JAX is that for CPU, of the version that Covey is measured with.
TUNIX ?= google-tunix==0.1.7 jax==0.10.2 jaxlib==0.10.2 flax==0.12.8 qwix==0.1.8 transformers==5.12.1
# Tests compile on one core each, and some wait for processes that they started: one worker more than there are cores. A
# file stays with one worker, because its tests share what was compiled. Files run in the order of conftest.py, which
# puts those that take long first. Quick tests wait for little, and collecting them takes each worker eight seconds.
DIST := --dist loadfile --no-loadscope-reorder
WORKERS ?= -n $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN) + 1 ))) $(DIST)
QUICK_WORKERS ?= -n $(shell getconf _NPROCESSORS_ONLN) $(DIST)

BIN := .venv/bin
PINS := -c constraints.txt
UV := $(shell command -v uv 2>/dev/null)
WANT := pyproject.toml constraints.txt
RUN := -e .
DEV := -e '.[dev]'
AOT := -e '.[dev,plan]'
ORACLE := -e '.[parity]'
RELEASE := build mypy twine
# Parsers of job files; Covey's own job writer needs the last three alone.
JOBS := kubernetes-validate==1.37.0 kubeflow-trainer-api==2.3.0 skypilot==0.14.1 pydantic pyyaml rich
# The extra docs, without Covey itself.
DOCS := zensical mkdocstrings-python ruff

# Containers often forbid Python to keep bytecode: then each of the many processes of the tests compiles Covey anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help quickstart tiny install schema test test-quick test-newest test-newest-client test-core aot coverage mutants docs docs-mkdocs lint bench bench-peers parity conformance golden-families check-jobs release-check release-tag colab clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' Makefile

quickstart: .venv/ready ## install, then train a small model: a few minutes on 2 cores (OUT=folder ARGS="--seed 1")
	$(BIN)/covey train quickstart $(if $(OUT),--out "$(OUT)") $(ARGS)

tiny: .venv/ready ## install, then teach a model made from scratch to add, and let it improve itself (OUT=folder ARGS="--seed 1")
	@out="$(OUT)"; n=1; while [ -z "$$out" ]; do [ -e runs/tiny-$$n ] || out=runs/tiny-$$n; n=$$((n + 1)); done; \
	$(BIN)/covey sft sft-tiny --out "$$out/sft" $(ARGS) && \
	$(BIN)/covey train arithmetic-tiny --model.source "$$out/sft" --out "$$out/rl" $(ARGS)

install: .venv/ready ## make .venv with Covey in it (jax for CPU)

schema: .venv/ready ## write docs/recipe.schema.json, by which editors complete recipes, and the tables of docs/algorithms.md, docs/diagnosis-rules.md, docs/models.md, docs/metrics.md and docs/names.md
	$(BIN)/python tools/recipe_schema.py
	$(BIN)/python -m tools.advantages_table
	$(BIN)/python -m tools.diagnosis_table
	$(BIN)/python -m tools.families_table
	$(BIN)/python -m tools.metrics_table
	$(BIN)/python -m tools.names_tables

test: .venv/ready-dev ## the whole test suite, and lint beside it, whose output comes last
	@mkdir -p .cache && $(MAKE) --no-print-directory lint > .cache/lint.txt 2>&1 & lint=$$!; \
	$(BIN)/python -m pytest $(WORKERS) $(ARGS); tests=$$?; \
	wait $$lint; lint=$$?; cat .cache/lint.txt; exit $$((tests | lint))

test-quick: .venv/ready-dev ## the tests that take less than a second each
	$(BIN)/python -m pytest -m "not slow" $(QUICK_WORKERS) $(ARGS)

test-newest: .venv-newest/ready ## the quick tests on the newest versions in Covey's ranges, whatever constraints.txt says (PYTHON=python3.13)
	.venv-newest/bin/python -m pytest -m "not slow" $(QUICK_WORKERS) $(ARGS)

# The client needs nothing of Covey, so it has an environment of its own, which is made anew.
test-newest-client: .venv/ready-dev ## covey serve with the newest client of Tinker's API (the package tinker)
	rm -rf .venv-tinker
	$(MAKE) --no-print-directory .venv-tinker/bin/pip
	$(if $(UV),uv pip install --python .venv-tinker/bin/python,.venv-tinker/bin/python -m pip install) tinker
	.venv-tinker/bin/python -c "import tinker; print('tinker', tinker.__version__)"
	TINKER_PYTHON=.venv-tinker/bin/python $(BIN)/python -m pytest -n 0 plugins/covey_serve/tests/test_real_client.py

test-core: .venv/ready-dev ## the tests of covey/ with every plugin hidden
	PYTHONPATH=tests/core_alone $(BIN)/python -m pytest tests $(WORKERS) $(ARGS)

aot: .venv-aot/ready ## compile programs for TPUs that are not there, and look at what the compiler made of them (ARGS="-k attention")
	.venv-aot/bin/python -m pytest -m aot tests/aot $(ARGS)

coverage: .venv/ready-dev ## the same tests, and the share of the package's lines that they run
	$(BIN)/python -m pytest -m "not slow" --cov --cov-report=term $(QUICK_WORKERS) $(ARGS)

mutants: .venv/ready-dev ## change what a loss depends on in 200 places, one at a time: does a test notice? half an hour (ARGS="--count 20")
	$(BIN)/python tools/mutants.py $(ARGS)

docs: .venv-docs/ready ## build the documentation site, build/site; a warning or a broken link is an error
	.venv-docs/bin/zensical build --strict --clean

docs-mkdocs: .venv-docs/ready ## build the same site by mkdocs-material, which it must not depend on
	$(call install,.venv-docs,mkdocs-material)
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --clean --site-dir build/site-mkdocs

lint: .venv/ready-dev ## ruff (rules and formatting), mypy, the contract on imports, and the limits on sizes (tools/gates.toml)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/package_stats.py --gates

bench: .venv/ready ## measure; each part ends in one line of JSON
	$(BIN)/python -m benchmarks $(ARGS)

bench-peers: .venv/ready .venv-tunix/ready .venv-parity/ready ## the same GRPO steps through Covey, google-tunix and TRL, in turn
	$(BIN)/python -m benchmarks.peers $(ARGS)

conformance: .venv/ready .venv-parity/ready .venv-tunix/ready ## the checks of covey conformance on Covey, TRL, google-tunix and a plain loop, to runs/conformance (OUT=folder ARGS="--only gradient")
	@mkdir -p $(or $(OUT),runs/conformance)
	$(BIN)/covey conformance --against trl,tunix,examples/conformance/plain_loop.py $(ARGS) \
	  --html $(or $(OUT),runs/conformance)/table.html --json > $(or $(OUT),runs/conformance)/table.json

parity: .venv-parity/ready ## golden numbers again, and round trips, with torch, transformers, PEFT, TRL (ARGS="--gguf FILE")
	.venv-parity/bin/python tests/parity/make_golden.py $(ARGS)
	.venv-parity/bin/python tests/parity/make_heads_golden.py
	.venv-parity/bin/python tests/parity/make_trl_golden.py
	.venv-parity/bin/python tests/parity/make_draw_golden.py
	.venv-parity/bin/python tests/parity/make_tool_schemas.py
	.venv-parity/bin/python tests/parity/live_round_trip.py

golden-families: .venv-parity/ready ## golden numbers of the model families again, and no others; tried with Python 3.11 (PYTHON=python3.11)
	.venv-parity/bin/python tests/parity/make_golden.py families

check-jobs: .venv-jobs/ready ## read the job files of covey launch by the parsers of their projects (ARGS=--allow-missing)
	PYTHONPATH=. .venv-jobs/bin/python tools/check_jobs.py $(ARGS)

# As a user gets it: the wheel is built from the sdist, and its dependencies are the newest that its ranges allow. It is
# used from dist: in the root mypy would read the checkout.
release-check: .venv-release/ready ## build sdist and wheel, check them, use the wheel in an empty environment
	rm -rf dist .venv-wheel
	.venv-release/bin/python -m build --outdir dist
	.venv-release/bin/python -m twine check --strict dist/*
	$(MAKE) .venv-wheel/bin/pip
	$(if $(UV),uv pip install --python .venv-wheel/bin/python,.venv-wheel/bin/python -m pip install) dist/*.whl
	cd dist && ../.venv-wheel/bin/covey doctor
	cd dist && ../.venv-wheel/bin/python ../tests/typed/program.py
	cd dist && ../.venv-release/bin/python -m mypy --strict --config-file= --cache-dir=/dev/null \
	  --python-executable ../.venv-wheel/bin/python ../tests/typed/program.py

release-tag: ## is the tag of this commit (GITHUB_REF_NAME) the version, and has CHANGELOG.md its section?
	$(PYTHON) tools/release_tag.py

colab: .venv/ready-dev ## which packages of Colab's runtime does pip replace for Covey? asks a package index
	$(BIN)/python tools/colab.py

clean: ## remove all environments, caches and build outputs; runs/ stays
	rm -rf .venv .venv-aot .venv-docs .venv-jobs .venv-newest .venv-parity .venv-release .venv-tinker .venv-tunix .venv-wheel .cache .coverage .grimp_cache .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/ready: $(WANT) | .venv/bin/pip
	$(call install,.venv,$(RUN))
	@touch $@

.venv/ready-dev: $(WANT) | .venv/bin/pip
	$(call install,.venv,$(DEV))
	@touch .venv/ready $@

.venv-parity/ready: $(WANT) | .venv-parity/bin/pip
	@$(call install,.venv-parity,$(TORCH)) || { \
	  echo "If $(TORCH) has no build for $$(.venv-parity/bin/python --version): rm -r .venv-parity, and the same with PYTHON=python3.11"; exit 1; }
	$(call install,.venv-parity,$(ORACLE))
	@touch $@

.venv-newest/ready: pyproject.toml | .venv-newest/bin/pip
	$(if $(UV),uv pip install --python .venv-newest/bin/python --upgrade,.venv-newest/bin/python -m pip install --upgrade) $(DEV)
	@touch $@

.venv-aot/ready: $(WANT) | .venv-aot/bin/pip
	$(call install,.venv-aot,$(AOT))
	@touch $@

# A peer has versions of its own. TRL is the one of .venv-parity, with torch.
.venv-tunix/ready: | .venv-tunix/bin/pip
	$(if $(UV),uv pip install --python .venv-tunix/bin/python,.venv-tunix/bin/python -m pip install) $(TUNIX)
	@touch $@

.venv-jobs/ready: | .venv-jobs/bin/pip
	$(if $(UV),uv pip install --python .venv-jobs/bin/python,.venv-jobs/bin/python -m pip install) $(JOBS)
	@touch $@

.venv-docs/ready: $(WANT) | .venv-docs/bin/pip
	$(call install,.venv-docs,$(DOCS))
	@touch $@

.venv-release/ready: constraints.txt | .venv-release/bin/pip
	$(call install,.venv-release,$(RELEASE))
	@touch $@

# An environment that could not be made in full is removed, so that the next call starts afresh.
%/bin/pip:
ifdef UV
	uv venv --seed --python '$(if $(filter file,$(origin PYTHON)),>=3.11,$(PYTHON))' $*
else
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Covey needs Python 3.11 or newer, and $(PYTHON) is not: name another with  make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $* || { rm -rf $*; exit 1; }
endif

install = $(if $(UV),uv pip install --python $(1)/bin/python $(PINS) $(2),$(1)/bin/python -m pip install $(PINS) $(2))
