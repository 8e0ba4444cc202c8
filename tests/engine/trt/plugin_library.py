"""The plugin library, compiled by g++ with kernels that do nothing: for builders, which launch
none. Its TensorRT is ``plugins/tensorrt/interface``, its CUDA and TensorRT wheels are ``WHEELS``.
"""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.tiny import ROOT

__all__ = ["REGISTRY_CASE", "WHEELS", "compile_plugins", "lacking"]

WHEELS = ROOT / ".venv-tensorrt"
"""Where ``make test`` installs requirements-tensorrt.lock."""
REGISTRY_CASE = "registry_case"
_CUDA = WHEELS / "nvidia" / "cu13"
_PLUGINS = ROOT / "plugins"
_FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")
_FOLDERS = (f"-I{_PLUGINS}/kernels", f"-I{_PLUGINS}/tensorrt")
_SYSTEM = ("-isystem", str(_PLUGINS / "tensorrt" / "interface"), "-isystem", str(_CUDA / "include"))
_CUDART = (str(_CUDA / "lib" / "libcudart_static.a"), "-ldl", "-lrt", "-lpthread")
_STUBS = (
    "tests/plugins/capi_stubs.cpp",
    "tests/plugins/tensorrt_stubs.cpp",
    "tests/engine/trt/planning_stub.cpp",
)
_NAME = _PLUGINS / "tensorrt" / "rtx" / "name.cpp"


def lacking() -> str | None:
    """What is missing for ``compile_plugins``; None where all is there."""
    if not (WHEELS / ".ready").is_file():
        return f"no wheels of TensorRT for RTX in {WHEELS.name}: make test installs them"
    return None if shutil.which("g++") else "no g++"


def compile_plugins(folder: Path) -> Path:
    """Put the library into ``folder``, its companion into ``rtx/`` there, as ``make plugins`` does,
    and the program ``REGISTRY_CASE`` beside it.
    """
    sources = [
        *sorted((_PLUGINS / "tensorrt").glob("*.cpp")),
        _PLUGINS / "capi" / "arguments.cpp",
        _PLUGINS / "capi" / "packed_arguments.cpp",
        _PLUGINS / "capi" / "moe_arguments.cpp",
        _PLUGINS / "capi" / "recurrent_arguments.cpp",
        *(ROOT / name for name in _STUBS),
    ]
    library, program = folder / "libtrt_eagle3_plugins.so", folder / REGISTRY_CASE
    case = Path(__file__).with_name(f"{REGISTRY_CASE}.cpp")
    parsed = _parsed(_PLUGINS / "tensorrt" / "tensors.h", folder)
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda source: _compile(source, folder, parsed), [*sources, case]))
    _companion(folder)
    _run("-shared", "-o", library, *objects[:-1], *_CUDART, "-Wl,-z,nodelete")
    _run("-o", program, objects[-1], "-ldl")
    return library


def _parsed(header: Path, folder: Path) -> Path:
    """What is given to ``-include`` so that ``header`` is not parsed for each source."""
    given = folder / "parsed.h"
    given.write_text(f'#include "{header}"\n')
    _run(*_FLAGS, *_FOLDERS, *_SYSTEM, "-x", "c++-header", given, "-o", f"{given}.gch")
    return given


def _compile(source: Path, folder: Path, parsed: Path) -> Path:
    made = folder / f"{source.stem}.o"
    _run(*_FLAGS, *_FOLDERS, *_SYSTEM, "-include", parsed, "-c", source, "-o", made)
    return made


def _companion(folder: Path) -> None:
    """Of plugins/tensorrt/CMakeLists.txt: an empty library that needs the one with the number."""
    stand_in, companion = folder / "stand_in.so", folder / "rtx" / "libtensorrt_rtx.so"
    companion.parent.mkdir()
    _run("-shared", "-fPIC", "-Wl,-soname,libtensorrt_rtx.so.1", "-o", stand_in, _NAME)
    soname = "-Wl,-soname,libtensorrt_rtx.so"
    _run("-shared", "-fPIC", soname, "-Wl,--no-as-needed", "-o", companion, _NAME, stand_in)


def _run(*arguments: str | Path) -> None:
    done = subprocess.run(["g++", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
