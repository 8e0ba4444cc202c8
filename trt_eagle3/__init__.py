"""trt-eagle3: Qwen3-VL with EAGLE-3 drafts as speculative engines, compiled, proved and deployed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trt_eagle3.config import BuildConfig, load_config
    from trt_eagle3.decode.engine import Engine, Generation, load
    from trt_eagle3.pipeline import build

__all__ = ["BuildConfig", "Engine", "Generation", "build", "load", "load_config"]

# Imported when first asked for: building graphs should not wait for torch.
_HOMES = {
    "BuildConfig": "trt_eagle3.config",
    "Engine": "trt_eagle3.decode.engine",
    "Generation": "trt_eagle3.decode.engine",
    "build": "trt_eagle3.pipeline",
    "load": "trt_eagle3.decode.engine",
    "load_config": "trt_eagle3.config",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trt_eagle3' has no attribute {name!r}")
