"""Read a record: find the row of the sequence of every recorded value.

Shapes: B rows of a forward, S new tokens, M masked tail, n rows of the sequence, R rows of logits,
L deepstack levels, T tree nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.parity.record.engine import RecordedForward

__all__ = [
    "Logits",
    "ForwardRows",
    "all_rows_of",
    "visual_levels_of",
    "embeds_of",
    "logits_of",
    "outputs_of",
    "positions_of",
    "rows_of",
]


@dataclass(frozen=True)
class ForwardRows:
    """The real rows of a forward over one sequence: ``count`` rows at batch row ``batch``.

    Attributes:
        past: rows of the sequence that all of them see.
        first: offset of the first row after those.
        mask: bool [count, M].
        shape: (B, S).
    """

    batch: int
    past: int
    first: int
    count: int
    mask: Tensor
    shape: tuple[int, int]

    @property
    def start(self) -> int:
        """Slot of the first row."""
        return self.past + self.first

    def cut(self, values: Tensor) -> Tensor:
        """Return [count, H] of values [B, S, H] or, flat, [B * S, H]."""
        if values.ndim < 3:
            values = values.unflatten(0, self.shape)
        return values[self.batch, : self.count]


def rows_of(p: RecordedForward) -> ForwardRows:
    """Return the rows of a forward over exactly one sequence."""
    found = all_rows_of(p)
    assert len(found) == 1, f"{p.graph}: a forward over {len(found)} sequences"
    return found[0]


def all_rows_of(p: RecordedForward) -> list[ForwardRows]:
    """Return the rows of every sequence in a forward."""
    counts, mask = p.inputs["query_lengths"], p.inputs["tree_mask"]
    real = counts.nonzero().flatten().tolist()
    if len(real) > 1:  # idle rows of a fixed batch may count one token, on the unused page 0
        real = [b for b in real if int(p.inputs["page_table"][b, 0])]
    num_batch, num_new, tail = mask.shape
    past = p.inputs["past_lengths"]
    return [
        ForwardRows(
            b,
            int(past[b]),
            tail - num_new,
            int(counts[b]),
            mask[b, : int(counts[b])],
            (num_batch, num_new),
        )
        for b in real
    ]


def embeds_of(forwards: Iterable[RecordedForward]) -> Tensor:
    """[n, H]: the token embeddings of consecutive forwards."""
    return torch.cat([rows_of(p).cut(p.inputs["inputs_embeds"]) for p in forwards])


def positions_of(p: RecordedForward) -> Tensor:
    """[count, 3]: the positions of one forward."""
    rows = rows_of(p)
    return p.inputs["position_ids"][:, rows.batch, : rows.count].T


def visual_levels_of(forwards: Iterable[RecordedForward]) -> Tensor:
    """[n, L, H] of consecutive forwards; L is 0 for a target without deepstack levels."""
    found = []
    for p in forwards:
        rows, embeds = rows_of(p), p.inputs["inputs_embeds"]
        levels = p.inputs.get("deepstack_embeds", embeds.new_zeros(0, *embeds.shape))
        found.append(levels[:, rows.batch, : rows.count].transpose(0, 1))
    return torch.cat(found)


def outputs_of(
    forwards: Sequence[RecordedForward], outputs: Sequence[Mapping[str, Tensor]], name: str
) -> Tensor:
    """[n, ...]: output or intermediate ``name`` over consecutive forwards."""
    return torch.cat(
        [rows_of(p).cut(found[name]) for p, found in zip(forwards, outputs, strict=True)]
    )


@dataclass(frozen=True)
class Logits:
    """Logits [V] of one row of the sequence or of one tree node."""

    row: int
    values: Tensor


def logits_of(p: RecordedForward, rows: ForwardRows | None = None) -> Iterator[Logits]:
    """Yield the forward's logits by slot of the row; ``rows``: one sequence of several."""
    rows = rows or rows_of(p)
    seen = set()
    for place, token in enumerate(p.inputs["logit_rows"][rows.batch].tolist()):
        if token < rows.count and token not in seen:  # padding repeats a row
            seen.add(token)
            yield Logits(rows.start + token, p.outputs["logits"][rows.batch, place])
