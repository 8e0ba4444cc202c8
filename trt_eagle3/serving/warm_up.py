"""What a serving process does before it answers strangers."""

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
# Beside the decoding thread there are some that tokenise, decode images and send. At Python's own 5
# ms they hold it up
# for as long as a step of a small model takes: a tenth of the tiny pair's throughput with 8
# clients.
_SWITCH_S = 0.001
_SHORT = SamplingParams(max_tokens=8)


def warm_up(engine: LLM) -> float:
    """Answer about a text, and about an image where the target sees, so that every graph is open
    and has run, and capture the CUDA graphs of decoding; returns seconds. The processes
    that encode texts are started first, the one that tries grammars meanwhile.

    The process is a server's from here on: its threads take turns more often, torch computes within
    each of them where the engine is on a GPU, and what is counted is its clients'.

    Raises:
        Exception: whatever keeps the engine from answering; it must not be called ready then.
    """
    sys.setswitchinterval(_SWITCH_S)
    if engine.bundle.device == "cuda":
        torch.set_num_threads(1)  # waking others takes longer than what is left to the host
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
    """A tokenizer that no grammar can be compiled over fails the requests that have one."""
    try:
        engine.bundle.grammars.warm_up()
    except TrtEagle3Error as error:
        _log.warning("requests with a grammar will be refused: %s", error)
