"""Routes: which experts of a mixture the engine's rows went through, by its own router logits.

Every recorded forward of the target gives these logits (``record.engine``), of all backends but
TensorRT engines that were built without them. The forwards with speculation may choose otherwise
than those without: of two experts whose logits all but tie rounding chooses one.

Shapes: n rows of a sequence, E experts, k experts of a row, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from trt_eagle3.parity.record.answers import Answer
from trt_eagle3.parity.record.engine import ROUTER, Forward
from trt_eagle3.parity.record.trace import Rows, outputs_of, rows_of
from trt_eagle3.parity.record.trees import path_rows
from trt_eagle3.spec import SparseMoe, TargetSpec

__all__ = ["Experts", "chosen_experts", "recorded_experts", "speculative_experts"]

Experts = Mapping[int, Tensor]
"""int64 [n, k] by layer; none of dense layers, nor where the engine does not tell."""


def chosen_experts(router_logits: Tensor, top_k: int) -> Tensor:
    """int64 [n, k]: those of the largest probabilities; of equal ones the first, as in every
    implementation of ``FusedMoe``.
    """
    probabilities = router_logits.float().softmax(dim=-1)
    return probabilities.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


def recorded_experts(spec: TargetSpec, answer: Answer) -> Experts:
    """Of the answer's rows, as the forwards without speculation chose them."""
    forwards = answer.autoregressive_forwards
    outputs = [forward.outputs for forward in forwards]
    return {
        k: chosen_experts(outputs_of(forwards, outputs, name), top_k)
        for k, name, top_k in _routers(spec, forwards[0])
    }


def speculative_experts(
    spec: TargetSpec, answer: Answer, table: Tensor, without: Experts
) -> Experts:
    """The same of the forwards with speculation: of prompt rows, and of verified nodes that stand
    on the answer. Other rows are as ``without`` speculation.

    Args:
        table: as of ``trees.path_rows``, of the tokens that are the same with speculation.
    """
    places = [place for place in _places(answer, table) if place[0] < answer.num_rows]
    if not places:
        return without
    found = {}
    wanted = torch.tensor([row for row, *_ in places])
    for k, name, top_k in _routers(spec, places[0][1]):
        logits = torch.stack([rows.cut(f.outputs[name])[node] for _, f, rows, node in places])
        found[k] = without[k].clone()
        found[k][wanted] = chosen_experts(logits, top_k)
    return found


def _routers(spec: TargetSpec, forward: Forward) -> Iterator[tuple[int, str, int]]:
    """Layer, name of its router logits, and experts of a row, as far as the forward gave them."""
    for k, layer in enumerate(spec.layers):
        name = f"layers.{k}.{ROUTER}"
        if isinstance(layer.mlp, SparseMoe) and name in forward.outputs:
            yield k, name, layer.mlp.top_k


def _places(answer: Answer, table: Tensor) -> Iterator[tuple[int, Forward, Rows, int]]:
    """Row of the sequence, the forward with speculation that ran it, and where in its rows."""
    for forward in answer.speculative_forwards:
        if forward.graph != "target":
            continue
        rows = rows_of(forward)
        if rows.past < answer.prompt_len:
            yield from ((rows.start + i, forward, rows, i) for i in range(rows.count))
        else:
            nodes = path_rows(forward, rows, table)
            yield from ((row, forward, rows, node) for row, node in nodes.items())
