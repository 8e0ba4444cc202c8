"""Checks of the target graph: every layer, aux hidden states and logits.

Shapes: A tokens of an answer, R rows of logits, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from trt_eagle3.parity.checks.check_recorder import Measurements
from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.checks.own_rounding import (
    own_aux,
    own_cosines,
    own_logits,
    own_outputs,
    own_steps,
)
from trt_eagle3.parity.metrics import RowErrors, cosines, leads, margins, row_errors
from trt_eagle3.parity.record.trace import logits_of
from trt_eagle3.parity.reference.expected import ExpectedAnswer

__all__ = [
    "check_aux",
    "check_layer_steps",
    "check_layers",
    "check_logits_cosine",
    "check_logits_l2",
    "check_top1",
    "check_top5",
]

SURE = 0.1
"""Margin in probability above which the engine must emit the reference's best token.

Rows whose best two tokens are a tie are excluded.
"""
_CLOSED = "this backend does not expose tensors inside its graphs"


def check_layer_steps(e: Evidence, m: Measurements) -> None:
    """Compare each decoder layer alone, from the engine's own input to it."""
    found = _by_layer(found for x in e.expected for found in x.step_errors)
    m.add_rows(*found, own=own_steps(e))
    _skip_closed(e, m)


def check_layers(e: Evidence, m: Measurements) -> None:
    """Compare each decoder layer's output, end to end."""
    found = _by_layer(found for x in e.expected for found in x.layer_errors)
    m.add_rows(*found, own=own_outputs(e))
    _skip_closed(e, m)


def _by_layer(found: Iterable[RowErrors]) -> list[RowErrors]:
    """Sort errors by layer, over all prompts: a fault shows in every later layer too."""
    return sorted(found, key=lambda rows: int(rows.tensor.split(".")[1]))


def _skip_closed(e: Evidence, m: Measurements) -> None:
    if not any(e.record.intermediates):
        m.skip(_CLOSED)


def check_aux(e: Evidence, m: Measurements) -> None:
    """Compare aux hidden states."""
    for expected in e.expected:
        m.add_rows(*expected.aux_errors, own=own_aux(e))


def _logits(e: Evidence) -> Iterator[tuple[ExpectedAnswer, Tensor, Tensor]]:
    """Yield each answer with the engine's logits [R, V] and the expected ones.

    Rows start at the prompt's last row.
    """
    for expected in e.expected:
        first = expected.answer.prompt_len - 1
        forwards = expected.answer.autoregressive_forwards
        found = {logit.row: logit.values for f in forwards for logit in logits_of(f)}
        rows = [row for row in range(first, expected.answer.num_rows) if row in found]
        ours = torch.stack([found[row] for row in rows])
        yield expected, ours, expected.logits[torch.tensor(rows) - first]


def check_logits_cosine(e: Evidence, m: Measurements) -> None:
    """Compare the direction of logits: the 5th percentile of an answer's rows."""
    for expected, ours, theirs in _logits(e):
        first = expected.answer.prompt_len - 1
        found = RowErrors(expected.answer.name, "logits", cosines(ours, theirs), first)
        m.add_cosines(found, own=own_cosines(e))


def check_logits_l2(e: Evidence, m: Measurements) -> None:
    """Compare the size of the logits' error."""
    for expected, ours, theirs in _logits(e):
        first = expected.answer.prompt_len - 1
        found = RowErrors(expected.answer.name, "logits", row_errors(ours, theirs), first)
        m.add_rows(found, own=own_logits(e))


def check_top1(e: Evidence, m: Measurements) -> None:
    """Compare the best token, where the reference is certain."""
    for expected, ours, theirs in _logits(e):
        right = ours.argmax(dim=-1) == theirs.argmax(dim=-1)
        _add_share(m, expected, _sure(theirs, m.tie_margin), right)


def check_top5(e: Evidence, m: Measurements) -> None:
    """Check that the best token is among the reference's five, where it is uncertain."""
    for expected, ours, theirs in _logits(e):
        best = theirs.topk(min(5, theirs.shape[1]), dim=-1).indices
        near = (best == ours.argmax(dim=-1)[:, None]).any(dim=1)
        _add_share(m, expected, ~_sure(theirs, m.tie_margin), near)


def _sure(logits: Tensor, tie_margin: float) -> Tensor:
    """bool [R]: the best token is no tie, and is much likelier than the second."""
    return (margins(logits) > SURE) & (leads(logits) > tie_margin)


def _add_share(m: Measurements, expected: ExpectedAnswer, chosen: Tensor, right: Tensor) -> None:
    """Add the share of the ``chosen`` rows that are ``right``; bool [R] each."""
    if not chosen.any():
        return
    wrong = (chosen & ~right).nonzero().flatten()
    row = expected.answer.prompt_len - 1 + int(wrong[0]) if len(wrong) else None
    compared, share = int(chosen.sum()), float(right[chosen].double().mean())
    m.count(rows=compared)
    m.add(share, expected.answer.name, "logits", row, compared=compared)
