"""A wheel carries what an installed package needs: the kernels' sources, templates, tables."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NEEDED = ("pyproject.toml", "setup.py", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, since setuptools writes beside what it builds."""
    folder = tmp_path_factory.mktemp("source")
    for name in NEEDED:
        shutil.copy(ROOT / name, folder)
    skip = shutil.ignore_patterns("__pycache__", "build")
    for name in ("trt_eagle3", "plugins", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=skip)
    return folder


def build_wheel(source: Path, destination: Path, **environment: str) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run(
        [*command, "--wheel-dir", str(destination), str(source)],
        check=True,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment},
    )
    (wheel,) = destination.glob("*.whl")
    return wheel


def test_wheel_carries_sources_of_kernels_and_finds_them(source: Path, tmp_path: Path) -> None:
    wheel = build_wheel(source, tmp_path / "wheels")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    kernels = [path.relative_to(source) for path in (source / "plugins/kernels").glob("*.cu*")]
    assert len(kernels) > 20
    assert {f"trt_eagle3/{path}" for path in kernels} <= names
    assert not [name for name in names if name.startswith("benchmarks/")]
    assert {"trt_eagle3/plugins/CMakeLists.txt", "trt_eagle3/plugins/capi/capi.cpp"} <= names
    data = [path for path in (source / "trt_eagle3").rglob("templates/*") if path.is_file()]
    assert {str(path.relative_to(source)) for path in data} <= names
    command = (
        "from trt_eagle3.engine.kernels.libraries import kernel_sources; print(kernel_sources())"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", command],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
    )
    assert done.stdout.strip() == str(tmp_path / "site/trt_eagle3/plugins")


def test_wheel_with_compiled_kernels_is_of_one_platform(source: Path, tmp_path: Path) -> None:
    built = tmp_path / "built"
    built.mkdir()
    (built / "libtrt_eagle3_capi.so").write_text("library")
    wheel = build_wheel(source, tmp_path / "wheels", TRT_EAGLE3_PREBUILT=str(built))
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("trt_eagle3/libtrt_eagle3_capi.so") == b"library"
