"""The TensorRT plugins, driven as a builder and a runtime drive them, by a program that stands in
for TensorRT.

Needs nvcc and TensorRT's headers: ``TRT_EAGLE3_TENSORRT_INCLUDE`` names folders with an
``NvInferRuntime.h`` (several versions, separated as in PATH); without it the system's folder is
looked at. Everything runs under gcc's address and undefined-behaviour sanitizers. The device code
is left out, so launches are not tested here: plugins/tensorrt/README.md says how to run the same
program with it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"
VARIABLE = "TRT_EAGLE3_TENSORRT_INCLUDE"
SYSTEM_FOLDERS = ("/usr/include/x86_64-linux-gnu", "/usr/include/aarch64-linux-gnu", "/usr/include")
SANITIZE = "-fsanitize=address,-fsanitize=undefined,-fno-sanitize-recover=undefined"
STUBS = [Path(__file__).with_name(name) for name in ("capi_stubs.cpp", "tensorrt_stubs.cpp")]


def include_folders() -> list[Path]:
    named = os.environ.get(VARIABLE)
    folders = named.split(os.pathsep) if named else SYSTEM_FOLDERS
    return [Path(folder) for folder in folders if Path(folder, "NvInferRuntime.h").is_file()]


def compile_cpp(nvcc: str, include: Path, target: Path, sources: list[Path], *options: str) -> None:
    """Any warning in our sources is an error."""
    folders = [f"-I{PLUGINS / 'kernels'}", f"-I{PLUGINS / 'tensorrt'}", "-isystem", str(include)]
    flags = [
        "-std=c++17",
        f"-Xcompiler=-g1,-fPIC,-Wall,-Wextra,-Werror,-fvisibility=hidden,{SANITIZE}",
    ]
    subprocess.run(
        [nvcc, *flags, *folders, *options, "-o", target, *sources, "-ldl"], check=True, timeout=600
    )


@pytest.mark.parametrize("include", include_folders() or [None], ids=str)
def test_plugins_behave_as_tensorrt_expects(include: Path | None, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("no nvcc: the plugin library cannot be built here")
    if include is None:
        pytest.skip(f"no TensorRT headers: {VARIABLE} names no folder with NvInferRuntime.h")
    library, program = tmp_path / "libtrt_eagle3_plugins.so", tmp_path / "test"
    sources = [
        *sorted((PLUGINS / "tensorrt").glob("*.cpp")),
        PLUGINS / "capi" / "arguments.cpp",
        PLUGINS / "capi" / "packed_arguments.cpp",
        PLUGINS / "capi" / "moe_arguments.cpp",
        PLUGINS / "capi" / "recurrent_arguments.cpp",
        *STUBS,
    ]
    compile_cpp(nvcc, include, library, sources, "-shared")
    compile_cpp(
        nvcc, include, program, sorted((PLUGINS / "tensorrt" / "test").glob("*.cpp")), "-Xlinker=-E"
    )
    cublas = tmp_path / "libcublas_stand_in.so"
    compile_cpp(
        nvcc,
        include,
        cublas,
        [PLUGINS / "tensorrt" / "test" / "cublas" / "stand_in.cpp"],
        "-shared",
    )
    done = subprocess.run(
        [program, library, "--host", cublas],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    counts = re.search(r"(\d+) checks, (\d+) failed", done.stdout)
    assert counts is not None, done.stdout + done.stderr
    assert (done.returncode, int(counts[2])) == (0, 0), done.stdout
    assert int(counts[1]) > 1000, "hardly anything was checked"
    said = without_tensorrt(library)
    assert "Load TensorRT first" in said
    assert "14 creators" in said


def without_tensorrt(library: Path) -> str:
    """What the library says, and hands out, in a process that has no TensorRT; loading it must
    not fail there.
    """
    code = """if True:
        import ctypes, sys
        library, count = ctypes.CDLL(sys.argv[1]), ctypes.c_int32()
        assert not library.initTrtEagle3Plugins(None, None)
        library.trtEagle3PluginsStatus.restype = ctypes.c_char_p
        get = getattr(library, "getCreators", None) or library.getPluginCreators
        get(ctypes.byref(count))
        print(library.trtEagle3PluginsStatus().decode(), count.value, "creators")"""
    sanitizer = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
    )
    loaded = os.environ | {"LD_PRELOAD": sanitizer.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, "-c", code, library]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=60, env=loaded
    ).stdout
