# The README's commands. Each makes .venv if it is not there and does everything; see README.md.
PYTHON ?= python3
BIN := .venv/bin

# What the tests use of lm-eval; `pip install qrt[lm]` brings all of its needs, some 300 MB.
LM_EVAL := lm-eval accelerate colorama lxml portalocker psutil sacrebleu tabulate

# Modules are compiled when first imported, and kept: not all that is installed, nor the same at every start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test exhaustive gpu ptx real lint docs audit

demo: .venv/installed
	$(BIN)/python -m qrt_eval.demo

test: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The suite with all of the many alike, such as every family calibrated in every scheme: an hour on two cores.
exhaustive: .venv/installed
	QRT_TEST_EXHAUSTIVE=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Every test that uses a GPU, on the one that is here, in parts of at most ten minutes; PART=attention runs one,
# REST=1 what failed or was not reached on this code. The record is eval/results/DEVICE/tests.json, which docs/kernels.md shows.
# PYTHON_GPU names another environment.
PYTHON_GPU ?= $(BIN)/python
gpu:
	$(PYTHON_GPU) tools/gpu_tests.py $(if $(PART),--part $(PART)) $(if $(REST),--rest)
	$(PYTHON_GPU) tools/gpu_tests.py --page

# The kernels as they are compiled for Hopper, executed on the CPU: the tests marked `ptx` (see tools/ptx/README.md).
ptx: .venv/installed
	QRT_TEST_PTX=some $(BIN)/python -m pytest -n 2 --dist worksteal tests/kernels tests/model tests/tools

# A real small model, in build/real unless QRT_REAL_MODEL names another folder; tests marked `real` then run too.
real: .venv/installed
	@$(BIN)/python -c "import gguf" 2>/dev/null || $(BIN)/python -m pip install --quiet --no-deps --constraint \
	    constraints.txt gguf || { echo "make real: pip cannot install gguf, which reads the model's file"; exit 1; }
	$(BIN)/python tests/support/real_model.py

lint: .venv/installed
	$(BIN)/ruff format --check --no-cache .
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy

# The documentation as a site, in build/docs; a broken link or reference fails it.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# A CycloneDX bill of what is installed (build/sbom.cdx.json), then every pinned version among the known
# vulnerabilities: fails on one, and where the index has no advisories to ask (a mirror may not).
audit: .venv/installed
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet cyclonedx-bom==7.5.0 pip-audit==2.10.1
	build/audit/bin/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-reproducible \
	    --output-file build/sbom.cdx.json
	build/audit/bin/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 13) else \
	    'qrt wants Python 3.11 or 3.12, $(PYTHON) is %d.%d; name another with PYTHON=' % v)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[serve,plot,test]"
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --no-deps $(LM_EVAL)
	touch $@

.venv/docs: .venv/installed
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[docs]"
	touch $@
