"""One forward over several parts, each with inputs of its own: the rows of prompts beside the rows
of sequences that decode, so that the weights are read once for both.

All that a graph computes row by row it computes over the rows of all parts at once. Attention is
launched for each part, over that part's rows.

Shapes, of part g: B_g sequences, S_g rows of each, R_g rows wanted of each; N and R: the sums of
B_g * S_g and of B_g * R_g.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trt_eagle3.engine.session import Reduction
from trt_eagle3.engine.torch.fusion import Step
from trt_eagle3.engine.torch.prompt_nodes import PROMPT_ATTENTION
from trt_eagle3.graph.decoder import CONTEXT_INPUTS
from trt_eagle3.spec import StateSpec

__all__ = [
    "AUX",
    "LOGITS",
    "Parts",
    "joined",
    "mixable",
    "mixed_steps",
    "reduction_of",
    "split_rows",
]

_OF_ATTENTION = ("past_lengths", "query_lengths", "page_table", "tree_mask")
"""Context inputs that attention alone reads."""
LOGITS, AUX = "logits", "aux_hidden_states"
_JOINED = {"inputs_embeds", "deepstack_embeds", *CONTEXT_INPUTS}

Inputs = Mapping[str, Tensor]
Function = Callable[..., Any]


class Parts:
    """What attention is told of each part; stands for each of ``_OF_ATTENTION`` in a forward."""

    def __init__(self, parts: Sequence[Inputs]) -> None:
        self._parts = parts

    def attend(
        self, function: Function, inputs: Sequence[Any], *, picked: bool, **geometry: Any
    ) -> tuple[Tensor, ...]:
        """``function`` of each part: the parts' rows one after the other, and the caches.

        ``inputs``: of ``TreeAttention``, or where rows are ``picked`` of ``PromptAttention``, whose
        last one counts rows within each part.
        """
        qkv, caches, more = inputs[:3], inputs[3:5], inputs[9 : -1 if picked else None]
        found, start = [], 0
        for part in self._parts:
            stop = start + part["tree_mask"].shape[:2].numel()
            own = [rows[start:stop] for rows in qkv]
            context = [part[name] for name in _OF_ATTENTION]
            wanted = [part["logit_rows"]] if picked else []
            found.append(function(*own, *caches, *context, *more, *wanted, **geometry)[0])
            start = stop
        return torch.cat(found), *caches


def mixable(
    inputs: Collection[str],
    outputs: Collection[str],
    states: Sequence[StateSpec],
    steps: Sequence[Step],
) -> bool:
    """Whether a graph with these can run so: a target all of whose states are paged, and of which
    nothing else is asked.
    """
    readers = {step.op for step in steps if not set(_OF_ATTENTION).isdisjoint(step.inputs)}
    own = {name for state in states for name in (state.name, state.output_name)}
    return (
        readers == {"TreeAttention"}
        and all(state.kind == "paged" for state in states)
        and set(CONTEXT_INPUTS) <= set(inputs)
        and set(inputs) - own <= _JOINED
        and set(outputs) - own <= {LOGITS, AUX}
    )


def mixed_steps(steps: Sequence[Step]) -> tuple[Step, ...]:
    """``steps`` whose attention takes ``Parts``."""
    return tuple(_mixed(step) for step in steps)


def _mixed(step: Step) -> Step:
    if step.op not in {"TreeAttention", PROMPT_ATTENTION}:
        return step

    def attend(*inputs: Any, **geometry: Any) -> tuple[Tensor, ...]:
        parts: Parts = inputs[5]
        picked = step.op == PROMPT_ATTENTION
        return parts.attend(step.function, inputs, picked=picked, **geometry)

    return replace(step, function=attend)


def joined(parts: Sequence[Inputs]) -> dict[str, Any]:
    """The inputs of one forward over ``parts``, which are on the device: embeddings [1, N, H],
    positions [3, 1, N], levels [L, 1, N, H] and wanted rows [1, R], and ``Parts`` for the rest.
    """
    found: dict[str, Any] = dict.fromkeys(_OF_ATTENTION, Parts(parts))
    found["logit_rows"] = torch.cat(_rows_in_all(parts))[None]
    for name in parts[0].keys() - found.keys():
        # the last axis is of a row, the two before it are batch and width
        row = 0 if name == "position_ids" else 1
        flat = [part[name].flatten(-2 - row, -1 - row) for part in parts]
        found[name] = torch.cat(flat, dim=-1 - row).unsqueeze(-2 - row)
    return found


def _rows_in_all(parts: Sequence[Inputs]) -> list[Tensor]:
    """int32 [B_g * R_g] of each part: its ``logit_rows``, counted over the rows of all parts."""
    found, start = [], 0
    for part in parts:
        batch, width = part["tree_mask"].shape[:2]
        rows = part["logit_rows"]
        first = torch.arange(start, start + batch * width, width, device=rows.device)
        found.append((rows + first[:, None]).int().flatten())
        start += batch * width
    return found


def split_rows(rows: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """``rows`` [1, n, ...] as those of each part: [B_g, n_g, ...] by ``shapes``."""
    cut = rows[0].split([batch * width for batch, width in shapes])
    return [x.view(*shape, *x.shape[1:]) for x, shape in zip(cut, shapes, strict=True)]


def reduction_of(
    shapes: Sequence[tuple[int, int]], reduced: Sequence[Reduction | None]
) -> Callable[[Tensor], list[Tensor]]:
    """What makes each part's own output of that of all: by its function, or in float32."""

    def split(rows: Tensor) -> list[Tensor]:
        found = zip(split_rows(rows, shapes), reduced, strict=True)
        return [x.float() if function is None else function(x) for x, function in found]

    return split
