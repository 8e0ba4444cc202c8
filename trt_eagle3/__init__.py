"""trt-eagle3:

Qwen3-VL with EAGLE-3 drafts as speculative engines, compiled, proved and deployed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trt_eagle3.config import BuildConfig, load_config
    from trt_eagle3.decode.engine import Engine, load
    from trt_eagle3.decode.request import Chunk, Generation, Request
    from trt_eagle3.decode.sampling import Sampling
    from trt_eagle3.parity.run import validate
    from trt_eagle3.pipeline import build

__all__ = [
    "BuildConfig",
    "Chunk",
    "Engine",
    "Generation",
    "Request",
    "Sampling",
    "build",
    "load",
    "load_config",
    "validate",
]

# Imported when first asked for: building graphs should not wait for torch.
_HOMES = {
    "BuildConfig": "trt_eagle3.config",
    "Chunk": "trt_eagle3.decode.request",
    "Engine": "trt_eagle3.decode.engine",
    "Generation": "trt_eagle3.decode.request",
    "Request": "trt_eagle3.decode.request",
    "Sampling": "trt_eagle3.decode.sampling",
    "build": "trt_eagle3.pipeline",
    "load": "trt_eagle3.decode.engine",
    "load_config": "trt_eagle3.config",
    "validate": "trt_eagle3.parity.run",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trt_eagle3' has no attribute {name!r}")
