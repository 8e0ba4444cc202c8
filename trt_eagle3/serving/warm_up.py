"""What a serving process does before it answers strangers."""

from __future__ import annotations

import sys
import time

from PIL import Image

from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.request import Request
from trt_eagle3.decode.sampling_params import SamplingParams
from trt_eagle3.serving.config import WARM_UP_SIDE

__all__ = ["warm_up"]

# Beside the decoding thread there are some that tokenise, decode images and send. At Python's own 5
# ms they hold it up
# for as long as a step of a small model takes: a tenth of the tiny pair's throughput with 8
# clients.
_SWITCH_S = 0.001
_SHORT = SamplingParams(max_tokens=8)


def warm_up(engine: LLM) -> float:
    """Answer about a text, and about an image where the target sees, so that every graph is open
    and has run, and capture the CUDA graphs of decoding; returns seconds.

    The process is a server's from here on: its threads take turns more often, and what it counts is
    its clients'.

    Raises:
        Exception: whatever keeps the engine from answering; it must not be called ready then.
    """
    sys.setswitchinterval(_SWITCH_S)
    start = time.perf_counter()
    requests = [Request("Hello", sampling=_SHORT)]
    if engine.bundle.spec.vision is not None:
        image = Image.new("RGB", (WARM_UP_SIDE, WARM_UP_SIDE))
        requests.append(Request("Hello", images=(image,), sampling=_SHORT))
    for request in requests:
        for _ in engine.submit(request):
            pass
    engine.capture_graphs()
    engine.restart_metrics()
    return time.perf_counter() - start
