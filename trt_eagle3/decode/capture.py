"""What a server does before the first request, bounded in time and memory: prompts of every size
run once, and the CUDA graphs of decoding are captured and timed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from trt_eagle3.decode.async_cycle import AsyncCycles
from trt_eagle3.decode.decoder import Decoder
from trt_eagle3.decode.device_batch import batch_sizes
from trt_eagle3.decode.kv_cache import PagePool
from trt_eagle3.decode.launched import launch_prefill
from trt_eagle3.decode.plan import TreePlan
from trt_eagle3.decode.prompt import Prompt
from trt_eagle3.decode.sequence import SequenceState
from trt_eagle3.decode.tree import AnyTree
from trt_eagle3.engine.machine import seconds_of
from trt_eagle3.engine.torch.cuda_graph import CAPTURED_AT_RUN

__all__ = ["capture_graphs", "prime_sizes", "run_prompts"]

_log = logging.getLogger("trt_eagle3")
_TIMED = 4  # cycles of every shape
_LEAST_FREE_BYTES = 2 << 30  # that prompts and pictures may want besides
_FEWEST_ROWS = 32  # of a prompt that is run ahead


def run_prompts(decoder: Decoder, pool: PagePool, vocab_size: int) -> int:
    """Prefill prompts of a whole chunk, half of one, and so on, and forget them.

    The first prompt of a size loads kernels and takes memory, which the next one finds: without
    this the first request would wait for that.

    Returns:
        How many sizes have run; those for which there is no room are left to whoever asks for them.
    """
    room = min(decoder.max_seq_len, pool.num_free * pool.page_size)
    num_rows, done = min(decoder.prefill_chunk, room), 0
    while num_rows >= _FEWEST_ROWS:
        done += _run_prompt(decoder, pool, vocab_size, num_rows)
        num_rows //= 2
    return done


def _run_prompt(decoder: Decoder, pool: PagePool, vocab_size: int, num_rows: int) -> bool:
    """Prefill a text of ``num_rows`` tokens; whether memory held it."""
    ids = torch.arange(num_rows) % vocab_size
    positions = torch.arange(num_rows, dtype=torch.int32).expand(3, -1)
    prompt = Prompt(ids, positions, 0, torch.zeros(num_rows, dtype=torch.bool))
    sequence = SequenceState(prompt, pool, vocab_size, drafting=True)
    decoder.states.reserve(sequence, num_rows)
    try:
        launched = launch_prefill(decoder, [(sequence, num_rows)])
        launched.wait()
    finally:
        decoder.states.release(sequence)
    for _, error in launched.failed:
        _log.warning("%s", error)
    return not launched.failed


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
