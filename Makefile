# The two commands of a newcomer are `make demo` and `make test`; each makes .venv when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# a venv of its own, because `make test` must pass without what this one adds
EXTRA_VENV := .venv-integrations
SITE_VENV := .venv-site

# many tests wait for a time-out or for another rank, so two cores are busy with four of them
AT_ONCE ?= 4
PYTEST = -m pytest -n $(AT_ONCE) --dist worksteal --durations 40 $(ONLY)
# threads of torch that wait for each other would spin, on cores that other processes have work for
test test-torch test-slow test-integrations: export OMP_WAIT_POLICY := passive

# the tests start hundreds of processes: where nobody keeps byte code, each would compile all sources
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-torch test-slow test-integrations test-soak soak check format bench docs site package clean
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[fast,stream,cli]' --group dev
	touch $(INSTALLED)

demo: $(INSTALLED)  ## train dense and compressed over the same slow link, side by side (within three minutes)
	$(BIN)/thinwire compare --workers 2 --link 100mbit --strategies muon-local quantized-local dense powersgd --size small --batch 4 --seconds 18 --out runs/demo

test: $(INSTALLED)  ## what must hold, but for the slowest tests (minutes)
	$(BIN)/python $(PYTEST) -m "not slow"

# most of them start several processes each
test-slow: AT_ONCE = 2
test-slow: $(INSTALLED)  ## the slowest tests: whole commands, lost machines, hundreds of steps (TENTH=0 to 9: a tenth of them)
	$(BIN)/python $(PYTEST) -m slow $(TENTH:%=--tenth %)

$(EXTRA_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(EXTRA_VENV)
	$(EXTRA_VENV)/bin/python -m pip install --quiet -c constraints.txt pip
	$(EXTRA_VENV)/bin/python -m pip install --quiet --no-compile -c constraints.txt torch numpy
	# compiled here, since its sources warn of themselves then, which is an error in a test
	$(EXTRA_VENV)/bin/python -m pip install --quiet -c constraints.txt torchao
	$(EXTRA_VENV)/bin/python -m pip install --quiet --no-compile -c constraints.txt -e '.[stream]' --group integrations
	touch $@

# every process imports the packages, which takes longer than most of the tests
test-integrations: AT_ONCE = 2
test-integrations: $(EXTRA_VENV)/.installed  ## the loops of Accelerate, Lightning and Transformers, with the real packages
	THINWIRE_INTEGRATIONS=required $(EXTRA_VENV)/bin/python $(PYTEST) -m integrations tests/integrations tests/stream/test_servers.py tests/test_docstrings.py tests/test_examples.py tests/test_recipes.py

TORCH ?= 2.11.0
OTHER_VENV := .venv-torch-$(TORCH)

# several GB: the builds of torch for CUDA
$(OTHER_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OTHER_VENV)
	{ grep -v '^torch==' constraints.txt; echo torch==$(TORCH); } > $(OTHER_VENV)/constraints.txt
	$(OTHER_VENV)/bin/python -m pip install --quiet -c constraints.txt pip
	$(OTHER_VENV)/bin/python -m pip install --quiet --no-compile -c $(OTHER_VENV)/constraints.txt torch numpy
	$(OTHER_VENV)/bin/python -m pip install --quiet --no-compile -c $(OTHER_VENV)/constraints.txt -e '.[fast,stream,cli]' --group dev
	touch $@

test-torch: $(OTHER_VENV)/.installed  ## the tests with another version of torch: make test-torch TORCH=2.11.0
	$(OTHER_VENV)/bin/python $(PYTEST) -m "not slow"

PACKAGES := -c "import sysconfig; print(sysconfig.get_path('purelib'))"

test-soak: $(INSTALLED)  ## a minute of it, on a machine with nothing else to do
	THINWIRE_SOAK=required $(BIN)/python -m pytest benchmarks/tests/test_soak.py

SECONDS_ ?= 1800
SEED ?= 1
EVERY ?= 20
soak: $(INSTALLED)  ## members that are killed, stopped, cut off and joined for 30 minutes (SECONDS_=, SEED=, EVERY=)
	$(BIN)/python -m benchmarks.soak --seconds $(SECONDS_) --seed $(SEED) --every $(EVERY) --folder runs/soak

check: $(INSTALLED)  ## lint, format, types, lengths of documents, plain English, and the ceilings of benchmarks/structure.json
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.test_lengths
	$(BIN)/python -m tests.test_english
	$(BIN)/python -m benchmarks.structure --check

format: $(INSTALLED)  ## mend what lint and format can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# without what they depend on: two files of one and one class of the other are measured, which need torch alone
$(VENV)/.peers: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt timm pytorch_optimizer
	touch $@

bench: $(VENV)/.peers  ## measure everything (under ten minutes): benchmarks/results and benchmarks/performance.md
	$(BIN)/python -m benchmarks

docs: $(INSTALLED)  ## print the pages that come from tables in the code
	$(BIN)/python -m thinwire.strategy.rules docs/composing.md

# it reads the docstrings, so it sees the packages of the first one
$(SITE_VENV)/.installed: $(INSTALLED)
	$(PYTHON) -m venv $(SITE_VENV)
	$(BIN)/python $(PACKAGES) > $$($(SITE_VENV)/bin/python $(PACKAGES))/shared.pth
	$(SITE_VENV)/bin/python -m pip install --quiet -c constraints.txt pip
	$(SITE_VENV)/bin/python -m pip install --quiet -c constraints.txt --group docs
	touch $@

site: $(SITE_VENV)/.installed  ## the documentation as pages in build/site, without a dead link
	PYTHONPATH=src:. $(SITE_VENV)/bin/python docs/site/build.py build/site

package:  ## wheel and sdist in dist/, installed into a folder of their own and tested there
	.ci/package $(PYTHON) dist

clean:  ## remove what the other targets made
	rm -rf $(VENV) .venv-torch-* $(EXTRA_VENV) $(SITE_VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
