"""Capturing the CUDA graphs of decoding before the first request, bounded in time and memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from trt_eagle3.decode.async_cycle import AsyncCycles
from trt_eagle3.decode.device_batch import batch_sizes
from trt_eagle3.decode.tree import AnyTree

__all__ = ["capture_graphs"]

_log = logging.getLogger("trt_eagle3")
_LEAST_FREE_BYTES = 2 << 30  # that prompts and pictures may want besides


def capture_graphs(
    cycles: AsyncCycles,
    trees_at: Callable[[int], Sequence[AnyTree | None]],
    table_len: int,
    seconds: float,
) -> int:
    """Run batches of every padded size, plainly and with what ``trees_at`` has for it.

    The largest come first: the others fit into their memory. What does not fit into ``seconds`` or
    the GPU's memory is captured when it comes for the third time.

    Returns:
        How many sizes are ready.
    """
    start, done = time.perf_counter(), 0
    for size in reversed(batch_sizes(cycles.max_batch_size)):
        if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < _LEAST_FREE_BYTES:
            _log.warning("little GPU memory is free: graphs of small batches are captured later")
            break
        if time.perf_counter() - start > seconds:
            break
        for tree in dict.fromkeys((*trees_at(size), None)):
            cycles.run_nobody(size, tree, table_len)
        done += 1
    return done
