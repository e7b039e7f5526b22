# make demo    environment, data, a baseline and an MHAR model on the same data, and the table of their difference
# make study   every residual method, head count and seed on config/study.py, probes of the routers, and the report; what is finished is skipped
# make test    environment, ruff and all tests
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo study test clean

demo: .venv/ready
	$(BIN)/python train.py config/demo.py --residual=baseline
	$(BIN)/python train.py config/demo.py --residual=mhar
	$(BIN)/python report.py out/demo_baseline out/demo_mhar

# What `make study` sweeps over, each a list: make study METHODS="baseline mhar" HEADS="4 8" KV="1 2 4" RATES="5e-4 1e-3" SEEDS="1 2" EXTRA=--max_steps=5000
METHODS ?= baseline hc_static hc_dynamic attnres mhar
HEADS ?= 2 4 8 16
KV ?= 4
RATES ?= 5e-4
SEEDS ?= 1 2 3
EXTRA ?=
OUT ?= out/study
VARIANTS = $(METHODS:mhar=$(HEADS:%=mhar_h%))

study: .venv/ready
	@set -e; for seed in $(SEEDS); do for rate in $(RATES); do for kv in $(KV); do for variant in $(VARIANTS); do \
	  case $$variant in \
	    hc_static) method="--residual=hc --hc_dynamic=false";; \
	    hc_dynamic) method="--residual=hc --hc_dynamic=true";; \
	    mhar_h*) method="--residual=mhar --route_heads=$${variant#mhar_h}";; \
	    *) method="--residual=$$variant";; \
	  esac; \
	  $(BIN)/python train.py config/study.py $$method --n_kv_head=$$kv --learning_rate=$$rate --seed=$$seed $(EXTRA) \
	    --out_dir=$(OUT)/$${variant}_kv$${kv}_lr$${rate}_s$$seed; \
	done; done; done; done
	@for run in $$(ls -d $(OUT)/*_s$(firstword $(SEEDS)) | grep -E '/(attnres|mhar)_'); do $(BIN)/python probe.py $$run || exit; done
	$(BIN)/python report.py $(OUT)/* --out_dir=report/study $(if $(word 2,$(RATES)),--best)

test: .venv/ready-dev
	$(BIN)/ruff format --check -q .
	$(BIN)/ruff check -q .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

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
