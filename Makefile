# make demo    environment, data, a baseline and an MHAR model on the same data, and the table of their difference
# make study   every residual method, head count and seed on config/study_long.py, probes of the routers, and the report; what is finished is skipped
# make test    environment, ruff and all tests
# make clean   removes .venv; data/ and out/ stay
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo study test clean

demo: .venv/ready
	@echo "run 1 of 2: the baseline"
	$(BIN)/python train.py config/demo.py --residual=baseline
	@echo "run 2 of 2: MHAR"
	$(BIN)/python train.py config/demo.py --residual=mhar
	$(BIN)/python report.py out/demo_baseline out/demo_mhar

# What `make study` sweeps over, each a list: make study METHODS="baseline mhar" HEADS="4 8" KV="1 2 4" RATES="5e-4 1e-3" SEEDS="1 2" EXTRA=--max_steps=5000
# A method is a residual, hc_<form>, mhar_h<heads>, or mhar for all HEADS; _x<scale> at its end sets route_lr_scale
CONFIG ?= config/study_long.py
METHODS ?= baseline hc_static hc_dynamic attnres mhar mhar_h8_x2.83 mhar_h8_x8
HEADS ?= 2 4 8 16
KV ?= 4
RATES ?= 5e-4
SEEDS ?= 1 2 3
EXTRA ?=
OUT ?= out/$(basename $(notdir $(CONFIG)))

study: .venv/ready
	@set -e; for seed in $(SEEDS); do for rate in $(RATES); do for kv in $(KV); do for method in $(METHODS:mhar=$(HEADS:%=mhar_h%)); do \
	  arm=$${method%_x*}; \
	  case $$method in *_x*) scale=$${method##*_x};; *) scale=1;; esac; \
	  case $$arm in \
	    hc_*) flags="--residual=hc --hc_form=$${arm#hc_}";; \
	    mhar_h[0-9]*) flags="--residual=mhar --route_heads=$${arm#mhar_h}";; \
	    *) flags="--residual=$$arm";; \
	  esac; \
	  $(BIN)/python train.py $(CONFIG) $$flags --route_lr_scale=$$scale --n_kv_head=$$kv --learning_rate=$$rate --seed=$$seed $(EXTRA) \
	    --out_dir=$(OUT)/$${method}_kv$${kv}_lr$${rate}_s$$seed; \
	done; done; done; done
	@for run in $(OUT)/attnres_*_s$(firstword $(SEEDS)) $(OUT)/mhar_h[0-9]*_s$(firstword $(SEEDS)); do \
	  ! ls -d $$run/step_* >/dev/null 2>&1 || $(BIN)/python probe.py $$run || exit; done  # some have lost their checkpoints
	$(BIN)/python report.py $(OUT)/*_s[0-9]* --out_dir=$(OUT)/report $(if $(word 2,$(RATES)),--best)

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
	@echo "data/ and out/ stay: remove them by hand if they are not needed"
