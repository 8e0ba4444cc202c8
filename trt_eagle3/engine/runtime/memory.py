"""Estimate the device memory that a bundle needs, before anything is loaded.

Sizes depend on geometry and limits alone. `docs/measurements.md` compares them with a GPU's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.config import EngineConfig, LimitsConfig
from trt_eagle3.drafts.registry import kind_of
from trt_eagle3.dtype import dtype_named
from trt_eagle3.errors import DeviceMemoryError, UserError
from trt_eagle3.families.registry import tower_of
from trt_eagle3.spec import LayerSpec, TargetSpec

__all__ = [
    "MAX_DEFERRED",
    "MemoryNeed",
    "check_fits",
    "fill_memory",
    "free_bytes",
    "kv_bytes_per_token",
    "kv_room",
    "memory_need",
    "num_entries",
    "num_pages",
    "num_snapshots",
    "request_memory",
    "state_bytes",
]

MAX_DEFERRED = 512
"""Most rows of aux hidden states that a sequence keeps for its draft while it decodes without
speculation: 12 MB for an 8B target.
"""

_SEGMENT = 256  # rows of a prompt's shortest segment (decode/forward/chunks.py)
_MAX_WIDENED_BYTES = 512 << 20
_LIBRARIES_BYTES = 3 << 29
"""CUDA's context, libraries' workspaces and captured graphs: 1.5 GiB."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of device memory, by purpose.

    Attributes:
        weights: of target, vision tower and draft. kv_cache: all pages of target and draft.
        images: the largest permitted prompt's images in the vision tower. prefill: one chunk of a
            prompt, the logits of a cycle, and rows that are kept for the draft.
        kv_token: one token in the KV cache.
        states: recurrent layers' states of all sequences and snapshots.
    """

    weights: int
    kv_cache: int
    images: int
    prefill: int
    kv_token: int
    states: int = 0

    @property
    def total(self) -> int:
        """Sum of all purposes, in bytes."""
        return self.weights + self.kv_cache + self.images + self.prefill + self.states

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "KV cache": self.kv_cache,
            "images": self.images,
            "prefill": self.prefill,
            **({"states": self.states} if self.states else {}),
        }
        named = ", ".join(f"{name} {_size(value)}" for name, value in parts.items())
        return f"{_size(self.total)} ({named})"


def memory_need(
    spec: TargetSpec,
    manifest: DraftManifest | None,
    limits: LimitsConfig,
    engine: EngineConfig,
    num_nodes: int = 1,
    packed_savings: int = 0,
) -> MemoryNeed:
    """Return the bytes that the largest permitted load takes.

    Args:
        num_nodes: of a tree, the root included. packed_savings: ``BundleRecord.packed_savings``.
    """
    item = dtype_named(engine.dtype).num_bytes(1)
    kv_token = kv_bytes_per_token(spec, manifest, engine.dtype, engine.kv_dtype)
    return MemoryNeed(
        weights=max(1, item * (_target_values(spec) + _draft_values(manifest)) - packed_savings),
        kv_cache=kv_token * num_pages(limits, engine.page_size) * engine.page_size,
        images=item * _image_values(spec, limits.max_visual_tokens),
        prefill=item * engine.prefill_chunk * _row_values(spec)
        + 3 * 4 * limits.max_batch_size * num_nodes * spec.vocab_size
        + item * limits.max_batch_size * _deferred_values(spec, manifest)
        + (_widened_bytes(spec, limits, engine.prefill_chunk) if engine.kv_dtype == "fp8" else 0),
        kv_token=kv_token,
        states=num_entries(limits.max_batch_size, num_snapshots(limits))
        * state_bytes(spec, engine.dtype),
    )


def num_snapshots(limits: LimitsConfig) -> int:
    """Return how many snapshots of recurrent states are kept at most: two for each sequence."""
    return 2 * limits.max_batch_size if limits.prefix_cache else 0


def num_entries(max_sequences: int, snapshots: int) -> int:
    """Return the entries of each recurrent layer.

    There is one for the state before any token and one that padding writes. Each sequence has one
    that is read and one that is written. The rest hold snapshots.
    """
    return 2 + 2 * max_sequences + snapshots


def state_bytes(spec: TargetSpec, dtype: str) -> int:
    """Return the bytes of one entry (a sequence or a snapshot), over all recurrent layers."""
    item = dtype_named(dtype).num_bytes(1)
    layers = (m for _, m in spec.recurrent_layers)
    return sum(4 * m.state_values + item * m.window_values for m in layers)


def kv_bytes_per_token(
    spec: TargetSpec, manifest: DraftManifest | None, dtype: str, kv_dtype: str = "compute"
) -> int:
    """Return the bytes of one token in the KV cache, over all layers of target and draft.

    ``kv_dtype`` is that of the target's cache. A draft's cache always has ``dtype``.
    """
    item = dtype_named(dtype).num_bytes(1)
    target = 1 if kv_dtype == "fp8" else item
    return 2 * (target * _target_kv_width(spec) + item * _draft_kv_width(manifest))


def free_bytes() -> int | None:
    """Return the bytes of the current GPU that this process can still allocate; None if torch sees
    no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    cached: int = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return int(torch.cuda.mem_get_info()[0]) + cached


