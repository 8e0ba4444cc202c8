"""GPU tests need a CUDA device and the library; without either they are skipped, and say which
is missing.

The library's checks alone are compiled here without the kernels, which takes seconds where nvcc's
headers are.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.plugins.capi_calls import PLUGINS
from tests.shared_folder import made_once
from trt_eagle3.engine import capi
from trt_eagle3.engine.capi.library import library as load_library


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if not capi.available():
        pytest.skip("the kernel library is not built: make plugins")
    return torch.device("cuda")


@pytest.fixture(scope="session")
def checks_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("no nvcc: the C library cannot be built here")
    sources = [*sorted((PLUGINS / "capi").glob("*.cpp")), Path(__file__).parent / "capi_stubs.cpp"]
    flags = ("-shared", "-Xcompiler=-fPIC", "-std=c++17", f"-I{PLUGINS / 'kernels'}")

    def compile_in(folder: Path) -> None:
        command = [nvcc, *flags, "-o", folder / name, *sources]
        subprocess.run(command, check=True, timeout=300)

    name = "libtrt_eagle3_capi.so"
    return made_once(tmp_path_factory, "capi", compile_in) / name


@pytest.fixture(scope="module")
def library(checks_library: Path) -> Iterator[ctypes.CDLL]:
    """The C library with kernels that do nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(capi.LIBRARY_VARIABLE, str(checks_library))
        load_library.cache_clear()
        yield load_library()
    load_library.cache_clear()
