# make demo: generate with the embedded model. make test: lint, types and the quick tests. Both make .venv first.
# make test-clients: tests/clients in .venv-clients, which has google-tunix, lm-eval, openai and others, and those of
# litellm and instructor, which want older packages, in .venv-clients-apart.
# Another Python: make demo PYTHON=/path/to/python3.12

VENV := .venv
PY := $(VENV)/bin/python
CLIENTS := .venv-clients
APART := .venv-clients-apart
TESTS := not middle and not slow and not clients

.PHONY: env demo lint test quick test-all test-clients docs clean

env: $(VENV)/stamp
	@:

$(VENV)/stamp: pyproject.toml constraints.txt
	@$(PY) -c 'import pip, sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || { \
	    python=$$(PYTHON='$(PYTHON)' sh scripts/find_python.sh) || exit 1; \
	    echo "making $(VENV) with $$python (a minute or two, 1.2 GB)"; \
	    "$$python" -m venv --clear $(VENV); }
	@$(PY) -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt -e '.[test]'
	@$(PY) -m kernels_cpu.rates
	@touch $@

demo: env
	@$(PY) scripts/serve_batch.py examples/prompts.jsonl --ordered

lint: env
	@$(PY) -m ruff check --quiet
	@$(PY) -m ruff format --check --quiet
	@$(PY) -m pyright --pythonpath $(PY)

# Side by side: pyright has one core busy, and tests are there for the others.
test: env
	@$(MAKE) --no-print-directory -j 2 lint quick

# XLA optimises less here, but for what tests/as_users.txt names. Bytecode is written, whatever the environment says:
# programs that tests start would compile our modules anew.
quick: env
	@PYTHONDONTWRITEBYTECODE= JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(PY) -m pytest -n auto --maxprocesses 4 --dist worksteal --durations 20 -m "$(TESTS)"

# With what reads data sets, and what compiles for chips that are not there; CUDA's plugin apart, since jax would look
# for a card in every run.
test-all: lint
	@$(PY) -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt libtpu \
	    -e '.[data]'
	@test -d .venv-cuda || $(PY) -m pip install -qq --disable-pip-version-check --no-input --no-deps \
	    --target .venv-cuda $$($(PY) -c 'import jax; print(*(f"jax-cuda13-{p}=={jax.__version__}" for p in ("plugin", "pjrt")))')
	@PYTHONPATH=.venv-cuda $(PY) -m pytest

# The public API's pages from its docstrings, in build/api.
docs: env
	@$(PY) -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt -e '.[test,docs]'
	@$(PY) -W error -c 'import jpaged; [getattr(jpaged, name) for name in jpaged.__all__]; import pdoc.__main__; pdoc.__main__.cli()' \
	    -o build/api jpaged '!jpaged.demo' kernels_pallas

# Apart, since google-tunix takes older transformers and safetensors than constraints.txt has.
$(CLIENTS)/stamp: pyproject.toml constraints-clients.txt
	@python=$$(PYTHON='$(PYTHON)' sh scripts/find_python.sh) || exit 1; \
	    echo "making $(CLIENTS) with $$python (a few minutes, 2.5 GB)"; \
	    "$$python" -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install -qq --disable-pip-version-check --no-input -c constraints-clients.txt \
	    -e '.[clients,ray,renderers,metrics,server,structured,images]' pytest hypothesis psutil
	@touch $@

$(APART)/stamp: pyproject.toml constraints-clients-apart.txt
	@python=$$(PYTHON='$(PYTHON)' sh scripts/find_python.sh) || exit 1; \
	    echo "making $(APART) with $$python (a minute or two)"; \
	    "$$python" -m venv --clear $(APART)
	@$(APART)/bin/python -m pip install -qq --disable-pip-version-check --no-input -c constraints-clients-apart.txt \
	    -e '.[clients-apart,server,structured,metrics]' pytest hypothesis psutil
	@touch $@

test-clients: $(CLIENTS)/stamp $(APART)/stamp
	@$(CLIENTS)/bin/python -m pytest tests/clients
	@$(APART)/bin/python -m pytest tests/clients/test_litellm.py tests/clients/test_instructor.py tests/clients/test_langchain.py

clean:
	rm -rf $(VENV) $(CLIENTS) $(APART) .venv-golden .venv-cuda .pytest_cache .ruff_cache .hypothesis *.egg-info build
	find jpaged kernels_pallas scripts tests examples -name __pycache__ -type d -exec rm -rf {} +
