"""Make the drafter of a draft over its open graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

from torch import Tensor

from trt_eagle3.checkpoint.manifest import DraftManifest, autoregressive
from trt_eagle3.decode.forward.block_runner import BlockRunner
from trt_eagle3.decode.forward.runner import DraftRunner
from trt_eagle3.decode.memory.state import LayerStates
from trt_eagle3.decode.speculation.backfill import BackfillShapes
from trt_eagle3.decode.speculation.block import BlockDrafter
from trt_eagle3.decode.speculation.block_heads import BlockHeads
from trt_eagle3.decode.speculation.drafter import Drafter
from trt_eagle3.decode.speculation.eagle import EagleDrafter
from trt_eagle3.decode.speculation.grow import MaskRows
from trt_eagle3.drafts.block.manifest import BlockManifest
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.engine.runtime.session import Session

__all__ = ["open_drafter"]


def open_drafter(
    manifest: DraftManifest,
    graphs: Sequence[Session],
    states: LayerStates,
    embedding: EmbeddingTable,
    tables: Mapping[str, Tensor],
    d2t: Tensor | None,
    **shapes: Unpack[BackfillShapes],
) -> Drafter:
    """Make the drafter of ``manifest``.

    ``graphs``: of ``DraftKind.graph_names``. ``states``: of the second graph's layers.
    ``embedding``: the draft's. ``tables``: ``DraftKind.tables``, on the device in the compute type.
    ``d2t``: int64 [Vd] on the device, or None. ``shapes``: as for ``DraftBackfill``.
    """
    first, second = graphs
    if isinstance(manifest, BlockManifest):
        mask = tables.get("mask_embedding")
        block = BlockRunner(first, second, states, embedding, manifest, d2t, mask)
        heads = BlockHeads(manifest, tables, block.target_ids)
        return BlockDrafter(block, heads, manifest, **shapes)
    runner, manifest = DraftRunner(first, second, states, embedding, d2t), autoregressive(manifest)
    rows = manifest.mask_rows
    mask_rows = None if rows is None else MaskRows(rows.mask_token_id, tables["mask_hidden"])
    return EagleDrafter(runner, manifest, mask_rows, **shapes)