@contextmanager
def request_memory(what: str, fix: str) -> Iterator[None]:
    """Turn an out-of-memory error of the block into a failure of its requests, with a one-line
    message, so that the program goes on.

    Raises:
        DeviceMemoryError: ``what`` was too large; the message names it and the ``fix``.
    """
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise DeviceMemoryError(f"{what} need more memory than this GPU has free. {fix}") from error


def check_fits(need: MemoryNeed, free: int, limits: LimitsConfig) -> None:
    """Check that the ``free`` bytes of a GPU can hold the load that ``limits`` permit.

    Raises:
        UserError: they cannot. The message names the bytes needed, those free, and a limit that
            fits.
    """
    lacking = need.total + _LIBRARIES_BYTES - free
    if lacking <= 0:
        return
    raise UserError(
        f"limits: this bundle needs {need} and {_size(_LIBRARIES_BYTES)} for CUDA, and the GPU has "
        f"{_size(free)} free. {_fix(need, need.kv_cache - lacking, limits)}"
    )


def fill_memory(need: MemoryNeed, free: int, limits: LimitsConfig, page_size: int) -> LimitsConfig:
    """Return ``limits`` with a ``max_kv_tokens``, computed from ``memory_fraction`` if not set.

    The fraction applies to the ``free`` bytes less the weights and all other needs of a load.

    Raises:
        UserError: not even one sequence of ``max_seq_len`` fits.
    """
    if limits.max_kv_tokens is not None:
        check_fits(need, free, limits)
        return limits
    room = free - (need.total - need.kv_cache) - _LIBRARIES_BYTES
    pages = int(limits.memory_fraction * room) // (need.kv_token * page_size) - 1
    if pages >= num_pages(limits, page_size) - 1:
        return limits
    tokens = max(pages * page_size, limits.max_seq_len)
    check_fits(replace(need, kv_cache=need.kv_token * tokens), free, limits)
    return limits.model_copy(update={"max_kv_tokens": tokens})


def kv_room(need: MemoryNeed, limits: LimitsConfig, page_size: int) -> str:
    """Describe in one line how many sequences run at once, and how many tokens the cache holds."""
    tokens = (num_pages(limits, page_size) - 1) * page_size
    full = f"{tokens / limits.max_seq_len:.1f}"
    return (
        f"{limits.max_batch_size} sequences at once, KV cache of {tokens:,} tokens "
        f"({_size(tokens * need.kv_token)}): {full} sequences of {limits.max_seq_len:,}"
    )


