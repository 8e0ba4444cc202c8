"""Faults of block drafts: of context rows, a block, its heads, its tokens; and of P-EAGLE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.parity.fault import Fault, decoding, given, moved
from tests.parity.planting import Planted, Seam, Tensors
from trt_eagle3.decode.speculation import block_heads
from trt_eagle3.decode.speculation.block import BlockDrafter
from trt_eagle3.decode.speculation.block_heads import BlockHeads
from trt_eagle3.decode.speculation.grow import DraftInputs, MaskRows, TreeGrower
from trt_eagle3.decode.speculation.proposal import Proposal
from trt_eagle3.decode.speculation.tree import Tree
from trt_eagle3.drafts.block.manifest import BlockManifest
from trt_eagle3.spec import RopeSpec

_DFLASH2 = partial(Fault, bundle="dflash2")
_DSPARK = partial(Fault, bundle="dspark")
_P_EAGLE = partial(Fault, bundle="p-eagle")


def _read_as(graph: str = "block", **changes: Any) -> Callable[[Planted], None]:
    """``graph`` is built of a manifest with ``changes``."""
    return lambda p: p.rebuild(graph, draft=replace(p.manifest, **changes))


def _wider_windows(p: Planted) -> None:
    assert isinstance(p.manifest, BlockManifest)
    layers = tuple(replace(layer, window=layer.window + 1) for layer in p.manifest.layers)
    _read_as(layers=layers)(p)


def _reweigh(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Planted], None]:
    return lambda p: p.reweigh("draft", p.manifest.tensors[name], change)


def _heads(**changes: Any) -> Callable[[Planted], None]:
    """The heads are those of a manifest with ``changes``."""

    def plant(p: Planted) -> None:
        real = BlockHeads.__init__

        def create(self: BlockHeads, manifest: BlockManifest, *args: Any) -> None:
            real(self, replace(manifest, **changes), *args)

        p.patch.setattr(BlockHeads, "__init__", create)

    return plant


def _anchors_correction(p: Planted) -> None:
    """Every row of a block is corrected by the anchor."""
    real = block_heads._Markov.correction

    def correction(self: Any, before: Tensor, hidden: Tensor | None) -> Tensor:
        self.anchor = getattr(self, "anchor", before)
        return real(self, self.anchor, hidden)

    p.patch.setattr(block_heads._Markov, "correction", correction)


def _of_another_token(p: Planted) -> None:
    real = BlockHeads.confidence

    def confidence(self: Any, before: Tensor, hidden: Tensor | None) -> Tensor | None:
        return real(self, before.roll(1, dims=1), hidden)

    p.patch.setattr(BlockHeads, "confidence", confidence)


def _anchor_twice(p: Planted) -> None:
    """A block's first token is the anchor again, and the others stand one place late."""
    real = BlockDrafter._draft

    def draft(self: BlockDrafter, *args: Any) -> Proposal:
        found = real(self, *args)
        tokens = torch.cat([found.tokens[:, :1], found.tokens[:, :-1]], dim=1)
        return replace(found, tokens=tokens)

    p.patch.setattr(BlockDrafter, "_draft", draft)


def _rope_positions(p: Planted) -> None:
    """Blocks stand at the target's rope positions."""
    deltas: list[int] = []

    def target(_: Seam, inputs: Tensors) -> Tensors:
        last = int(inputs["query_lengths"][0]) - 1
        index = int(inputs["past_lengths"][0]) + last
        deltas[:] = [int(inputs["position_ids"][0, 0, last]) - index]
        return inputs

    def block(_: Seam, inputs: Tensors) -> Tensors:
        return moved(inputs, "position_ids", lambda t: t + deltas[0])

    p.outside |= {"target": Seam(None, target), "block": Seam(None, block)}  # type: ignore[arg-type]


def _masks_like_the_anchor(_: Seam, inputs: Tensors) -> Tensors:
    return moved(inputs, "inputs_embeds", lambda t: t[:, :1].expand_as(t).contiguous())


def _mask_rows(change: Callable[[MaskRows], MaskRows]) -> Callable[[Planted], None]:
    def plant(p: Planted) -> None:
        real = TreeGrower._fill_at_once

        def fill(self: TreeGrower, tree: Tree, inputs: DraftInputs, rows: MaskRows) -> Proposal:
            return real(self, tree, inputs, change(rows))

        p.patch.setattr(TreeGrower, "_fill_at_once", fill)

    return plant


