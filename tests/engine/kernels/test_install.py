"""install-kernels: what cmake is asked, and where the libraries go."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trt_eagle3.engine.kernels import install, libraries
from trt_eagle3.engine.kernels.install import install_kernels
from trt_eagle3.errors import EnvironmentMissingError, UserError

ROOT = Path(__file__).parents[3]
CMAKE = """#!{python}
import json, pathlib, sys
words = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(words) + chr(10))
if "--build" in words:
    if {fails}:
        sys.exit("nvcc: no such architecture")
    build = pathlib.Path(words[words.index("--build") + 1])
    (build / "libtrt_eagle3_capi.so").write_text("library")
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that is the PATH, and a cache of our own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    _program(folder / "nvcc", "")
    _cmake(tmp_path)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("TRT_EAGLE3_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(install, "_CUDA", tmp_path / "no cuda")
    libraries.installed_folder.cache_clear()
    return tmp_path


def _program(file: Path, text: str) -> None:
    file.write_text(text or f"#!{sys.executable}\n")
    file.chmod(0o755)


def _cmake(folder: Path, *, fails: bool = False) -> None:
    text = CMAKE.format(python=sys.executable, log=str(folder / "log"), fails=fails)
    _program(folder / "bin/cmake", text)


def _asked(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


def test_libraries_go_where_sessions_look(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_PACKAGE", tools / "trt_eagle3")
    for module in (libraries, install):
        monkeypatch.setattr(module, "kernel_sources", lambda: ROOT / "plugins")
    found = install_kernels(["90", "sm_89"])
    assert found.architectures == ("90a-real", "89-real")
    assert found.libraries == (libraries.find_library("libtrt_eagle3_capi.so"),)
    assert found.libraries[0].is_relative_to(tools / "cache")
    configure, build = _asked(tools)
    assert "-DTRT_EAGLE3_ARCHITECTURES=90a-real;89-real" in configure
    assert build[0] == "--build"


def test_architectures_are_those_of_the_gpus_here(tools: Path) -> None:
    _program(tools / "bin/nvidia-smi", "#!/bin/sh\necho 9.0\necho 9.0\necho 12.0\n")
    assert install_kernels(folder=tools / "out").architectures == ("120-real", "90a-real")
    assert (tools / "out/libtrt_eagle3_capi.so").read_text() == "library"


def test_library_that_cannot_be_put_there_leaves_the_old_one(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tools / "out").mkdir()
    (tools / "out/libtrt_eagle3_capi.so").write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space"):
        install_kernels(["90"], folder=tools / "out")
    (left,) = (tools / "out").iterdir()
    assert left.read_text() == "old"


def test_tensorrt_headers_are_handed_on(tools: Path) -> None:
    (tools / "include").mkdir()
    (tools / "include/NvInfer.h").touch()
    install_kernels(["80"], tensorrt_include=tools / "include", folder=tools / "out")
    assert f"-DTENSORRT_INCLUDE_DIR={tools / 'include'}" in _asked(tools)[0]
    with pytest.raises(UserError, match=r"--tensorrt-include .*: no NvInfer\.h there"):
        install_kernels(["80"], tensorrt_include=tools, folder=tools / "out")


@pytest.mark.parametrize("word", ["75", "Hopper", "", "9.0"])
def test_architecture_that_is_none_is_refused(tools: Path, word: str) -> None:
    with pytest.raises(UserError, match=f"--architecture {word}: expected a number"):
        install_kernels([word], folder=tools / "out")


def test_what_is_missing_is_named(tools: Path) -> None:
    with pytest.raises(EnvironmentMissingError, match=r"lists no GPU\. Give the architecture"):
        install_kernels(folder=tools / "out")
    (tools / "bin/nvcc").unlink()
    with pytest.raises(EnvironmentMissingError, match="no nvcc here: install NVIDIA's CUDA"):
        install_kernels(["90"], folder=tools / "out")


def test_failed_build_is_one_line_and_leaves_nothing(tools: Path) -> None:
    _cmake(tools, fails=True)
    with pytest.raises(UserError, match=r"cmake failed: .*no such architecture") as caught:
        install_kernels(["90"], folder=tools / "out")
    assert "\n" not in str(caught.value)
    assert not list((tools / "out").iterdir())


def test_other_sources_have_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for text in ("one", "two"):
        (tmp_path / "CMakeLists.txt").write_text(text)
        monkeypatch.setattr(libraries, "kernel_sources", lambda: tmp_path)
        libraries.installed_folder.cache_clear()
        names.append(libraries.installed_folder().name)
    libraries.installed_folder.cache_clear()
    assert names[0] != names[1]


def test_command_prints_what_it_wrote(tools: Path) -> None:
    command = "from trt_eagle3.cli import main; main()"
    words = ["install-kernels", "--architecture", "90", "--output", str(tools / "out"), "--json"]
    done = subprocess.run(
        [sys.executable, "-c", command, *words],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    assert json.loads(done.stdout)["libraries"] == [str(tools / "out/libtrt_eagle3_capi.so")]
