PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check slow clean

demo: .venv/installed
	$(BIN)/twinreel demo

test: .venv/installed-test
	$(BIN)/python -m pytest

check: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell src docs benchmarks examples README.md CONTRIBUTING.md CHANGELOG.md
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_imports.py

slow: .venv/installed-test
	$(BIN)/python -m pytest -m slow

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	touch $@

.venv/installed-test: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test]'
	touch $@ .venv/installed

.venv/installed-dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test,dev]'
	touch $@ .venv/installed .venv/installed-test

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache
