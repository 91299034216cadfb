# Everything a fresh machine needs: Python 3.11+, make, a network. Nothing is installed outside .venv.
PYTHON ?= python3
BIN := .venv/bin
DEMO_DIR ?= demo-out

.PHONY: setup demo test lint clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cpu,rtx,dev]'
	touch $@

demo: setup
	$(BIN)/corp-deploy demo --output $(DEMO_DIR)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest --durations=10

clean:
	rm -rf .venv $(DEMO_DIR) build *.egg-info
