# Everything here needs Python 3.11, 3.12 or 3.13 and make; the first call sets up .venv.

PYTHON ?= python3
BIN := .venv/bin
# Each file is run by one process, which makes its costly fixtures once; the slow files come first (tests/conftest.py).
PYTEST_FLAGS ?= -n 2 --dist loadfile --no-loadscope-reorder
SCHEDULES ?=

.PHONY: help install demo compiled test test-all test-browser test-radosgw test-slurm test-ray test-lowest test-kubernetes package pictures lint bench docs docs-links surface simulate simulate-restarts clean

help:
	@echo "make demo      train a small model with four local replicas"
	@echo "make test      style, types and tests, as CI runs them"
	@echo "make test-all  the same and the tests of the night (tests/night.txt): further sides of each promise, chaos"
	@echo "make test-browser  the pages of replicas report in a real chromium (part of make test where there is one)"
	@echo "make test-radosgw  the S3 store at a real Ceph, started on loopback (needs its Debian packages)"
	@echo "make test-slurm  launches at a real Slurm, started on loopback (needs its Debian packages; part of make test-all)"
	@echo "make test-ray  the backend ray at a real head on loopback; installs Ray (380 MB) into .venv-ray"
	@echo "make test-kubernetes  the contracts and the table of answers at the cluster of KUBECONFIG (its current context)"
	@echo "make test-lowest  a selection of the tests with each dependency at its lower bound, in .venv-lowest (6 GB)"
	@echo "make package   wheel and sdist into dist/, installed and tried in empty environments (part of make test-all)"
	@echo "make pictures  each picture of the documentation, by its recipe in docs/pictures/ (needs chromium)"
	@echo "make docs      the site in docs/_build/html, without network (part of make test)"
	@echo "make docs-links  the same, and whether each link to another site answers"
	@echo "make surface   docs/surface.txt: the public names, options, settings and exit codes"
	@echo "make bench     the benchmarks, each beside its peer"
	@echo "make simulate  the rendezvous under 250,000 random schedules (SCHEDULES=n: as many)"
	@echo "make simulate-restarts  the same of decisions and keepers: 1,000,000 schedules"
	@echo "make clean     remove .venv, .venv-ray, .venv-lowest and caches"

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "replicas needs Python 3.11 or later; $(PYTHON) is older. Try: make PYTHON=python3.12 …"; exit 1; }
	@echo "The packages of this project go into .venv. With PyTorch they are several GB, so this takes some minutes."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# The demo needs PyTorch alone, and `make install` everything that tests need. So a first look does not wait for both.
.venv/.demo: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "replicas needs Python 3.11 or later; $(PYTHON) is older. Try: make PYTHON=python3.12 demo"; exit 1; }
	@test -e .venv/.installed || { \
		echo "PyTorch and this project go into .venv: up to 6 GB, once."; \
		$(PYTHON) -m venv .venv && \
		$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[diloco]'; }
	@touch $@

demo: .venv/.demo
	$(BIN)/replicas launch --n 4

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# mypy gives a worker process of its own three seconds to start, which is too short on a busy machine.
	$(BIN)/mypy
	@# A laptop with macOS is a client. It has a cache of its own: another platform makes every file be checked again.
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin executors diloco

compiled: install
	@$(BIN)/python -m compileall -q diloco executors  # once, and not in each process that a test starts

test: lint compiled
	$(BIN)/python -m pytest -m 'not slow and not live and not slurm' $(PYTEST_FLAGS)

test-all: lint compiled
	REPLICAS_SCHEDULES=$${REPLICAS_SCHEDULES:-3000} $(BIN)/python -m pytest $(PYTEST_FLAGS)

test-browser: install
	@command -v chromium >/dev/null || \
		{ echo "There is no chromium. On Debian: apt-get install --no-install-recommends chromium"; exit 1; }
	$(BIN)/python -m pytest -m browser

test-radosgw: install
	PYTHONPATH=tests $(BIN)/python -m servers.s3.radosgw $(BIN)/python -m pytest $(PYTEST_FLAGS) tests/contract/test_store_s3_radosgw.py

test-slurm: install
	@command -v sbatch >/dev/null || { echo "There is no Slurm. On Debian: apt-get install --no-install-recommends \
		slurmctld slurmd slurm-client munge"; exit 1; }
	$(BIN)/python -m pytest -m slurm $(PYTEST_FLAGS)

test-ray: install .venv-ray/.installed
	$(BIN)/python -m pytest -m ray

.venv-ray/.installed:
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/pip install --quiet --disable-pip-version-check 'ray[default]==2.60.0'
	@touch $@

test-lowest: install
	$(BIN)/python -m tests.lowest

test-kubernetes: install
	@test -n "$$KUBECONFIG" || { echo "KUBECONFIG names no cluster. The contract of the executor needs \
		REPLICAS_LIVE_RENDEZVOUS=s3://BUCKET/PREFIX as well."; exit 1; }
	$(BIN)/python -m pytest -m 'live and k8s'

docs: install
	$(BIN)/python -m sphinx -b html -W --keep-going -n -q docs docs/_build/html
	@echo "Open docs/_build/html/index.html"

docs-links: install
	$(BIN)/python -m sphinx -b linkcheck -q docs docs/_build/links

surface: install
	$(BIN)/python -m docs.generate.surface

package: install
	REPLICAS_DIST=$(CURDIR)/dist $(BIN)/python -m pytest tests/docs/test_package.py

pictures: install
	$(BIN)/python -m docs.pictures

bench: install
	$(BIN)/python -m tests.benchmarks

simulate: install
	$(BIN)/python -m tests.simulation $(SCHEDULES)

simulate-restarts: install
	$(BIN)/python -m tests.simulation --restarts $(or $(SCHEDULES),1000000)

clean:
	rm -rf .venv .venv-ray .venv-lowest docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis
