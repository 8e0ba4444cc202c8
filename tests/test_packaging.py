"""A wheel carries what an installed package needs: the kernels' sources, templates, tables."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
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


@pytest.mark.slow
def test_installed_wheel_answers_without_a_compiler(source: Path, tmp_path: Path) -> None:
    wheel, clean = build_wheel(source, tmp_path / "wheels"), tmp_path / "clean"
    venv.create(clean, with_pip=False)
    python = clean / "bin/python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-index", str(wheel)], check=True)
    (site,) = clean.glob("lib/*/site-packages")
    assert (site / "trt_eagle3/__init__.py").is_file()
    assert (site / f"trt_eagle3-{VERSION}.dist-info").is_dir()
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pair = [str(ROOT / "examples/tiny/target"), "--draft", str(ROOT / "examples/tiny/draft")]
    environment = {"PATH": str(clean / "bin"), "HOME": str(tmp_path)}
    done = subprocess.run(
        [str(clean / "bin/trt-eagle3"), "generate", *pair, "What is 12 plus 30?"],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "12 plus 30 equals 42." in done.stdout


def test_version_stands_in_one_place() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text().partition("\n## ")[2]
    assert changes.splitlines()[0] in (VERSION, "Unreleased")
    sources = [*(ROOT / "trt_eagle3").rglob("*.py"), ROOT / "Dockerfile", ROOT / "Makefile"]
    assert [str(file) for file in sources if f'"{VERSION}"' in file.read_text()] == []
