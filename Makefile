# On a fresh machine with Python 3.11, make and gcc: `make search`, `make test`, `make techniques`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# TorchRec demands the CUDA build of FBGEMM and an old torchmetrics, so it comes without what it demands.
EXTRA = $$($(BIN)/python -c 'import torch; print("tables-cuda" if torch.cuda.is_available() else "tables")')
TORCHREC = $(BIN)/python -m pip install --quiet --editable ".[$(EXTRA)]" && \
	$(BIN)/python -m pip install --quiet --no-deps torchrec==1.8.0

# axe-core, by which tests judge pages; the package demands a driver of browsers that is hundreds of times larger.
AXE = $(BIN)/python -m pip install --quiet --no-deps axe-playwright-python==0.1.8

.PHONY: setup search techniques test test-all chaos fuzz audit lint docs docs-serve bench clean

setup: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(AXE)
	$(TORCHREC) || echo 'TorchRec could not be installed: all works without it, but tables over several ranks'
	touch $(READY)

# make search                              the main job on the built-in demo log
# make search DATA=log.csv                 ... on a file of your own
# make search DATA=log.csv OUT=runs/x ARGS="trials=50 space=wide"
search: $(READY)
	$(BIN)/dhen-search run $(if $(DATA),--data $(DATA)) $(if $(OUT),--out $(OUT)) $(if $(DATA),,trials=20 minutes=7 demo.rows=100000) $(ARGS)

# make test                                two files of tests at a time
# make test WORKERS=4                      ... four, where there are cores and memory (docs/testing.md)
WORKERS ?= 2
# A file's tests share what its fixtures make, so they stay together; files go in the order of their names, in which
# the long ones are not the last. Processes compute with one thread; where a test takes more, none waits busily.
PYTEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(READY)
	$(PYTEST)

# make techniques                          a study on four ranks with little memory, in which several techniques are executed
# and predictions are made too low on purpose, so that some candidates run out of memory and climb the ladder
techniques: $(READY)
	$(BIN)/dhen-search run space=techniques ranks=2x2 hbm=6MiB memory_margin=-1MiB trials=8 minutes=3 threads=1 parallel=1 \
		baseline_trials=1 demo.rows=20000 training.epochs=1 training.batch_size=256 training.precision=fp32 --out $(or $(OUT),runs/techniques) $(ARGS)

# make test-all                            also what is marked slow
test-all: $(READY)
	$(PYTEST) -m ""

# make chaos                               faults at random moments of small studies, each once; docs/reliability.md has what came of them
# make chaos SEED=7 N=100 ARGS="rank_killed driver_killed"       ... these in turn, 100 in sum
SEED ?= 1
chaos: $(READY)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python tests/chaos/inject.py --seed $(SEED) $(if $(N),-n $(N)) $(ARGS)

# make fuzz                                varied inputs to all that reads what others have written, 10,000 for each reader
# make fuzz INPUTS=100000 ARGS="bundle log --folder fuzzed"       ... to two of them, kept to go on with
INPUTS ?= 10000
fuzz: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzzing/fuzz.py --inputs $(INPUTS) $(ARGS)

# make audit                               known holes in what is installed, by PyPI's database
audit: $(READY)
	$(BIN)/python -m pip install --quiet 'pip-audit>=2.9,<3'
	$(BIN)/pip-audit --skip-editable

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# make docs                                docs/reference, from the configuration classes, then the documentation site: site/index.html
docs: $(READY)
	$(BIN)/python docs/generate_reference.py
	$(BIN)/python docs/build_site.py

# make docs-serve                          the site at http://127.0.0.1:8000, drawn anew as documents change
docs-serve: $(READY)
	$(BIN)/python docs/build_site.py serve

# make bench                               speed on this machine
# make bench FUXICTR_PYTHON=.venv-fuxictr/bin/python       ... beside FuxiCTR (benchmarks/training/beside_peers.py says how to get it)
bench: $(READY)
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	$(BIN)/python -m benchmarks.data.preparation_speed
	$(BIN)/python -m benchmarks.training.beside_peers --fuxictr-python "$(FUXICTR_PYTHON)"
	$(BIN)/python -m benchmarks.training.scaling --axis widths
	$(BIN)/python -m benchmarks.search.overhead_per_candidate
	$(BIN)/python -m benchmarks.search.candidates_per_hour demo trials=8 --settings "parallel=1 threads=2" "parallel=2 threads=1"

clean:
	rm -rf $(VENV) build site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
