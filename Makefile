# Everything is one command away; `make help` lists them. tools/setup finds or installs what is
# missing, cmake does the rest. WERROR=1 turns warnings into errors, PREFIX sets where to install,
# CUDA=OFF leaves a CUDA toolkit alone.
PREFIX ?= $(CURDIR)/install
WERROR ?= 0
CUDA ?= AUTO
JOBS ?= $(shell nproc)

-include build/tools.mk

configure = $(CMAKE) --preset $(1) --log-level=WARNING -DCMAKE_MAKE_PROGRAM=$(NINJA) \
  -DSINKHORN_PYTHON=$(PYTHON) -DSINKHORN_WERROR=$(WERROR) $(2)
run_tests = $(CMAKE) -E chdir build/$(1) $(dir $(CMAKE))ctest --output-on-failure -j $(JOBS)

.PHONY: help setup demo build test cpu-build sanitize bench bench-gpu format install clean

help:
	@echo "make demo      set up, build, and train small models that learn to sort, on the CPU"
	@echo "make test      set up, build, and run every test this machine can run"
	@echo "make build     set up and build build/release/sinkhorn and libsinkhorn.so"
	@echo "make bench     measure the operators beside their peers, on this machine"
	@echo "make bench-gpu the same on this machine's GPU, with the goals; STEPS=1: training steps, too"
	@echo "make sanitize  tests of kernels and file headers under Address-, UB- and ThreadSanitizer"
	@echo "make cpu-build build without using a CUDA toolkit, into build/cpu"
	@echo "make install   install to PREFIX=$(PREFIX)"
	@echo "make format    format the C++ sources"
	@echo "make clean     remove build output (not .venv)"

# Re-reads build/tools.mk, which setup writes, in a second make.
setup:
	@tools/setup

demo: setup
	@$(MAKE) --no-print-directory .demo

build: setup
	@$(MAKE) --no-print-directory .build

test:
	@tools/setup tests
	@$(MAKE) --no-print-directory .test

cpu-build: setup
	@$(MAKE) --no-print-directory .cpu-build

sanitize: setup
	@$(MAKE) --no-print-directory .sanitize

bench: setup
	@$(MAKE) --no-print-directory .bench

bench-gpu: setup
	@$(MAKE) --no-print-directory .bench-gpu

install: setup
	@$(MAKE) --no-print-directory .install

format: setup
	@$(MAKE) --no-print-directory .format

clean:
	rm -rf build install

.PHONY: .demo .build .test .cpu-build .sanitize .bench .bench-gpu .install .format
.build:
	@$(call configure,release,-DSINKHORN_CUDA=$(CUDA))
	@$(CMAKE) --build build/release -j $(JOBS)

.demo:
	@$(call configure,release,-DSINKHORN_CUDA=$(CUDA))
	@$(CMAKE) --build build/release -j $(JOBS) --target sinkhorn_program
	@$(PYTHON) tools/demo

.test: .build
	@$(call run_tests,release)

.cpu-build:
	@$(call configure,cpu)
	@$(CMAKE) --build build/cpu -j $(JOBS) --target sinkhorn_program

.sanitize:
	@$(call configure,asan)
	@$(CMAKE) --build build/asan -j $(JOBS)
	@$(call run_tests,asan)
	@$(call configure,tsan)
	@$(CMAKE) --build build/tsan -j $(JOBS)
	@$(call run_tests,tsan)

.bench: .build
	@$(PYTHON) bench/run.py

.bench-gpu: .build
	@$(CMAKE) --build build/release -j $(JOBS) --target bench_generate
	@$(PYTHON) bench/gpu.py
	@build/release/bin/bench_generate
	@build/release/bin/bench_generate --block 128
	@[ -z "$(STEPS)" ] || $(PYTHON) bench/gpu_step.py

.install: .build
	@$(CMAKE) --install build/release --prefix $(PREFIX)

.format:
	@formatter=$$(command -v $(dir $(PYTHON))clang-format || command -v clang-format) && \
	git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs $$formatter -i
