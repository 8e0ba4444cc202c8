"""Shape profiles of engines: one for decode steps and one for prompts; or one for images.

``docs/architecture.md`` explains the names of dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import onnx

from trt_eagle3.config import EngineConfig, LimitsConfig
from trt_eagle3.engine.builder.job import TreeSizes
from trt_eagle3.engine.runtime.buckets import PROMPT_LOGIT_ROWS
from trt_eagle3.engine.runtime.memory import num_entries, num_snapshots
from trt_eagle3.families.family import SizeRange

__all__ = ["Profile", "graph_profiles"]


@dataclass(frozen=True)
class Profile:
    """Input name -> smallest, preferred and largest shape."""

    name: str
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


def graph_profiles(
    graph: str,
    model: onnx.ModelProto,
    engine: EngineConfig,
    limits: LimitsConfig,
    tree: TreeSizes,
    images: Mapping[str, SizeRange] = MappingProxyType({}),
) -> list[Profile]:
    """Return the profiles of ``target``, ``draft``, ``fuse`` or ``vision``, decode steps first.

    Args:
        images: sizes of the vision graph (``families.family.FamilyVision.ranges``).
    """
    if graph == "vision":
        ranges = {"images": images}
    else:
        ranges = {
            "generation": _generation(engine, limits, tree),
            "context": _context(engine, limits),
        }
    return [_profile(name, model, sizes) for name, sizes in ranges.items()]


def _profile(name: str, model: onnx.ModelProto, sizes: Mapping[str, SizeRange]) -> Profile:
    shapes = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        by_bound = [
            tuple(sizes[d.dim_param][i] if d.dim_param else d.dim_value for d in dims)
            for i in range(3)
        ]
        shapes[value.name] = (by_bound[0], by_bound[1], by_bound[2])
    return Profile(name, shapes)


def _generation(
    engine: EngineConfig, limits: LimitsConfig, tree: TreeSizes
) -> dict[str, SizeRange]:
    """Sizes of decode steps: a tree or one token per sequence; a draft's tail: all rows so far."""
    nodes, batch = max(tree.num_nodes, tree.width), limits.max_batch_size
    return {
        **_cache(engine.page_size, limits),
        "batch": (1, 1, batch),
        "seq": (1, nodes, nodes),
        "tail": (1, nodes, 2 * max(nodes, tree.num_draft_rows)),
        "rows": (1, nodes, nodes),
        "tokens": (1, nodes, nodes * batch),
    }


def _context(engine: EngineConfig, limits: LimitsConfig) -> dict[str, SizeRange]:
    """Sizes of a prompt's chunk; fuse takes a whole prompt at once."""
    chunk, batch = engine.prefill_chunk, limits.max_batch_size
    rows = min(chunk, PROMPT_LOGIT_ROWS)
    return {
        **_cache(engine.page_size, limits),
        "batch": (1, 1, batch),
        "seq": (1, chunk, chunk),
        "tail": (1, chunk, 2 * chunk),
        "rows": (1, 1, rows),
        "tokens": (1, chunk, max(limits.max_seq_len, chunk) * batch),
    }


def _cache(page: int, limits: LimitsConfig) -> dict[str, SizeRange]:
    """Sizes of caches: pages of a sequence, slots of the whole cache with its page 0, and entries
    of recurrent states.
    """
    pages = -(-limits.max_seq_len // page)
    rows = limits.max_kv_tokens or pages * limits.max_batch_size * page
    slots = (-(-rows // page) + 1) * page
    entries = num_entries(limits.max_batch_size, num_snapshots(limits))
    return {
        "pages": (1, pages, pages),
        "slots": (page, slots, slots),
        "sequences": (2, entries, entries),
    }
