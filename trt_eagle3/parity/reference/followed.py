"""Expected values for forwards with speculation, computed with the experts that they chose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from trt_eagle3.parity.record.record import Record
from trt_eagle3.parity.record.routes import speculative_experts
from trt_eagle3.parity.reference.expected import ExpectedAnswer
from trt_eagle3.parity.reference.target import TargetReference

__all__ = ["with_speculation"]


def with_speculation(
    record: Record, reference: TargetReference, e: ExpectedAnswer
) -> ExpectedAnswer | None:
    """Return a copy of ``e`` to be computed with the experts of its forwards with speculation.

    None if those equal the experts of its forwards without speculation.
    """
    answer = e.answer
    if not e.experts or not answer.speculative_forwards:
        return None
    ids = answer.token_ids[: answer.prompt_len + answer.agreed]
    table = reference.embed(ids).cpu().to(record.engine.dtype)
    experts = speculative_experts(record.engine.spec, answer, table, e.experts)
    if _same(experts, e.experts):
        return None
    return replace(
        e,
        experts=experts,
        intermediates={},
        aux={},
        strays={},
        layer_errors=[],
        step_errors=[],
    )


def _same(experts: Mapping[int, Tensor], others: Mapping[int, Tensor]) -> bool:
    """Return whether each row has the same experts, in any order."""
    pairs = ((x.sort(dim=-1).values, others[k].sort(dim=-1).values) for k, x in experts.items())
    return all(bool((a == b).all()) for a, b in pairs)
