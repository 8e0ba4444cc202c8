"""Requirements of the TensorRT backend."""

from __future__ import annotations

import shutil
from pathlib import Path

from trt_eagle3.config import EngineConfig
from trt_eagle3.engine.runtime.requirement import Requirement
from trt_eagle3.engine.trt.dialects import registry
from trt_eagle3.engine.trt.dialects.registry import PACKAGES, package_of
from trt_eagle3.errors import EnvironmentMissingError

__all__ = ["plugin_library", "tensorrt_package", "trtexec"]


def tensorrt_package(name: str) -> Requirement:
    """Require a TensorRT's Python package; it must load."""

    def look(_: EngineConfig | None) -> str:
        dialect = registry.load_dialect(name)
        file = getattr(dialect.trt, "__file__", None)  # a namespace package has none
        return f"{dialect.version} ({Path(file).parent})" if file else str(dialect.version)

    return Requirement(PACKAGES[name].label, look, PACKAGES[name].install)


def trtexec() -> Requirement:
    """Require trtexec, NVIDIA's command-line builder."""
    fix = "part of TensorRT's archive and container; only build_engine.sh needs it"
    return Requirement("trtexec", lambda _: shutil.which("trtexec"), fix)


def plugin_library() -> Requirement:
    """Require our plugin library. It is loaded if a TensorRT is installed, else only located."""
    fix = "; ".join(f"for {found.label}: {found.build_plugins}" for found in PACKAGES.values())
    return Requirement("plugin library", _look_for_plugins, fix)


def _look_for_plugins(engine: EngineConfig | None) -> str:
    from trt_eagle3.engine.trt.plugins import load_plugins, plugin_library_path

    config = engine.tensorrt if engine else None
    path = plugin_library_path(config)
    if path is None or not path.is_file():
        raise EnvironmentMissingError("no plugin library")
    wanted = [package_of(config)] if config else PACKAGES
    package = next((name for name in wanted if tensorrt_package(name).find()), None)
    if package is None:
        return f"{path} (not loaded: no TensorRT)"
    return f"{load_plugins(config, package)} (loads into {PACKAGES[package].label})"