def _fix(need: MemoryNeed, kv_room: int, limits: LimitsConfig) -> str:
    """Name the limit that would fit; ``kv_room``: bytes that are left for the KV cache."""
    tokens = kv_room // need.kv_token
    if tokens >= limits.max_seq_len:
        return f"Rebuild with limits.max_kv_tokens: {tokens}, or free its memory."
    if tokens >= 256:
        return (
            f"Rebuild with limits.max_seq_len: {tokens} and max_kv_tokens: {tokens}, or free its "
            "memory."
        )
    least = 256 * need.kv_token
    room = need.images + kv_room - least
    visual = limits.max_visual_tokens * room // need.images if need.images else 0
    if visual >= 64:
        return (
            f"Rebuild with limits.max_visual_tokens: {visual}, max_seq_len: 256 and "
            "max_kv_tokens: 256."
        )
    return "Use a GPU with more memory, or free this one's."


def _target_values(spec: TargetSpec) -> int:
    """Numbers in the target's weights. The token table and the head are both counted, even if they
    are the same tensor.
    """
    layers = sum(_layer_values(layer, spec.hidden_size) for layer in spec.layers)
    tower = tower_of(spec).sizes(spec.vision).num_values if spec.vision else 0
    return layers + 2 * spec.vocab_size * spec.hidden_size + tower


def _draft_values(manifest: DraftManifest | None) -> int:
    """Numbers in the draft's weights, with the target's head if the draft has none."""
    if manifest is None:
        return 0
    head = manifest.draft_vocab_size * manifest.hidden_size if manifest.head == "target" else 0
    return head + sum(prod(shape) for shape in kind_of(manifest).shapes(manifest).values())


def _layer_values(layer: LayerSpec, hidden: int) -> int:
    return layer.mixer.num_values(hidden) + layer.mlp.num_values(hidden)


def _target_kv_width(spec: TargetSpec) -> int:
    """Numbers in the keys of one token, over all layers of the target."""
    return sum(layer.mixer.kv_width for layer in spec.layers)


def _draft_kv_width(manifest: DraftManifest | None) -> int:
    return manifest.num_layers * manifest.num_kv_heads * manifest.head_dim if manifest else 0


def _widened_bytes(spec: TargetSpec, limits: LimitsConfig, prefill_chunk: int) -> int:
    """Bytes of a widened FP8 cache in a prompt's attention: keys and values of one layer, for the
    sequences that share a chunk (``plugins/kernels/prompt_fp8.cuh``).
    """
    width = max(layer.mixer.kv_width for layer in spec.layers)
    sequences = -(-prefill_chunk // _SEGMENT)
    return min(4 * width * limits.max_seq_len * sequences, _MAX_WIDENED_BYTES)


def num_pages(limits: LimitsConfig, page_size: int) -> int:
    """Return the pages of the KV cache: page 0, and those for all sequences, or for
    ``max_kv_tokens`` if that is less.
    """
    whole = -(-limits.max_seq_len // page_size) * limits.max_batch_size
    return 1 + (
        whole if limits.max_kv_tokens is None else min(-(-limits.max_kv_tokens // page_size), whole)
    )


def _deferred_values(spec: TargetSpec, manifest: DraftManifest | None) -> int:
    """Numbers that a sequence keeps for its draft at most."""
    return MAX_DEFERRED * len(manifest.aux_layers) * spec.hidden_size if manifest else 0


def _image_values(spec: TargetSpec, visual_tokens: int) -> int:
    """Numbers that the tower holds at its peak, and those of its output for a prompt."""
    vision = spec.vision
    if vision is None:
        return 0
    fullest = vision.spatial_merge_size**2 * tower_of(spec).sizes(vision).values_per_patch
    given = 2 * (1 + len(vision.level_blocks)) * vision.out_hidden_size
    return visual_tokens * (fullest + given)


def _row_values(spec: TargetSpec) -> int:
    """Numbers of one prompt row in the widest decoder layer, with its visual levels and aux hidden
    states.
    """
    inner = max(3 * layer.mlp.row_width + layer.mixer.row_width for layer in spec.layers)
    return (spec.num_visual_levels + 9) * spec.hidden_size + inner


def _size(num_bytes: int) -> str:
    """Write bytes in GB, or in MB below 0.1 GB."""
    return f"{num_bytes / 1e6:.0f} MB" if num_bytes < 1e8 else f"{num_bytes / 1e9:.1f} GB"
