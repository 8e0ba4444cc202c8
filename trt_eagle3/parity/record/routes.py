"""Routes: the experts that the engine's rows chose in a mixture, from its own router logits.

Every recorded forward of the target returns these logits (``record.engine``), except in TensorRT
engines that were built without them. Forwards with speculation may choose other experts than
forwards without it: rounding decides between two experts whose logits nearly tie.

Shapes: n rows of a sequence, E experts, k experts of a row, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from trt_eagle3.parity.record.answers import RecordedAnswer
from trt_eagle3.parity.record.engine import ROUTER, RecordedForward
from trt_eagle3.parity.record.trace import ForwardRows, outputs_of, rows_of
from trt_eagle3.parity.record.trees import path_rows
from trt_eagle3.spec import SparseMoe, TargetSpec

__all__ = ["Experts", "chosen_experts", "recorded_experts", "speculative_experts"]

Experts = Mapping[int, Tensor]
"""int64 [n, k] by layer. Dense layers and layers without recorded logits are missing."""


def chosen_experts(router_logits: Tensor, top_k: int) -> Tensor:
    """int64 [n, k]: the experts with the largest probabilities.

    Of equal experts the first is chosen, as in every implementation of ``FusedMoe``.
    """
    probabilities = router_logits.float().softmax(dim=-1)
    return probabilities.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


def recorded_experts(spec: TargetSpec, answer: RecordedAnswer) -> Experts:
    """Return the experts of the answer's rows in the forwards without speculation."""
    forwards = answer.autoregressive_forwards
    outputs = [forward.outputs for forward in forwards]
    return {
        k: chosen_experts(outputs_of(forwards, outputs, name), top_k)
        for k, name, top_k in _routers(spec, forwards[0])
    }


def speculative_experts(
    spec: TargetSpec, answer: RecordedAnswer, table: Tensor, without: Experts
) -> Experts:
    """Return the experts of the answer's rows in the forwards with speculation.

    They are known for prompt rows and for verified nodes on the answer's path. Other rows come
    from ``without``.

    Args:
        table: as for ``trees.path_rows``, of the tokens that are the same with speculation.
        without: ``recorded_experts`` of the answer.
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


def _routers(spec: TargetSpec, forward: RecordedForward) -> Iterator[tuple[int, str, int]]:
    """Yield layer, name of its router logits and experts per row, if ``forward`` has the logits."""
    for k, layer in enumerate(spec.layers):
        name = f"layers.{k}.{ROUTER}"
        if isinstance(layer.mlp, SparseMoe) and name in forward.outputs:
            yield k, name, layer.mlp.top_k


def _places(
    answer: RecordedAnswer, table: Tensor
) -> Iterator[tuple[int, RecordedForward, ForwardRows, int]]:
    """Yield row of the sequence, the forward with speculation, its rows, and the index in them."""
    for forward in answer.speculative_forwards:
        if forward.graph != "target":
            continue
        rows = rows_of(forward)
        if rows.past < answer.prompt_len:
            yield from ((rows.start + i, forward, rows, i) for i in range(rows.count))
        else:
            nodes = path_rows(forward, rows, table)
            yield from ((row, forward, rows, node) for row, node in nodes.items())
