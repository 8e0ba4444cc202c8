"""Capturing the CUDA graphs of decoding before the first request, and timing them, bounded in time
and memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from trt_eagle3.decode.async_cycle import AsyncCycles
from trt_eagle3.decode.device_batch import batch_sizes
from trt_eagle3.decode.plan import TreePlan
from trt_eagle3.decode.tree import AnyTree
from trt_eagle3.engine.machine import seconds_of
from trt_eagle3.engine.torch.cuda_graph import CAPTURED_AT_RUN

__all__ = ["capture_graphs", "prime_sizes"]

_log = logging.getLogger("trt_eagle3")
_TIMED = 4  # cycles of every shape
_LEAST_FREE_BYTES = 2 << 30  # that prompts and pictures may want besides


def capture_graphs(cycles: AsyncCycles, plan: TreePlan, table_len: int, seconds: float) -> int:
    """Run batches of every padded size, plainly and with the trees that ``plan`` has for it, and
    tell the plan what a cycle of each takes.

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
        prime_sizes(cycles, plan, table_len, [size])
        done += 1
    return done


def prime_sizes(cycles: AsyncCycles, plan: TreePlan, table_len: int, sizes: Sequence[int]) -> None:
    """Run batches of ``sizes`` with every tree that ``plan`` may choose, and tell it what a cycle
    takes; their graphs are captured.
    """
    for size in sizes:
        for tree in dict.fromkeys((*plan.trees_at(size), None)):
            plan.prime(tree, size, _cycle_seconds(cycles, size, tree, table_len))


def _cycle_seconds(cycles: AsyncCycles, size: int, tree: AnyTree | None, table_len: int) -> float:
    """Seconds of a cycle of padding alone, once its graphs are captured."""
    cycles.run_nobody(size, tree, table_len, CAPTURED_AT_RUN)
    return seconds_of(lambda: cycles.run_nobody(size, tree, table_len, _TIMED)) / _TIMED
