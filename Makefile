# One command each; everything it needs is installed into .venv, once.

PYTHON ?= python3
PYTEST ?= .venv/bin/python -m pytest
# A worker for each processor; what says so stays together (`xdist_group`).
SPREAD ?= -n auto --maxprocesses 4 --dist loadgroup
ARGS ?=
UV ?= .venv/bin/uv
# What runs on Kafka's clients, and so on a log; and FastAPI, for an example.
FRAMEWORKS = .venv/quixstreams .venv/faststream .venv/faust .venv/fastapi
# Of pyproject.toml: those that users install.
EXTRAS = aiokafka avro confluent-kafka demo fsspec kafka kafka-python opentelemetry polars spark
# What `make versions` runs in.
PYTHONS ?= python3.11 python3.12 python3.13

.PHONY: quick test test-all nightly lowest versions test-kafka kafka-python-tests aiokafka-tests kafka-suite clients check lint wheel jar spark-versions engines bench demo docs docs-tables keep-roots option-types kafka-messages clean

# The tests start Python hundreds of times; without bytecode each compiles everything again.
unexport PYTHONDONTWRITEBYTECODE

# Four tiers, each with all of the one before: tests/support/tiers.py says how.
quick: .venv/.dev jar
	$(PYTEST) $(SPREAD) --tier=quick $(ARGS)

test: .venv/.dev jar
	$(PYTEST) $(SPREAD) --tier=test $(ARGS)

test-all: .venv/.dev jar spark-versions .venv/engines $(FRAMEWORKS) lowest
	$(PYTEST) $(SPREAD) --tier=all $(ARGS)

nightly: .venv/.dev jar spark-versions .venv/engines $(FRAMEWORKS)
	$(PYTEST) $(SPREAD) --tier=nightly $(ARGS)

# The lowest versions of the dependencies that pyproject.toml declares.
lowest: .venv/$(notdir $(PYTHON))/lowest/.installed jar
	$(<D)/bin/python -m pytest $(SPREAD) --tier=quick $(ARGS)

# The tier of `make test` in each Python, with the lowest and with the newest versions.
versions: .venv/.dev jar
	@failed=0; for python in $(PYTHONS); do \
		if ! $$python -c "" 2> /dev/null; then \
			echo "There is no $$python on the path, so nothing ran in it"; failed=1; continue; fi; \
		for which in lowest newest; do \
			echo "$$python with the $$which versions"; \
			$(MAKE) --no-print-directory .venv/$$python/$$which/.installed \
				&& .venv/$$python/$$which/bin/python -m pytest $(SPREAD) --tier=test $(ARGS) \
				|| failed=1; \
		done; \
	done; exit $$failed

# Mirrors from and to a Kafka broker, which is fetched from Maven Central, and groups with Java's
# consumers; needs Java and Maven.
test-kafka: .venv/.dev
	$(PYTEST) --kafka tests/kafka $(ARGS)

# kafka-python's own integration tests, fetched from PyPI and run on a log.
kafka-python-tests: .venv/.dev
	PYTHONPATH=. .venv/bin/python tests/support/kafka_python_suite.py $(ARGS)

# aiokafka's own tests, fetched from its repository and run on a log.
aiokafka-tests: .venv/.dev
	PYTHONPATH=. .venv/bin/python tests/support/aiokafka_suite.py $(ARGS)

# Kafka's own integration tests, fetched from Maven Central and run on `embedlog serve`.
kafka-suite: .venv/.dev
	PYTHONPATH=. .venv/bin/python tests/support/kafka_suite.py $(ARGS)

# Clients and frameworks in other languages, fetched from their registries and run on the server;
# needs Node, Go, Java and Maven.  `make test-all` runs them, too.
clients: .venv/.dev jar .venv/spark-4.2
	$(PYTEST) --tier=all tests/test_server_clients.py tests/test_server_frameworks.py $(ARGS)

check: lint test wheel

lint: .venv/.dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/python jvm/format.py --check

# The tests against what users install, from a directory without embedlog/.
wheel: .venv/.dev jar
	rm -rf .wheel
	mkdir -p .wheel/run
	.venv/bin/python -m build --wheel --outdir .wheel/dist
	$(PYTHON) -m venv .wheel/venv
	.wheel/venv/bin/pip install --quiet "$$(ls .wheel/dist/*.whl)[dev]"
	for each in tests bench docs examples README.md CHANGELOG.md CONTRIBUTING.md Makefile mkdocs.yml pyproject.toml; do \
		if [ -e $$each ]; then cp -r $$each .wheel/run/; fi; done
	cd .wheel/run && ../venv/bin/python -m pytest $(SPREAD) $(ARGS)

