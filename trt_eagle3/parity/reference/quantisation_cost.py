"""Cost of quantisation: the 16-bit target's logits on the same tokens, and the draft's acceptance.

Both targets run in PyTorch, without the engine. Shapes: n rows of a sequence, A tokens of an
answer, V vocab, Hd draft hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trt_eagle3.parity.reference.chain_acceptance import chain_acceptance
from trt_eagle3.parity.reference.draft_parity import DraftParity
from trt_eagle3.parity.reference.expected import ExpectedAnswer
from trt_eagle3.parity.reference.target import TargetReference
from trt_eagle3.parity.reference.target_rows import run_layers

__all__ = ["QuantisationCost", "quantisation_cost"]


@dataclass(frozen=True)
class QuantisationCost:
    """The quantised target compared with the 16-bit one, over ``rows`` of logits.

    Attributes:
        kl_mean, kl_max: KL(16-bit || quantised) of a row, in nats.
        top1: share of rows with the same best token.
        first_accepted: share of rows in which the draft's best first token is the best token of
            the quantised target; None without a draft.
        first_accepted_16bit: the same for the 16-bit target.
        acceptance_length: mean tokens emitted per forward of the quantised target that verified a
            chain of as many tokens as the bundle's speculation has steps; None without a draft, or
            if no answer is long enough.
        acceptance_length_16bit: the same for the 16-bit target.
    """

    rows: int
    kl_mean: float
    kl_max: float
    top1: float
    first_accepted: float | None
    first_accepted_16bit: float | None
    acceptance_length: float | None
    acceptance_length_16bit: float | None


def quantisation_cost(
    original: TargetReference,
    expected: Sequence[ExpectedAnswer],
    drafting: DraftParity | None,
    progress: Callable[[], object],
) -> QuantisationCost:
    """Run the ``original`` target over the answers, and compare with the quantised logits in
    ``expected``.
    """
    manifest = drafting.reference.manifest if drafting else None
    other = [ExpectedAnswer(e.answer, {}, e.positions, vision=e.vision) for e in expected]
    run_layers(original, other, manifest, progress)
    theirs = torch.cat([e.logits for e in other]).double().log_softmax(dim=-1)
    ours = torch.cat([e.logits for e in expected]).double().log_softmax(dim=-1)
    kl = (theirs.exp() * (theirs - ours)).sum(dim=-1).clamp(min=0)
    same = theirs.argmax(dim=-1) == ours.argmax(dim=-1)
    figures = (float(kl.mean()), float(kl.max()), float(same.double().mean()))
    if drafting is None:
        return QuantisationCost(len(kl), *figures, None, None, None, None)
    steps = drafting.reference.speculation.steps
    quantised, dense = (
        chain_acceptance([drafting.accepted(e, steps) for e in side], steps)
        for side in (expected, other)
    )
    accepted = (quantised.first, dense.first, quantised.length, dense.length)
    return QuantisationCost(len(kl), *figures, *accepted)
