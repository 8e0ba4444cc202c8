"""Ship our CUDA libraries with a GPU bundle's model: the Python package lacks them."""

from __future__ import annotations

import os
from pathlib import Path

from trt_eagle3.config import EngineConfig
from trt_eagle3.engine.runtime.backend import Library, backend_named

__all__ = ["find_libraries", "use_libraries"]


def find_libraries(engine: EngineConfig) -> tuple[Library, ...]:
    """Return the libraries that an engine needs, as found on this machine."""
    return backend_named(engine.backend).libraries(engine)


def use_libraries(folder: Path) -> None:
    """Use the libraries in ``folder``, unless the environment sets others.

    Each file is named after its environment variable.
    """
    for file in folder.glob("*.so"):
        os.environ.setdefault(file.stem, str(file))
