# The two commands a newcomer needs: `make demo` and `make test`. Both set up .venv themselves.
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
READY := .venv/.ready
BUNDLE := engines/tiny
SOURCES := $(wildcard trt_eagle3/*.py trt_eagle3/*/*.py)

.PHONY: demo test lint clean plugins

demo: $(BUNDLE)/bundle.json
	@bash examples/01_quickstart/run.sh $(BUNDLE)

$(BUNDLE)/bundle.json: $(READY) build_configs/tiny.yaml $(SOURCES)
	$(BIN)/trt-eagle3 build --config build_configs/tiny.yaml

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

$(READY): pyproject.toml requirements.lock
	@test -n "$(PYTHON)" || { echo "trt-eagle3 needs Python 3.11 or 3.12; name one: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[dev]'
	@touch $@

NVCC ?= $(firstword $(wildcard $(shell command -v nvcc) /usr/local/cuda/bin/nvcc))

# The CUDA kernels as a C library; torch sessions find it in plugins/build. With TENSORRT_INCLUDE=/path/to/TensorRT/include
# also as TensorRT plugins for the version that these headers are of (plugins/tensorrt/README.md).
plugins:
ifeq ($(NVCC),)
	@echo "plugins: no nvcc found, so no CUDA kernels are built; the CPU needs none. Name one: make plugins NVCC=/path/to/nvcc"
else
	cmake -S plugins -B plugins/build -DCMAKE_CUDA_COMPILER=$(NVCC) -DTENSORRT_INCLUDE_DIR=$(abspath $(TENSORRT_INCLUDE))
	cmake --build plugins/build --parallel
endif

clean:
	rm -rf .venv engines plugins/build .pytest_cache .mypy_cache .ruff_cache
