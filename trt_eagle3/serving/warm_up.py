"""Warm up a serving process before it answers clients."""

from __future__ import annotations

import logging
import sys
import threading
import time

import torch
from PIL import Image

from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.request.request import Request
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.errors import TrtEagle3Error
from trt_eagle3.serving.config import WARM_UP_SIDE

__all__ = ["warm_up"]

_log = logging.getLogger("trt_eagle3")
# Other threads tokenise, decode images and send beside the engine thread. Python's default switch
# interval of 5 ms would block it for as long as a step of a small model: a tenth of the tiny pair's
# throughput with 8 clients.
_SWITCH_S = 0.001
_SHORT = SamplingParams(max_tokens=8)


def warm_up(engine: LLM) -> float:
    """Run every graph once, capture the CUDA graphs of decoding, and return the seconds taken.

    It answers a text, and an image if the target has vision. The processes that encode texts start
    first, and the one that compiles grammars starts in the background.

    It also configures the process as a server: threads switch more often, torch uses one thread if
    the engine is on a GPU, and the metrics restart at zero.

    Raises:
        Exception: any error of the engine; it must not be called ready then.
    """
    sys.setswitchinterval(_SWITCH_S)
    if engine.bundle.device == "cuda":
        torch.set_num_threads(1)  # waking other threads takes longer than the host's remaining work
    start = time.perf_counter()
    engine.bundle.processor.warm_up()
    grammars = threading.Thread(target=_warm_up_grammars, args=(engine,), daemon=True)
    grammars.start()
    requests = [Request("Hello", sampling=_SHORT)]
    if engine.bundle.spec.vision is not None:
        image = Image.new("RGB", (WARM_UP_SIDE, WARM_UP_SIDE))
        requests.append(Request("Hello", images=(image,), sampling=_SHORT))
    for request in requests:
        for _ in engine.submit(request):
            pass
    engine.capture_graphs()
    grammars.join()
    engine.restart_metrics()
    return time.perf_counter() - start


def _warm_up_grammars(engine: LLM) -> None:
    """Warm up grammars; a tokenizer without grammar support fails only requests with a grammar."""
    try:
        engine.bundle.grammars.warm_up()
    except TrtEagle3Error as error:
        _log.warning("requests with a grammar will be refused: %s", error)
