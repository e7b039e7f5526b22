# make demo   environment, data, a baseline and an MHAR model on the same data, and the table of their difference
# make test   environment and all tests
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test clean

demo: .venv/ready
	$(BIN)/python train.py config/demo.py --residual=baseline
	$(BIN)/python train.py config/demo.py --residual=mhar
	$(BIN)/python report.py out/demo_baseline out/demo_mhar

test: .venv/ready-dev
	$(BIN)/python -m pytest -q

.venv/ready: requirements.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -r requirements.txt
	touch $@

.venv/ready-dev: requirements-dev.txt .venv/ready
	$(BIN)/pip install -q -r requirements-dev.txt
	touch $@

clean:
	rm -rf .venv