bench: .venv/.dev jar
	$(PYTEST) bench --benchmark-only $(ARGS)

# Spark's JVM reader, into embedlog/spark/; without a JDK nothing is built.
jar: | .venv/bin/python
	.venv/bin/python jvm/build.py

# The older versions of Spark that the jar is tested with, each in a directory of its own.
spark-versions: .venv/spark-4.1 .venv/spark-4.2

.venv/spark-%: | .venv/bin/python
	.venv/bin/python -m pip install --quiet --target $@.partial 'pyspark==$*.*'
	mv $@.partial $@

# What the recipes of docs/splits.md run with, beside the other tools; PyTorch takes 5 GB.
# And frameworks on Kafka's clients: Quix Streams needs an older confluent-kafka than these are
# tested with.
engines: .venv/engines .venv/torch $(FRAMEWORKS)

.venv/torch: PACKAGES = torch
.venv/quixstreams: PACKAGES = quixstreams
.venv/faststream: PACKAGES = 'faststream[kafka,confluent]'
.venv/faust: PACKAGES = faust-streaming
.venv/engines: PACKAGES = dask 'deltalake>=1.6' ray
.venv/fastapi: PACKAGES = fastapi httpx uvicorn
.venv/engines .venv/torch $(FRAMEWORKS): | .venv/bin/python
	.venv/bin/python -m pip install --quiet --target $@.partial $(PACKAGES)
	mv $@.partial $@

# The rows of both databases in docs/format.md, from embedlog/keyspace.py.
# Once for each release: what later ones must read.
keep-roots: .venv/.dev
	PYTHONPATH=tests .venv/bin/python tests/support/released_roots.py

docs-tables: .venv/.dev
	PYTHONPATH=. .venv/bin/python tests/support/format_tables.py

# Kafka's messages, in embedlog/server/, from the jar of Kafka's clients; needs Maven.
kafka-messages: .venv/.dev
	.venv/bin/python tests/support/kafka_messages.py

# The types of settings in embedlog/config/options.py, from the configs beside it.
option-types: .venv/.dev
	PYTHONPATH=. .venv/bin/python tests/support/option_types.py

# The site, into site/; a warning or a broken link fails it.
# Its pages must print what they say.
docs: .venv/.dev .venv/.docs
	$(PYTEST) --tier=all -q tests/test_docs.py tests/test_tutorial.py tests/test_cookbook.py
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict $(ARGS)

demo: .venv/.demo jar
	.venv/bin/python examples/flights.py $(ARGS)

clean:
	rm -rf .venv .wheel site build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.dev: pyproject.toml | .venv/bin/python
	.venv/bin/python -m pip install --quiet --editable '.[dev]'
	touch $@

# A Python in which the core and all extras have their lowest versions; what only tests use, and
# what the dependencies depend on, has its newest.
.venv/%/lowest/.installed: pyproject.toml | .venv/.dev
	$(UV) venv --quiet --clear --no-python-downloads --python $(if $(filter $*,$(notdir $(PYTHON))),$(PYTHON),$*) $(@D)
	$(UV) pip compile --quiet --python $(@D)/bin/python --resolution lowest-direct \
		$(addprefix --extra ,$(EXTRAS)) --output-file $(@D)/constraints.txt pyproject.toml
	$(UV) pip install --quiet --python $(@D)/bin/python --constraint $(@D)/constraints.txt \
		--editable '.[dev]'
	touch $@

.venv/%/newest/.installed: pyproject.toml | .venv/.dev
	$(UV) venv --quiet --clear --no-python-downloads --python $(if $(filter $*,$(notdir $(PYTHON))),$(PYTHON),$*) $(@D)
	$(UV) pip install --quiet --python $(@D)/bin/python --upgrade --editable '.[dev]'
	touch $@

.venv/.demo: pyproject.toml | .venv/bin/python
	.venv/bin/python -m pip install --quiet --editable '.[demo]'
	touch $@

.venv/.docs: pyproject.toml | .venv/bin/python
	.venv/bin/python -m pip install --quiet --editable '.[docs]'
	touch $@
