"""Own rounding: PyTorch's errors in the engine's dtype, for the tensors that checks compare.

Each function returns the errors of one kind of tensor. They are computed only if a tensor leaves
its tolerance. None if two bundles are compared, because then there is no PyTorch reference.
Shapes: n rows, A tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.metrics import RowErrors, cosines, row_errors
from trt_eagle3.parity.reference.rounding import AnswerRounding

__all__ = [
    "Own",
    "own_aux",
    "own_cosines",
    "own_draft",
    "own_logits",
    "own_logprobs",
    "own_outputs",
    "own_steps",
]

Own = Callable[[RowErrors], Tensor]
"""Maps compared rows of a tensor to PyTorch's errors in that tensor, float64 [n]."""

_BEST = 6
"""Tokens whose log-probabilities are compared: the emitted one and the five likeliest."""


def own_steps(e: Evidence) -> Own | None:
    """Return errors of each layer alone."""
    return _own(e, lambda found, rows: found.steps[_layer(rows)])


def own_outputs(e: Evidence) -> Own | None:
    """Return errors of layers, end to end."""
    return _own(e, lambda found, rows: found.outputs[_layer(rows)])


def own_aux(e: Evidence) -> Own | None:
    """Return errors of aux hidden states: those of the layers that output them."""
    manifest = e.manifest
    if manifest is None:
        return None
    layers = dict(zip(manifest.aux_names, manifest.aux_layers, strict=True))
    last = e.spec.num_layers - 1
    return _own(
        e, lambda found, rows: found.outputs[min(layers[rows.tensor.split("[")[1][:-1]], last)]
    )


def own_logits(e: Evidence) -> Own | None:
    """Return errors of the logits of an answer's tokens."""
    return _own(e, lambda found, _: row_errors(found.narrow, found.wide))


def own_cosines(e: Evidence) -> Own | None:
    """Return cosines of the same logits."""
    return _own(e, lambda found, _: cosines(found.narrow, found.wide))


def own_logprobs(e: Evidence) -> Own | None:
    """Return errors of the likeliest tokens' log-probabilities, in nats."""
    return _own(e, _logprob_errors)


def own_draft(e: Evidence) -> Own | None:
    """Return errors of the draft's tensors; None if they are not known."""
    rounding = e.drafting.rounding if e.drafting is not None else None
    if rounding is None:
        return None
    answers = {x.answer.name: x for x in e.expected}
    found: dict[str, Mapping[str, Tensor]] = {}

    def errors(rows: RowErrors) -> Tensor:
        if rows.case not in found:
            found[rows.case] = rounding(e.record, answers[rows.case])
        return found[rows.case][rows.tensor]

    return errors


def _own(e: Evidence, errors: Callable[[AnswerRounding, RowErrors], Tensor]) -> Own | None:
    rounding = e.pytorch.rounding if e.pytorch is not None else None
    if rounding is None:
        return None
    return lambda rows: errors(rounding.answers[rows.case], rows)


def _layer(rows: RowErrors) -> int:
    return int(rows.tensor.split(".")[1])


def _logprob_errors(found: AnswerRounding, _: RowErrors) -> Tensor:
    narrow, wide = (x.double().log_softmax(dim=-1) for x in (found.narrow, found.wide))
    best = wide.topk(min(_BEST, wide.shape[1]), dim=-1).indices
    return (narrow - wide).gather(1, best).abs().amax(dim=1)
