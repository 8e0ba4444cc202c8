"""Locations of our CUDA kernels' libraries and sources."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

__all__ = ["INSTALL_KERNELS", "cache_root", "find_library", "installed_folder", "kernel_sources"]

INSTALL_KERNELS = "trt-eagle3 install-kernels"
_PACKAGE = Path(__file__).resolve().parents[2]
_NOT_SOURCES = {"build", "bench", "__pycache__"}


def find_library(name: str) -> Path | None:
    """Find the library ``name``: next to this package (a wheel with kernels), in plugins/build of a
    checkout, or in the folder of ``install-kernels``.
    """
    places = [_PACKAGE, _PACKAGE.parent / "plugins" / "build"]
    if kernel_sources() is not None:
        places.append(installed_folder())
    return next((place / name for place in places if (place / name).exists()), None)


def kernel_sources() -> Path | None:
    """Return the folder of CMakeLists.txt: in this package (a wheel), or a checkout's plugins/."""
    places = (_PACKAGE / "plugins", _PACKAGE.parent / "plugins")
    return next((place for place in places if (place / "CMakeLists.txt").is_file()), None)


def cache_root() -> Path:
    """Return our cache folder: ``TRT_EAGLE3_CACHE``, or trt-eagle3 in ``XDG_CACHE_HOME`` or
    ~/.cache.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TRT_EAGLE3_CACHE") or Path(home) / "trt-eagle3").expanduser()


@cache
def installed_folder() -> Path:
    """Return the folder in ``cache_root`` of libraries built from these sources; other sources
    have another folder.
    """
    sources = kernel_sources()
    return cache_root() / f"kernels-{_digest(sources) if sources else 'none'}"


def _digest(folder: Path) -> str:
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        if file.is_file() and inside.parts[0] not in _NOT_SOURCES:
            found.update(str(inside).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:16]
