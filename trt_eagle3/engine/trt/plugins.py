"""Find the plugin library, and load it into this process's TensorRT."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from trt_eagle3.engine.kernels.libraries import find_library
from trt_eagle3.engine.trt.dialects import registry
from trt_eagle3.engine.trt.dialects.dialect import Dialect
from trt_eagle3.engine.trt.dialects.registry import PACKAGES, package_of
from trt_eagle3.errors import EnvironmentMissingError
from trt_eagle3.graph.ops import PLUGINS
from trt_eagle3.graph.plugin_ops import PLUGIN_VERSION
from trt_eagle3.tensorrt_config import TensorRTConfig

__all__ = [
    "COMPANION_VARIABLE",
    "PLUGINS_VARIABLE",
    "companion_path",
    "load_plugins",
    "plugin_library_path",
]

PLUGINS_VARIABLE = "TRT_EAGLE3_PLUGINS"
COMPANION_VARIABLE = "TRT_EAGLE3_PARSER_NAME"
_LIBRARY_NAME = "libtrt_eagle3_plugins.so"


def plugin_library_path(config: TensorRTConfig | None = None) -> Path | None:
    """Return the path in the config, else in TRT_EAGLE3_PLUGINS, else of ``find_library``."""
    if config and config.plugin_library:
        return config.plugin_library
    if named := os.environ.get(PLUGINS_VARIABLE):
        return Path(named)
    return find_library(_LIBRARY_NAME)


def companion_path(package: str, plugin_library: Path) -> Path | None:
    """Return the path of the companion of ``plugin_library`` for ``package``:
    TRT_EAGLE3_PARSER_NAME, else next to the library. None if the package needs no companion.
    """
    companion = PACKAGES[package].companion
    if companion is None:
        return None
    return Path(os.environ.get(COMPANION_VARIABLE, plugin_library.resolve().parent / companion))


def load_plugins(config: TensorRTConfig | None = None, package: str | None = None) -> Path:
    """Load the plugin library and check that TensorRT has our ops; return the library's path.

    Args:
        package: a key of ``PACKAGES``; by default, the one that ``config`` selects.
    Raises:
        EnvironmentMissingError: there is no library, or it was built for another TensorRT.
    """
    path = plugin_library_path(config)
    package = package or package_of(config)
    fix = f"Build it: {PACKAGES[package].build_plugins}, or name it in {PLUGINS_VARIABLE}."
    if path is None:
        raise EnvironmentMissingError(f"{_LIBRARY_NAME}: not found. {fix}")
    return _load(registry.load_dialect(package), path, fix)


@cache
def _load(dialect: Dialect, path: Path, fix: str) -> Path:
    dialect.trt.get_plugin_registry()
    _ = dialect.log.logger  # must exist before the library requests TensorRT's logger
    if companion := companion_path(dialect.package, path):
        dialect.prepare_parser(companion)
    try:
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)  # its creators register themselves
    except OSError as error:
        raise EnvironmentMissingError(
            f"{path}: cannot load the plugin library: {error}. {fix}"
        ) from error
    missing = [
        op.plugin
        for op in PLUGINS.values()
        if dialect.find_creator(op.plugin, PLUGIN_VERSION) is None
    ]
    if missing:
        raise EnvironmentMissingError(
            f"{path}: holds no plugin {missing[0]} version {PLUGIN_VERSION} for "
            f"{PACKAGES[dialect.package].label} {dialect.version}. {fix}"
        )
    return path
