"""Find the installed TensorRT and its dialect. Only this module imports the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trt_eagle3.errors import EnvironmentMissingError
from trt_eagle3.tensorrt_config import RUNTIMES, TensorRTConfig

if TYPE_CHECKING:
    from trt_eagle3.engine.trt.dialects.dialect import Dialect

__all__ = [
    "PACKAGES",
    "TensorRTPackage",
    "dialect_of",
    "find_dialect",
    "load_dialect",
    "package_of",
]


@dataclass(frozen=True)
class TensorRTPackage:
    """A Python package that provides a TensorRT.

    Attributes:
        label: its name for users. oldest: the oldest supported version. install: how to install it.
        dialects: first major version -> the class for it and later ones.
        too_new: the first unsupported version, if the package does not keep plugins compatible.
        build_plugins: the command that builds our plugins for it.
        has_trtexec: whether NVIDIA's trtexec can build for it elsewhere.
        companion: a library that ``make plugins`` puts next to the plugins. It must be loaded
            before the package's parser meets a plugin node.
    """

    label: str
    oldest: tuple[int, int]
    install: str
    dialects: Mapping[int, str]
    too_new: tuple[int, int] | None = None
    build_plugins: str = "make plugins TENSORRT_INCLUDE=/path/to/TensorRT/include"
    has_trtexec: bool = True
    companion: str | None = None


_HERE = "trt_eagle3.engine.trt.dialects"
PACKAGES: Mapping[str, TensorRTPackage] = {
    "tensorrt": TensorRTPackage(
        label=RUNTIMES["tensorrt"].label,
        oldest=(8, 6),
        install="pip install tensorrt (8.6, 10.x or 11.x), or NVIDIA's TensorRT container",
        dialects={
            8: f"{_HERE}.v8_6:TensorRT86",
            10: f"{_HERE}.v10:TensorRT10",
            11: f"{_HERE}.v11:TensorRT11",
        },
    ),
    "tensorrt_rtx": TensorRTPackage(
        label=RUNTIMES["rtx"].label,
        oldest=(1, 7),
        install="pip install 'trt-eagle3[rtx]'",
        dialects={1: f"{_HERE}.rtx:TensorRTForRTX"},
        too_new=(1, 8),
        build_plugins="make plugins TENSORRT_INCLUDE=plugins/tensorrt/interface",
        has_trtexec=False,
        companion="rtx/libtensorrt_rtx.so",
    ),
}
"""Packages by their import name."""
_PACKAGE_OF_RUNTIME = {"tensorrt": "tensorrt", "rtx": "tensorrt_rtx"}


def package_of(config: TensorRTConfig | None) -> str:
    """Return the key of ``PACKAGES`` that ``config`` selects: ``engine.tensorrt.runtime``."""
    return _PACKAGE_OF_RUNTIME[config.runtime] if config else "tensorrt"


def find_dialect(config: TensorRTConfig | None = None) -> Dialect:
    """Return the dialect of the TensorRT that ``config`` selects; one object per process.

    Raises:
        EnvironmentMissingError: it is not installed, does not load, or is too old or too new.
    """
    return load_dialect(package_of(config))


@cache
def load_dialect(name: str) -> Dialect:
    """Return the dialect of the installed package ``name``."""
    package = PACKAGES[name]
    try:
        module = import_module(name)
    except Exception as error:  # a missing shared library is an ImportError or an OSError
        reason = " ".join(str(error).split())
        raise EnvironmentMissingError(
            f"{package.label}: {reason}. Install it: {package.install}."
        ) from error
    return dialect_of(name, module)


def dialect_of(name: str, module: Any) -> Dialect:
    """Return the dialect of ``module``, which is the package ``name``."""
    package, version = PACKAGES[name], module.__version__
    numbers = tuple(map(int, version.split(".")[:2]))
    if numbers < package.oldest:
        raise EnvironmentMissingError(
            f"{package.label} {version}: too old. Upgrade it: {package.install}."
        )
    if package.too_new and numbers >= package.too_new:
        raise EnvironmentMissingError(
            f"{package.label} {version}: too new for our plugins. Install: {package.install}."
        )
    first = max(major for major in package.dialects if major <= numbers[0])
    path, _, attribute = package.dialects[first].partition(":")
    dialect: Dialect = getattr(import_module(path), attribute)(name, module)
    return dialect
