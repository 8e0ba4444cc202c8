"""What quantisation costs: the 16-bit target's logits on the same tokens, and the draft's guesses.

Both targets are PyTorch's; the engine is not in it. Shapes: n rows of a sequence, A tokens of an
answer, V vocab, Hd draft hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.parity.reference.drafting import DraftReference
from trt_eagle3.parity.reference.expected import ExpectedAnswer
from trt_eagle3.parity.reference.target import TargetReference
from trt_eagle3.parity.reference.target_rows import run_layers

__all__ = ["QuantisationCost", "quantisation_cost"]


@dataclass(frozen=True)
class QuantisationCost:
    """The quantised target beside the 16-bit one, over ``rows`` of logits.

    Attributes:
        kl_mean, kl_max: KL(16-bit || quantised) of a row, in nats.
        top1: share of rows with the same best token.
        first_accepted: share of rows in which the draft's best first guess is the target's best
            token, of the quantised target. first_accepted_16bit: of the 16-bit one. None without a
            draft.
    """

    rows: int
    kl_mean: float
    kl_max: float
    top1: float
    first_accepted: float | None
    first_accepted_16bit: float | None


def quantisation_cost(
    original: TargetReference,
    expected: Sequence[ExpectedAnswer],
    drafting: DraftReference | None,
    progress: Callable[[], object],
) -> QuantisationCost:
    """Run the ``original`` target over the answers that ``expected`` has the quantised one's
    logits of.
    """
    manifest = drafting.manifest if drafting else None
    other = [ExpectedAnswer(e.answer, {}, e.positions, vision=e.vision) for e in expected]
    run_layers(original, other, manifest, progress)
    theirs = torch.cat([e.logits for e in other]).double().log_softmax(dim=-1)
    ours = torch.cat([e.logits for e in expected]).double().log_softmax(dim=-1)
    kl = (theirs.exp() * (theirs - ours)).sum(dim=-1).clamp(min=0)
    same = theirs.argmax(dim=-1) == ours.argmax(dim=-1)
    accepted = [_first_accepted(drafting, side) if drafting else None for side in (expected, other)]
    return QuantisationCost(
        len(kl), float(kl.mean()), float(kl.max()), float(same.double().mean()), *accepted
    )


def _first_accepted(drafting: DraftReference, expected: Sequence[ExpectedAnswer]) -> float:
    """Share of rows whose next token the draft guesses first, from the target's true features."""
    right = torch.cat([_guessed(drafting, e) for e in expected])
    return float(right.double().mean()) if len(right) else 0.0


def _guessed(drafting: DraftReference, e: ExpectedAnswer) -> Tensor:
    """bool [A - 1]: draft row t, which holds token t + 1, guesses what the target says at t + 1."""
    first, count = e.answer.prompt_len - 1, e.answer.num_rows - 1
    draft = drafting.draft
    aux = torch.cat([e.aux[k][:count] for k in drafting.manifest.aux_layers], dim=-1)
    features = draft.fuse(aux.to(drafting.target.device, draft.dtype))
    embeds = drafting.prompt_embeds(e.answer, draft.dtype)[:count].to(features)
    positions = drafting.positions(torch.arange(count), e.positions)
    mask = torch.ones(count, count, dtype=torch.bool).tril()
    wanted = torch.arange(first, count)
    rows = draft.run(embeds, features, positions.T, mask, logit_rows=wanted)
    guesses = drafting.target_ids(rows.logits.argmax(dim=-1).cpu())
    return guesses == e.logits.argmax(dim=-1)[1 : len(guesses) + 1]
