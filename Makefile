# Everything runs in .venv, which the first target makes. `make help` lists the targets.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := install --quiet --disable-pip-version-check
# Where a machine forbids bytecode, each process of a run would compile all its modules anew.
export PYTHONDONTWRITEBYTECODE :=
# Test processes side by side, for two cores: a test that starts a service waits half of its time.
JOBS ?= 3
# Tests of a file share what it builds, so one process runs them all.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo test cluster check tpu-check plans format proto smollm2 chromium demo-model chaos soak clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 14

.venv/.run: pyproject.toml constraints.txt
	@echo "installing into .venv (about a minute)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip $(INSTALL) -c constraints.txt .
	@touch $@

.venv/.test: .venv/.run
	$(BIN)/python -m pip $(INSTALL) -c constraints.txt '.[test]'
	@touch $@

.venv/.tpu: .venv/.run
	$(BIN)/python -m pip $(INSTALL) -c constraints.txt '.[tpu]'
	@touch $@

SITE_PACKAGES := 'import sysconfig; print(sysconfig.get_path("purelib"))'

# An older transformers, which must read our exports too; torch is that of .venv.
.venv/.transformers4: .venv/.test
	$(BIN)/python -m venv .venv/transformers4
	.venv/transformers4/bin/python -m pip $(INSTALL) \
		'transformers==4.57.*' jinja2
	$(BIN)/python -c $(SITE_PACKAGES) > \
		$$(.venv/transformers4/bin/python -c $(SITE_PACKAGES))/torch.pth
	@touch $@

demo: .venv/.run ## train the embedded model on two CPU cores and watch its accuracy rise
	$(BIN)/python deploy/run_local.py --config deploy/runs/demo_cpu.yaml

test: .venv/.test ## run the whole test suite (but what needs a GPU or a TPU)
	$(PYTEST) -m "not gpu and not tpu and not cluster"

cluster: .venv/.test ## fail whole hosts of a run over several (namespaces, as root; minutes each)
	$(BIN)/python -m pytest -m cluster -s tests/cluster

check: .venv/.test ## lint, format, types and the quick tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(PYTEST) -m "not gpu and not tpu and not slow and not browser"

format: .venv/.test ## rewrite the sources as `make check` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: .venv/.test ## regenerate services/pb from proto/
	$(BIN)/python -m grpc_tools.protoc -Iservices/pb=proto/tandem/v1 \
		--python_out=. --pyi_out=. --grpc_python_out=. proto/tandem/v1/*.proto

smollm2: .venv/.run ## fetch SmolLM2-135M-Instruct (GGUF, 98 MB) into downloads/
	$(BIN)/python deploy/get_smollm2.py

chromium: ## install Debian's Chromium, which tests of the dashboard drive (as root)
	@which chromium > /dev/null || \
		{ apt-get update -q && apt-get install -qy --no-install-recommends chromium; }

demo-model: .venv/.run ## rebuild deploy/demo/model (a few minutes, deterministic)
	$(BIN)/python -m deploy.demo.make_model

tpu-check: .venv/.tpu ## compile the reference run and the kernels for a TPU v6e without a TPU (minutes)
	$(BIN)/python -m driver.plan --config deploy/runs/gsm8k_qwen25_3b_v6e8.yaml --topology v6e:2x4
	$(BIN)/python -m kernels.tpu_report

plans: .venv/.tpu ## compile the plans in deploy/plans anew (about ten minutes each)
	for plan in deploy/plans/*.json; do \
		command=$$($(BIN)/python -c 'import json, sys; print(json.load(open(sys.argv[1]))["command"])' $$plan); \
		eval "$(BIN)/$$command --json $$plan" || test $$? -eq 1 || exit 1; \
	done

chaos: .venv/.run ## train with 32 faults and compare with undisturbed runs (docs/chaos.md)
	$(BIN)/python -m deploy.chaos

soak: .venv/.run ## kill and add workers for ten minutes and look for leaks (docs/chaos.md)
	$(BIN)/python -m deploy.chaos soak --minutes 10

clean: ## remove caches and run outputs, keep .venv and downloads
	rm -rf runs .pytest_cache .ruff_cache build *.egg-info
