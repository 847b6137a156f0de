# Every target sets up .venv by itself; a second call starts at once.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
GATE ?= examples/flights.toml
# Processes that run tests; each takes up to 2 GiB.
JOBS ?= 2
OUT ?= gates/$(basename $(notdir $(GATE)))

.PHONY: gate test lint test-slow test-gpu clean

# Trains both arms on real data and ends in a verdict; OUT keeps the records, so a second call resumes.
# GNU make turns every failing recipe into its own exit code 2: the verdict's code is in the text.
gate: $(STAMP)
	@status=0; $(BIN)/python -m qualitygates run $(GATE) --out $(OUT) || status=$$?; \
	case $$status in \
	  0) meaning="ACCEPT: non-inferior to BF16 by the promised margins";; \
	  1) meaning="REJECT: worse than the promised margins allow; this is a finding, not a crash";; \
	  2) meaning="INCONCLUSIVE: neither shown; counts as not accepted; this is a finding, not a crash";; \
	  *) meaning="no verdict: broken input or environment, see the message above";; \
	esac; \
	echo "exit code $$status = $$meaning"; \
	if [ $$status -le 2 ]; then echo "report: $(CURDIR)/$(OUT)/report.html"; fi; \
	exit $$status

# A file's tests stay together: they share what they set up.
test: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "lowprec needs Python 3.11 or newer; '$(PYTHON)' is missing or older:" \
	    "make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@
