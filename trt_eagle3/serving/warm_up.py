"""warm_up: the first answers of an engine, before strangers wait for them."""

from __future__ import annotations

import time

from PIL import Image

from trt_eagle3.decode.engine import Engine
from trt_eagle3.decode.request import Request

__all__ = ["warm_up"]

_SIDE = 64  # pixels


def warm_up(engine: Engine) -> float:
    """Answer about a text and about an image, so that every graph is open and has run; returns seconds.

    Raises:
        Exception: whatever keeps the engine from answering; it must not be called ready then.
    """
    start = time.perf_counter()
    image = Image.new("RGB", (_SIDE, _SIDE))
    for request in (Request("Hello", max_tokens=8), Request("Hello", images=(image,), max_tokens=8)):
        for _ in engine.submit(request):
            pass
    return time.perf_counter() - start
