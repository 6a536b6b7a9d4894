# Everything runs in .venv, see deploy/setup.sh.
PYTHON := .venv/bin/python

.PHONY: setup check test slow proto docs

setup:
	bash deploy/setup.sh --dev

check:
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright
	.venv/bin/lint-imports
	$(PYTHON) tools/gen_proto.py --check
	$(PYTHON) tools/gen_configuration.py --check
	$(PYTHON) tools/gen_metrics.py --check

test:
	$(PYTHON) -m pytest

slow:
	$(PYTHON) -m pytest -m slow

proto:
	$(PYTHON) tools/gen_proto.py

docs:
	$(PYTHON) tools/gen_configuration.py
	$(PYTHON) tools/gen_metrics.py
	.venv/bin/mkdocs build --strict -d build/site
