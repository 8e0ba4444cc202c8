"""What the TensorRT backend needs to be installed."""

from __future__ import annotations

import shutil
from pathlib import Path

from trt_eagle3.config import EngineConfig
from trt_eagle3.engine.requirement import Requirement
from trt_eagle3.engine.trt.dialects.registry import PACKAGES, find_dialect, package_of
from trt_eagle3.errors import EnvironmentMissingError

__all__ = ["plugin_library", "tensorrt_package", "trtexec"]


def tensorrt_package() -> Requirement:
    """TensorRT's Python package, which must load."""
    package = PACKAGES[package_of(None)]
    return Requirement(package.label, _look_for_tensorrt, package.install)


def trtexec() -> Requirement:
    """NVIDIA's command-line builder."""
    fix = "part of TensorRT's archive and container; only build_engine.sh needs it"
    return Requirement("trtexec", lambda _: shutil.which("trtexec"), fix)


def plugin_library() -> Requirement:
    """Our plugins; loaded where TensorRT is there to load them, else only found."""
    fix = "make plugins TENSORRT_INCLUDE=<TensorRT's include folder>"
    return Requirement("plugin library", _look_for_plugins, fix)


def _look_for_tensorrt(engine: EngineConfig | None) -> str:
    dialect = find_dialect(engine)
    return f"{dialect.version} ({Path(dialect.trt.__file__).parent})"


def _look_for_plugins(engine: EngineConfig | None) -> str:
    from trt_eagle3.engine.trt.plugins import load_plugins, plugin_library_path

    path = plugin_library_path(engine)
    if path is None or not path.is_file():
        raise EnvironmentMissingError("no plugin library")
    if tensorrt_package().find(engine) is None:
        return f"{path} (not loaded: no TensorRT)"
    return f"{load_plugins(engine)} (loads)"
