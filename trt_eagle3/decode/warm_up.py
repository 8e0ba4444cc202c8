"""Warm-up before the first request, bounded in time and memory.

Prompts of every width and images of every padded size run. The CUDA graphs of decoding are captured
and timed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt

import torch

from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.policy.protocol import Policy
from trt_eagle3.decode.request.prompt import Prompt
from trt_eagle3.decode.request.vision_encoder import PatchBuckets
from trt_eagle3.decode.speculation.backfill import DraftBackfill
from trt_eagle3.decode.speculation.tree import AnyTree
from trt_eagle3.decode.step.decoder import Decoder
from trt_eagle3.decode.step.stepper import Stepper
from trt_eagle3.engine.runtime.buckets import (
    CAPTURED_AT_RUN,
    PROMPT_WIDTHS,
    batch_sizes,
    warm_widths,
)
from trt_eagle3.engine.runtime.machine import seconds_of
from trt_eagle3.engine.runtime.memory import request_memory
from trt_eagle3.errors import DeviceMemoryError
from trt_eagle3.families.registry import tower_of

__all__ = [
    "PromptRuns",
    "capture_steps",
    "has_room_for_graphs",
    "image_grid",
    "measure_costs",
    "open_tower",
    "prime_sizes",
    "run_backfills",
    "run_images",
    "run_prompts",
]

_log = logging.getLogger("trt_eagle3")
_TIMED = 4  # timed steps of every shape
_LEAST_FREE_BYTES = 2 << 30  # kept free for prompts and images
_BACKFILLED = (1, 2, 4)  # batch sizes of backfills in the warm-up


@dataclass(frozen=True)
class PromptRuns:
    """Result of the prompt warm-up.

    Attributes:
        count: number of widths that ran.
        num_rows, seconds: of the last run of the widest prompt; 0 if none ran.
    """

    count: int
    num_rows: int = 0
    seconds: float = 0.0


def run_prompts(decoder: Decoder, pool: PagePool, vocab_size: int) -> PromptRuns:
    """Prefill prompts of all widths that a chunk may have, and release them.

    Widths of ``PROMPT_WIDTHS`` run often enough to capture their graphs. The first prompt of a
    width loads kernels and allocates memory, so that requests do not wait for it. Graphs that
    serve prompts of any width are captured first.

    Widths that do not fit into memory are skipped.
    """
    if pool.table_len is not None:
        decoder.capture_prompts(pool.table_len, has_room_for_graphs)
    room = min(decoder.max_seq_len, pool.num_free * pool.page_size, decoder.prefill_chunk)
    ready = [
        width
        for width in warm_widths(room)
        if _run_prompt(decoder, pool, vocab_size, width, _times_to_run(width))
    ]
    if not ready:
        return PromptRuns(0)
    seconds = seconds_of(lambda: _run_prompt(decoder, pool, vocab_size, max(ready), 1))
    return PromptRuns(len(ready), max(ready), seconds)


def _times_to_run(width: int) -> int:
    return CAPTURED_AT_RUN if width in PROMPT_WIDTHS else 1


def _run_prompt(
    decoder: Decoder, pool: PagePool, vocab_size: int, num_rows: int, times: int
) -> bool:
    """Prefill a text of ``num_rows`` tokens ``times`` times; returns False if out of memory."""
    for _ in range(times):
        sequence = _text(pool, vocab_size, num_rows)
        decoder.states.reserve(sequence, num_rows)
        try:
            launched = decoder.prefiller.launch([(sequence, num_rows)])
            launched.wait()
        finally:
            decoder.states.release(sequence)
        for _, error in launched.failed:
            _log.warning("%s", error)
        if launched.failed:
            return False
    return True


def _text(pool: PagePool, vocab_size: int, num_rows: int) -> SequenceState:
    """Make a sequence with a text prompt of ``num_rows`` tokens."""
    ids = torch.arange(num_rows) % vocab_size
    positions = torch.arange(num_rows, dtype=torch.int32).expand(3, -1)
    prompt = Prompt(ids, positions, 0, torch.zeros(num_rows, dtype=torch.bool))
    return SequenceState(prompt, pool, vocab_size, drafting=True)


def run_backfills(decoder: Decoder, pool: PagePool, vocab_size: int) -> int:
    """Run backfills of small batches with dummy rows, often enough to capture their graphs.

    The first run of a shape may take as long as several steps.

    Returns:
        Number of shapes that ran. Shapes that do not fit into memory are skipped.
    """
    if decoder.drafter is None:
        return 0
    backfill, ready = decoder.drafter.backfill, 0
    most = min(backfill.max_deferred, decoder.max_seq_len - 1)
    for count, width in backfill.shapes(_BACKFILLED, most):
        num_rows = min(width, most)
        if num_rows > 1 and backfill.width(num_rows - 1) == width:
            num_rows -= 1  # includes a row of padding, as nearly all backfills do
        if count * -(-(num_rows + 1) // pool.page_size) > pool.num_free:
            continue
        run = partial(_run_backfill, backfill, pool, vocab_size, count, num_rows)
        try:
            for _ in range(CAPTURED_AT_RUN):
                run()
            ready += 1
        except DeviceMemoryError as error:
            _log.warning("%s", error)
    return ready


def _run_backfill(
    backfill: DraftBackfill, pool: PagePool, vocab_size: int, count: int, num_rows: int
) -> None:
    """Backfill ``num_rows`` rows of each of ``count`` sequences.

    Raises:
        DeviceMemoryError: the device is out of memory.
    """
    sequences = [_text(pool, vocab_size, num_rows) for _ in range(count)]
    try:
        for s in sequences:
            s.pages.reserve(num_rows + 1)
            s.tokens, s.num_computed_tokens = [0], num_rows
        backfill.defer_zeros(sequences, num_rows)
        with request_memory(
            f"a draft's backfill: {count * backfill.width(num_rows)} rows at once",
            "Rebuild with a smaller engine.prefill_chunk.",
        ):
            backfill.run(sequences)
    finally:
        for s in sequences:
            s.reset()


def has_room_for_graphs() -> bool:
    """Return whether enough GPU memory is free for prompts and images besides graphs."""
    return not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] >= _LEAST_FREE_BYTES


def capture_steps(decoder: Decoder, policy: Policy, table_len: int, seconds: float) -> int:
    """Capture steps of every padded batch size, and prime the policy with their seconds.

    Each size runs without a tree and with the policy's trees. The largest size comes first, because
    smaller ones reuse its memory. Sizes beyond ``seconds`` or the GPU's memory are captured in use,
    at their third run.

    Returns:
        Number of sizes that are ready.
    """
    start, done = time.perf_counter(), 0
    for size in reversed(batch_sizes(decoder.max_batch_size)):
        if not has_room_for_graphs():
            _log.warning("little GPU memory is free: graphs of small batches are captured later")
            break
        if time.perf_counter() - start > seconds:
            break
        prime_sizes(decoder.stepper, policy, table_len, [size])
        done += 1
    return done


def measure_costs(decoder: Decoder, policy: Policy, table_len: int, seconds: float) -> None:
    """Time steps of growing batches for ``seconds`` and prime ``policy`` with them."""
    start = time.perf_counter()
    for size in batch_sizes(decoder.max_batch_size):
        prime_sizes(decoder.stepper, policy, table_len, [size])
        if time.perf_counter() - start > seconds or not has_room_for_graphs():
            return


def prime_sizes(stepper: Stepper, policy: Policy, table_len: int, sizes: Sequence[int]) -> None:
    """Capture steps of batch ``sizes`` with every tree of ``policy``, and prime it with seconds."""
    for size in sizes:
        for tree in dict.fromkeys((*policy.trees_at(size), None)):
            policy.prime(tree, size, _step_seconds(stepper, size, tree, table_len))


def _step_seconds(stepper: Stepper, size: int, tree: AnyTree | None, table_len: int) -> float:
    """Return the seconds of a step of padding rows, after its graphs are captured."""
    stepper.run_dummy(size, tree, table_len, CAPTURED_AT_RUN)
    return seconds_of(lambda: stepper.run_dummy(size, tree, table_len, _TIMED)) / _TIMED


def run_images(bundle: LoadedBundle) -> int:
    """Run the vision tower over an image of every padded size, often enough to capture its graph.

    Otherwise all requests would wait while the third image of a size is captured. Shapes that
    depend on more than the size (windows) are captured in use.

    Returns:
        Number of sizes that ran; 0 if the target is text-only.
    """
    buckets = bundle.patch_buckets
    if buckets is None:
        return 0
    return sum(has_room_for_graphs() and _run_image(bundle, buckets, n) for n in buckets.sizes)


def open_tower(bundle: LoadedBundle) -> None:
    """Open the vision tower. Where padding costs little, run the smallest image too.

    That loads kernels and creates handles of libraries, which takes longer than an image.
    """
    bundle.vision  # noqa: B018  # opens it
    if bundle.patch_buckets is not None and bundle.decoder.captures_steps:
        _run_image(bundle, bundle.patch_buckets, bundle.patch_buckets.sizes[-1], times=1)


def _run_image(
    bundle: LoadedBundle, buckets: PatchBuckets, size: int, times: int = CAPTURED_AT_RUN
) -> bool:
    """Run an image that is padded to ``size`` patches; returns False if out of memory."""
    vision = bundle.spec.require_vision()
    grid = image_grid(buckets, size, vision.spatial_merge_size)
    patches = torch.zeros(
        grid[0] * grid[1] * grid[2], vision.patch_dim, dtype=bundle.dtype, device=bundle.device
    )
    rows = tower_of(bundle.spec).inputs(vision, torch.tensor([grid]))
    try:
        with request_memory(f"an image of {size} patches", "Lower limits.max_visual_tokens."):
            for _ in range(times):
                bundle.vision.forward(patches, rows)
    except DeviceMemoryError as error:
        _log.warning("%s", error)
        return False
    return True


def image_grid(buckets: PatchBuckets, size: int, merge: int) -> tuple[int, int, int]:
    """Return frames, patch rows and patch columns of an image that is padded to ``size`` patches.

    ``size``: one of ``buckets.sizes``. A visual token has ``merge`` x ``merge`` patches. If a unit
    is larger, the image is a stack of square tiles of one unit. Otherwise it is as square as
    possible.
    """
    if buckets.unit > merge**2:
        side = isqrt(buckets.unit)
        return size // buckets.unit, side, side
    tokens = size // merge**2
    heights = range(isqrt(tokens), 0, -1)  # height 1 always fits
    rows = next(n for n in heights if buckets.size_of(n * (tokens // n) * merge**2) == size)
    return 1, rows * merge, tokens // rows * merge