def _fed_back(p: Planted) -> None:
    real = TreeGrower._level

    def level(
        self: TreeGrower, inputs: DraftInputs, depth: Any, tokens: Tensor, fed: Tensor, mask: Tensor
    ) -> Any:
        return real(self, inputs, depth, tokens, inputs.features[:, None].expand_as(fed), mask)

    p.patch.setattr(TreeGrower, "_level", level)


BLOCK: Mapping[str, Fault] = {
    "block rows of other tokens": _DSPARK(
        "the context rows of accepted tokens are those of the tokens before",
        "draft.aux",
        "aux_hidden_states[out(1)]",
        given(
            "outside",
            "context",
            lambda _, i: (
                moved(i, "aux_hidden_states", lambda t: t.roll(1, dims=1)) if decoding(i) else i
            ),
        ),
    ),
    "mask rows": _DFLASH2(
        "mask rows have the anchor's embedding",
        "draft.inputs_embeds",
        "inputs_embeds.block",
        given("outside", "block", _masks_like_the_anchor),
    ),
    "block at rope positions": _DFLASH2(
        "blocks after images stand at the target's rope positions in place of sequence indices",
        "draft.position_ids",
        "position_ids.block",
        _rope_positions,
    ),
    "context rope": _DFLASH2(
        "context rows are rotated with another base than the block",
        "draft.context",
        "k_cache.0",
        _read_as("context", rope=RopeSpec.plain(32, 1e4)),
    ),
    "context convolved": _DFLASH2(
        "context rows are mixed with the row before, like the rows of a block",
        "draft.context",
        "k_cache.0",
        given(
            "inside",
            "context",
            lambda _, i: moved(i, "aux_hidden_states", lambda t: t + 0.1 * t.roll(1, dims=1)),
        ),
    ),
    "block causal": _DFLASH2(
        "the rows of a block see only the rows before them",
        "draft.features",
        "layers.0.self_attn.out",
        given("outside", "block", lambda _, i: moved(i, "tree_mask", torch.tril)),
    ),
    "block window": _DFLASH2(
        "the window of a block's rows has one slot more",
        "draft.features",
        "layers.0.self_attn.out",
        _wider_windows,
    ),
    "convolution reversed": _DFLASH2(
        "the taps of a convolution are swapped",
        "draft.features",
        "layers.1.self_attn.q",
        _reweigh("layers.1.attention_conv.base_kernel", lambda w: w.flip(1)),
    ),
    "block shifted": _DFLASH2(
        "the token of a row is read from the row before",
        "draft.features",
        "hidden",
        given("outside", "block", lambda _, i: moved(i, "logit_rows", lambda t: t - 1)),
    ),
    "block head": _DSPARK(
        "two rows of a block draft's head are swapped",
        "draft.logits",
        "logits",
        _reweigh("lm_head.weight", lambda w: w[torch.tensor([1, 0, *range(2, len(w))])]),
    ),
    "selector left out": _DFLASH2(
        "the candidate selector is left out",
        "draft.scores",
        "scores.selector",
        _heads(selector_rank=0),
        also=("draft.tokens",),
    ),
    "markov of the anchor": _DSPARK(
        "the markov head is given the anchor in place of the token before",
        "draft.scores",
        "scores.markov",
        _anchors_correction,
        also=("draft.acceptance",),
    ),
    "confidence after another token": _DSPARK(
        "the confidence head is given another token",
        "draft.confidence",
        "confidence",
        _of_another_token,
    ),
    "anchor twice": _DSPARK(
        "the anchor is counted as the first token of its block",
        "draft.proposals",
        "proposals",
        _anchor_twice,
        also=("draft.acceptance",),
    ),
    "candidates": _DFLASH2(
        "the selector chooses from one candidate in place of four",
        "draft.tokens",
        "tokens",
        _heads(selector_top_k=1),
    ),
    "mask rows of P-EAGLE": _P_EAGLE(
        "P-EAGLE's mask rows have another token's embedding",
        "draft.inputs_embeds",
        "inputs_embeds.step1",
        _mask_rows(lambda rows: replace(rows, token_id=3)),
    ),
    "features of mask rows": _P_EAGLE(
        "P-EAGLE's mask rows are fed back features of the last row",
        "draft.features",
        "features_out.step1",
        _fed_back,
    ),
    "table of the markov head": _DSPARK(
        "an unused row of the markov head's table is not the checkpoint's",
        "bundle.tables",
        "markov_head.markov_w1.weight",
        _reweigh("markov_head.markov_w1.weight", lambda w: torch.cat([w[:-1], 2 * w[-1:]])),
    ),
}
