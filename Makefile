# `make demo` and `make test` need python3 (3.10 to 3.12), g++ and make; they create .venv on first use.
SHELL := /bin/sh
VENV := .venv
RUN := $(VENV)/bin/python
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# A sourced ROS 2 workspace would mix with the ROS 2 of .venv.
unexport AMENT_PREFIX_PATH CMAKE_PREFIX_PATH COLCON_PREFIX_PATH PYTHONPATH PYTHONHOME ROS_DISTRO RMW_IMPLEMENTATION

MESSAGE_SOURCES := $(wildcard msg/*.msg launch/*.py config/*.*) $(shell find cmake -type f) \
  CMakeLists.txt package.xml setup.py pyproject.toml
SECONDS ?= 60
PYTEST_ARGS ?=
WORKERS ?= 2
COVERAGE_ARGS := $(if $(COVERAGE),--cov --cov-report=term,)

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint docs bench coverage fuzz soak lock clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1|/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null || \
	 sed -n 's/^\([a-z]*\):.*## /  make \1    /p' $(MAKEFILE_LIST)

setup: $(VENV)/.package  ## create .venv, install the pinned packages, build the messages

demo: setup  ## run the real node on a synthetic recording; pictures and report in demo_output/
	@$(VENV)/bin/lepard demo

test: setup  ## all tests, in two processes; WORKERS=0 for one, the fast ones first
	@$(RUN) -m pytest --numprocesses $(WORKERS) --dist loadfile $(COVERAGE_ARGS) $(PYTEST_ARGS)

lint: setup  ## style, types, import rules
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@$(RUN) -m pytest -q test/test_imports.py

docs: setup  ## the documentation site, in .build/docs/index.html; a warning is an error
	@$(RUN) -m sphinx -q -W --keep-going -b html -d .build/doctrees docs .build/docs
	@echo "The site is .build/docs/index.html"

bench: setup  ## time network, node, registration and solver; DATA=folder of 3DMatch scenes for the network
	@for script in "network.py $(if $(DATA),--data $(DATA),)" node.py "registration.py speed" nonrigid.py; do \
	  echo "== bench/$$script"; $(RUN) bench/$$script || exit 1; done

coverage:  ## all tests, with line coverage
	@$(MAKE) --no-print-directory test COVERAGE=1

fuzz: setup  ## random input to decoders and readers; SECONDS=600 for longer
	@$(RUN) test/fuzz/fuzz.py --seconds $(SECONDS)

soak: setup  ## replay at sensor rate; SECONDS=1800 for the whole half hour
	@$(RUN) bench/soak.py --seconds $(SECONDS)

lock: $(VENV)/.installed  ## update requirements.lock to the newest versions
	@$(RUN) tools/lock.py

clean:  ## remove all build products and .venv
	@rm -rf $(VENV) .build build install log demo_output *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  .coverage .coverage.*
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: requirements.lock
	@python=$$(sh tools/preflight.sh) && echo "Creating $(VENV) with $$python (some minutes, once) ..." && \
	 $$python -m venv $(VENV)
	@$(RUN) -m pip install --quiet -r requirements.lock || { echo "lepard_ros: not all packages could be installed;\
	 see above, check the network connection, and run make again: it goes on where it stopped." >&2; exit 1; }
	@touch $@

$(VENV)/.package: $(VENV)/.installed $(MESSAGE_SOURCES)
	@echo "Building the messages (half a minute) ..."
	@mkdir -p .build
	@$(RUN) -m pip install --quiet --no-deps --no-build-isolation --editable . >.build/package.log 2>&1 || \
	 { cat .build/package.log; echo "lepard_ros: the messages could not be built; the log is in .build/package.log." >&2; exit 1; }
	@touch $@
