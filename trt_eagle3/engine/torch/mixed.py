"""One forward over several parts, each with its own inputs: rows of prompts and rows of decoding
sequences in one batch, so that the weights are read once.

Nodes that compute row by row run over the rows of all parts at once. Attention is launched once for
each part, over that part's rows.

Shapes, for part g: B_g sequences, S_g rows and R_g picked rows of each; N and R: the sums of
B_g * S_g and of B_g * R_g.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trt_eagle3.engine.runtime.session import Reduction
from trt_eagle3.engine.torch.fusion import Step
from trt_eagle3.engine.torch.prompt_nodes import PROMPT_ATTENTION
from trt_eagle3.graph.decoder import CONTEXT_INPUTS
from trt_eagle3.spec import StateSpec

__all__ = [
    "AUX",
    "LOGITS",
    "ROW_INPUTS",
    "MixedAttentionMetadata",
    "context_of",
    "joined",
    "mixable",
    "flat_rows",
    "mixed_steps",
    "reduction_of",
    "row_axis",
    "split_rows",
]

_OF_ATTENTION = ("past_lengths", "query_lengths", "page_table", "tree_mask")
"""Context inputs that only attention reads."""
LOGITS, AUX = "logits", "aux_hidden_states"
ROW_INPUTS = ("inputs_embeds", "deepstack_embeds", "position_ids")
"""Inputs with rows that nodes other than attention read."""

Inputs = Mapping[str, Tensor]
Function = Callable[..., Any]


class MixedAttentionMetadata:
    """Attention inputs of each part; replaces each of ``_OF_ATTENTION`` in a forward."""

    def __init__(self, parts: Sequence[Inputs], out: Tensor | None = None) -> None:
        """``out``: the buffer for attention's output of all rows; its last rows are padding."""
        self._parts = parts
        self._out = out

    def attend(
        self, function: Function, inputs: Sequence[Any], *, picked: bool, **geometry: Any
    ) -> tuple[Tensor, ...]:
        """Call ``function`` for each part; return the parts' rows concatenated, and the caches.

        ``inputs``: those of ``TreeAttention``. If rows are ``picked``, those of
        ``PromptAttention``, whose last input counts rows within each part.
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
        if picked or self._out is None:
            return torch.cat(found), *caches
        torch.cat(found, out=self._out[:start])
        return self._out, *caches


def mixable(
    inputs: Collection[str],
    outputs: Collection[str],
    states: Sequence[StateSpec],
    steps: Sequence[Step],
) -> bool:
    """Return whether a graph can run so: a target whose states are all paged, with no inputs and
    outputs beyond the known ones.
    """
    readers = {step.op for step in steps if not set(_OF_ATTENTION).isdisjoint(step.inputs)}
    own = {name for state in states for name in (state.name, state.output_name)}
    return (
        readers == {"TreeAttention"}
        and all(state.kind == "paged" for state in states)
        and set(CONTEXT_INPUTS) <= set(inputs)
        and set(inputs) - own <= {*ROW_INPUTS, *CONTEXT_INPUTS}
        and set(outputs) - own <= {LOGITS, AUX}
    )


def mixed_steps(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return ``steps`` with attention that takes ``MixedAttentionMetadata``."""
    return tuple(_mixed(step) for step in steps)


def _mixed(step: Step) -> Step:
    if step.op not in {"TreeAttention", PROMPT_ATTENTION}:
        return step

    def attend(*inputs: Any, **geometry: Any) -> tuple[Tensor, ...]:
        parts: MixedAttentionMetadata = inputs[5]
        picked = step.op == PROMPT_ATTENTION
        return parts.attend(step.function, inputs, picked=picked, **geometry)

    return replace(step, function=attend)


def joined(parts: Sequence[Inputs]) -> dict[str, Any]:
    """Return the inputs of one forward over ``parts``, which are on the device.

    They are embeddings [1, N, H], positions [3, 1, N], levels [L, 1, N, H], picked rows [1, R], and
    ``MixedAttentionMetadata`` for the rest.
    """
    found = context_of(parts)
    for name in parts[0].keys() - found.keys():
        dim = row_axis(name)
        flat = [flat_rows(name, part[name]) for part in parts]
        found[name] = torch.cat(flat, dim=dim).unsqueeze(dim - 1)
    return found


def context_of(parts: Sequence[Inputs], out: Tensor | None = None) -> dict[str, Any]:
    """Return the inputs of attention and head for ``parts``.

    ``out``: see ``MixedAttentionMetadata``.
    """
    found: dict[str, Any] = dict.fromkeys(_OF_ATTENTION, MixedAttentionMetadata(parts, out))
    found["logit_rows"] = torch.cat(_rows_in_all(parts))[None]
    return found


def row_axis(name: str) -> int:
    """Return the axis of an input's rows, counted from the last; the one before is the batch's."""
    return -1 if name == "position_ids" else -2


def flat_rows(name: str, tensor: Tensor) -> Tensor:
    """Flatten an input's sequences and rows into one axis: [..., B * S] or [..., B * S, H]."""
    return tensor.flatten(row_axis(name) - 1, row_axis(name))


def _rows_in_all(parts: Sequence[Inputs]) -> list[Tensor]:
    """Return int32 [B_g * R_g] for each part: its ``logit_rows``, counted over all parts' rows."""
    found, start = [], 0
    for part in parts:
        batch, width = part["tree_mask"].shape[:2]
        rows = part["logit_rows"]
        first = torch.arange(start, start + batch * width, width, device=rows.device)
        found.append((rows + first[:, None]).int().flatten())
        start += batch * width
    return found


def split_rows(rows: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Split ``rows`` [1, n, ...] into those of each part, [B_g, n_g, ...] by ``shapes``. Rows after
    them are padding.
    """
    sizes = [batch * width for batch, width in shapes]
    cut = rows[0, : sum(sizes)].split(sizes)
    return [x.view(*shape, *x.shape[1:]) for x, shape in zip(cut, shapes, strict=True)]


def reduction_of(
    shapes: Sequence[tuple[int, int]], reduced: Sequence[Reduction | None]
) -> Callable[[Tensor], list[Tensor]]:
    """Return a function that splits an output by part and reduces each, or widens it to float32."""

    def split(rows: Tensor) -> list[Tensor]:
        found = zip(split_rows(rows, shapes), reduced, strict=True)
        return [x.float() if function is None else function(x) for x, function in found]

    return split
