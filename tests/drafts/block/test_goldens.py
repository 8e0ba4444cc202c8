"""The reference of block drafts against what the producers' own code computed (``golden.py``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.drafts.block.golden import NAMES, Golden, load_golden
from trt_eagle3.drafts.block.manifest import BlockLayer
from trt_eagle3.drafts.block.reference import BlockReference, BlockRows
from trt_eagle3.parity.reference.draft import KeysValues

TOLERANCE = 3e-5
"""Absolute: the producers ran in float32, and the files hold six digits. At most 1.2e-5 is seen."""


def forced(tokens: list[int]) -> Callable[[int, Tensor], int]:
    """Return a draw that chooses ``tokens`` in order."""
    return lambda draft, _: tokens[draft]


def errors(golden: Golden, reference: BlockReference) -> dict[str, float]:
    """The largest difference of each kind of output from the producer's, over all blocks.

    Another shape, and a value that is no number, count as infinite.
    """
    found: dict[str, float] = {}

    def compare(kind: str, ours: Tensor | None, theirs: Any) -> None:
        wanted = torch.tensor(theirs, dtype=torch.float64)
        same = ours is not None and ours.shape == wanted.shape
        error = (ours - wanted).abs().max().nan_to_num(nan=torch.inf) if same else torch.inf
        found[kind] = max(found.get(kind, 0.0), float(error))

    for cycle in golden.cycles:
        rows = golden.rows(cycle, reference)
        compare("hidden", rows.hidden, cycle["hidden"])
        compare("logits", rows.logits[-len(cycle["logits"]) :], cycle["logits"])
        if "forced" in cycle:  # a training forward: the tokens before are the text's
            draw = forced(cycle["forced"])
            proposal = reference.propose(cycle["anchor"], rows, draw)
        else:
            proposal = reference.propose(cycle["anchor"], rows)
            compare("tokens", torch.tensor(proposal.tokens).double(), cycle["tokens"])
        if "scores" in cycle:
            compare("scores", proposal.scores, cycle["scores"])
        if "confidence" in cycle:
            compare("confidence", proposal.confidence, cycle["confidence"])
        if "selected" in cycle:
            chosen = proposal.scores.gather(1, torch.tensor(cycle["candidates"]))
            compare("selected", chosen, cycle["selected"])
        if "q" in cycle and not found["tokens"]:
            draw = forced(cycle.get("sampled", cycle["tokens"]))
            drawn = reference.propose(cycle["anchor"], rows, draw, golden.temperature)
            compare("q", drawn.q, cycle["q"])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_reader_and_reference_equal_the_producers_code(name: str) -> None:
    golden = load_golden(name)
    found = errors(golden, golden.reference)
    assert max(found.values()) < TOLERANCE, found


def test_recorded_runs_cover_every_head() -> None:
    manifests = [load_golden(name).manifest for name in NAMES]
    forms = {m.markov.form for m in manifests if m.markov}
    assert forms == {"vanilla", "gated", "rnn"}
    assert {m.confidence.with_markov for m in manifests if m.confidence} == {True, False}
    assert any(m.selector_rank and m.conv_kernel for m in manifests)
    assert {m.window_rule for m in manifests if any(x.window for x in m.layers)} == {
        "row",
        "anchor",
    }


def test_context_in_pieces_equals_context_at_once() -> None:
    golden = load_golden("dflash")
    ours = golden.reference
    pieces = zip(ours.context(golden.aux[:5]), ours.context(golden.aux[5:9], first=5), strict=True)
    for whole, (head, tail) in zip(ours.context(golden.aux[:9]), pieces, strict=True):
        for at_once, first, second in zip(whole, head, tail, strict=True):
            assert_close(torch.cat([first, second]), at_once)


def test_float32_reference_equals_float64() -> None:
    golden = load_golden("dspark_rnn")
    found = errors(golden, replace(golden.reference, dtype=torch.float32))
    assert max(found.values()) < TOLERANCE


# ---- planted faults: a reference with one of them differs from the producers


@dataclass(frozen=True)
class AnchorTwice(BlockReference):
    """The anchor also has a row of context, and the block begins after it."""

    def context(self, aux: Tensor, first: int = 0) -> KeysValues:
        return super().context(torch.cat([aux, aux[-1:]]), first)

    def block(self, anchor: int, position: int, num_rows: int, context: KeysValues) -> BlockRows:
        return super().block(anchor, position + 1, num_rows, context)


@dataclass(frozen=True)
class ConvolvedContext(BlockReference):
    """The convolution before attention also runs over context rows."""

    def context(self, aux: Tensor, first: int = 0) -> KeysValues:
        rows = self._norm(self._linear(aux, "fc"), "hidden_norm")
        found: list[tuple[Tensor, Tensor]] = []
        for layer in range(self.manifest.num_layers):
            name = f"layers.{layer}.attention_conv"

            def keep(x: Tensor, layer: int = layer) -> Tensor:
                found.append(self._keys_values(x, layer, first))
                return x

            self._convolved(rows, name, keep)
        return found


@dataclass(frozen=True)
class MaskBefore(BlockReference):
    """The markov head is fed the mask token, whatever token was before."""

    def _latent(
        self, hidden: Tensor, _previous: int, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return super()._latent(hidden, self.manifest.mask_token_id, state)


def misread(golden: Golden, **fields: Any) -> BlockReference:
    """Return the reference of the draft, read with other fields."""
    return replace(golden.reference, manifest=replace(golden.manifest, **fields))


def changed(**fields: Any) -> Callable[[Golden], BlockReference]:
    """Return a fault: ``misread``."""
    return lambda golden: misread(golden, **fields)


def markov(**fields: Any) -> Callable[[Golden], BlockReference]:
    """Return a fault: the markov head is read with other fields."""

    def plant(golden: Golden) -> BlockReference:
        assert golden.manifest.markov is not None
        return misread(golden, markov=replace(golden.manifest.markov, **fields))

    return plant


def windows(by: int) -> Callable[[Golden], BlockReference]:
    """Return a fault: windows are longer by ``by``."""

    def plant(golden: Golden) -> BlockReference:
        layers = golden.manifest.layers
        moved = tuple(replace(x, window=x.window + by) if x.window else x for x in layers)
        return misread(golden, layers=moved)

    return plant


def built(kind: type[BlockReference]) -> Callable[[Golden], BlockReference]:
    """Return a fault: another forward."""
    return lambda golden: kind(golden.manifest, golden.reference.weights)


CAUSAL = (BlockLayer(causal=True, window=0),) * 2
FAULTS: Mapping[str, tuple[str, Callable[[Golden], BlockReference], str]] = {
    "rows predict the next token": ("dflash", changed(shift="next", anchor_row=True), "tokens"),
    "rows predict their own token": (
        "dspark_vanilla",
        changed(shift="own", anchor_row=False),
        "tokens",
    ),
    "causal": ("dflash", changed(layers=CAUSAL), "hidden"),
    "bidirectional": (
        "dflash_causal",
        changed(layers=(BlockLayer(causal=False, window=0),) * 2),
        "hidden",
    ),
    "anchor counted twice": ("dflash", built(AnchorTwice), "hidden"),
    "another mask token": ("dflash", changed(mask_token_id=38), "hidden"),
    "embedding not scaled": ("dflash_scaled_yarn", changed(embedding_scale=1.0), "hidden"),
    "logits not capped": ("dflash_scaled_yarn", changed(logit_softcap=0.0), "logits"),
    "window longer": ("dflash_sliding", windows(1), "hidden"),
    "window shorter": ("dflash_sliding_bidirectional", windows(-1), "hidden"),
    "window from the anchor, longer": ("speculators_dflash", windows(1), "hidden"),
    "window by row": ("speculators_dflash", changed(window_rule="row"), "hidden"),
    "window by anchor": ("dflash_sliding", changed(window_rule="anchor"), "hidden"),
    "selector left out": ("dflash2", changed(selector_top_k=0), "tokens"),
    "convolution left out": ("dflash2", changed(conv_kernel=0), "hidden"),
    "convolution over context rows": ("dflash2", built(ConvolvedContext), "hidden"),
    "markov left out": ("dspark_vanilla", changed(markov=None, confidence=None), "scores"),
    "markov fed another token": ("dspark_vanilla", built(MaskBefore), "scores"),
    "gate left out": ("dspark_gated", markov(form="vanilla"), "scores"),
    "state does not pass the anchor": (
        "speculators_dspark_rnn",
        markov(state_from_anchor=False),
        "scores",
    ),
}
"""Fault -> recorded run, the faulty reference, and the output that must differ."""


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_differs_from_the_producers_code(fault: str) -> None:
    name, plant, kind = FAULTS[fault]
    golden = load_golden(name)
    assert errors(golden, plant(golden))[kind] > 100 * TOLERANCE
