"""Our CUDA libraries travel with a GPU bundle's model: a Python package does not hold them."""

from __future__ import annotations

import os
from pathlib import Path

from trt_eagle3.config import EngineConfig
from trt_eagle3.engine.runtime.backend import Library, backend_named

__all__ = ["find_libraries", "use_libraries"]


def find_libraries(engine: EngineConfig) -> tuple[Library, ...]:
    """What an engine needs, as found on this machine."""
    return backend_named(engine.backend).libraries(engine)


def use_libraries(folder: Path) -> None:
    """Take the libraries in ``folder``, named as their variables are, unless the environment
    names others.
    """
    for file in folder.glob("*.so"):
        os.environ.setdefault(file.stem, str(file))
