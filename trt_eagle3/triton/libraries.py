"""Our CUDA libraries travel with a GPU bundle's model: a Python package does not hold them."""

from __future__ import annotations

import os
from pathlib import Path

from trt_eagle3.config import EngineConfig
from trt_eagle3.engine.torch.capi import LIBRARY_VARIABLE, library_path
from trt_eagle3.engine.trt.plugins import PLUGINS_VARIABLE, plugin_library_path

__all__ = ["HOW_TO_BUILD", "find_libraries", "use_libraries"]

HOW_TO_BUILD = {
    LIBRARY_VARIABLE: "make plugins",
    PLUGINS_VARIABLE: "make plugins TENSORRT_INCLUDE=/path/to/TensorRT/include",
}
"""In a checkout."""


def find_libraries(engine: EngineConfig) -> dict[str, Path | None]:
    """What an engine needs on this machine, by the variable that names it; None where it is not
    built.
    """
    if engine.device != "cuda":
        return {}
    found = {LIBRARY_VARIABLE: library_path()}
    return found | (
        {PLUGINS_VARIABLE: plugin_library_path(engine)} if engine.backend == "tensorrt" else {}
    )


def use_libraries(folder: Path) -> None:
    """Take the libraries in ``folder``, named as their variables are, unless the environment
    names others.
    """
    for file in folder.glob("*.so"):
        os.environ.setdefault(file.stem, str(file))
