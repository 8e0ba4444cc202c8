"""The draft's part of a record: committed rows, and the rows drafted in each cycle.

Shapes: n committed rows, S rows of a forward, Hd draft hidden, Vd draft vocab, k * H aux states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trt_eagle3.parity.record.engine import RecordedForward
from trt_eagle3.parity.record.trace import ForwardRows, logits_of, positions_of, rows_of

__all__ = ["Committed", "Cycle", "Drafted", "read_draft_forwards"]


@dataclass(frozen=True)
class Drafted:
    """One row that the draft ran.

    Attributes:
        embeds: [Hd].
        position: [3].
        features: [Hd], the row's output.
        logits: [Vd], or None if they were not computed.
        parent: row of its cycle; -1 for the last committed row, and ``depth`` is then 1.
        seen: visible rows of the cycle.
    """

    embeds: Tensor
    position: Tensor
    features: Tensor
    logits: Tensor | None
    parent: int = -1
    depth: int = 0
    seen: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Committed(Drafted):
    """A row with the target's features.

    ``aux`` [k * H] is the input of ``fuse``; ``fused`` [Hd] is its output and the draft's input.
    """

    aux: Tensor = field(default_factory=lambda: torch.empty(0))
    fused: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(frozen=True)
class Cycle:
    """The rows drafted after ``num_rows`` committed rows; ``verify``: the forward over the
    tree.
    """

    num_rows: int
    rows: list[Drafted]
    verify: RecordedForward | None = None


@dataclass(frozen=True)
class DraftRecord:
    """All that the draft ran for one answer. ``forwards``: the draft's forwards, in order."""

    committed: dict[int, Committed]
    cycles: list[Cycle]
    forwards: list[RecordedForward]

    @property
    def verified(self) -> bool:
        """Whether a tree was drafted and verified."""
        return any(c.verify is not None and len(c.rows) for c in self.cycles)


def read_draft_forwards(
    forwards: Sequence[RecordedForward], prompt_len: int, mask_aux: Tensor | None = None
) -> DraftRecord:
    """Sort a speculative run into committed rows and cycles.

    A draft forward whose first features are a row of the last ``fuse`` commits rows. Every other
    draft forward drafts a level; one over mask rows drafts all levels of a chain.

    ``mask_aux``: [k * H], the input of ``fuse`` for mask rows; None if the draft has none.
    """
    committed: dict[int, Committed] = {}
    cycles: list[Cycle] = []
    level: list[Drafted] = []
    fused: RecordedForward | None = None
    for p in forwards:
        if p.graph == "fuse":
            fused = p if mask_aux is None or not _is_of(p, mask_aux) else fused
        elif p.graph == "draft":
            rows = rows_of(p)
            place = _place_in(fused, rows.cut(p.inputs["features"])[0])
            if fused is not None and place is not None:
                committed |= _commit(p, rows, fused, place)
            else:
                level += _level(p, rows, len(committed))
        elif p.graph == "target" and rows_of(p).past >= prompt_len:
            cycles.append(Cycle(rows_of(p).past, level, p))
            level = []
    if level:
        cycles.append(Cycle(len(committed), level))
    return DraftRecord(committed, cycles, [p for p in forwards if p.graph == "draft"])


def _is_of(p: RecordedForward, aux: Tensor) -> bool:
    """Return whether all rows of a ``fuse`` are those of ``aux``."""
    given = p.inputs["aux_hidden_states"]
    return bool((given == aux.to(given)).all())


def _place_in(fused: RecordedForward | None, features: Tensor) -> int | None:
    """Return the row of the last ``fuse`` that has these features; None if there is none."""
    if fused is None:
        return None
    same = (fused.outputs["features"] == features).all(dim=-1).nonzero().flatten()
    return int(same[0]) if len(same) else None


def _rows(p: RecordedForward, rows: ForwardRows) -> list[Drafted]:
    logits = {logit.row - rows.start: logit.values for logit in logits_of(p)}
    parts = (
        rows.cut(p.inputs["inputs_embeds"]),
        positions_of(p),
        rows.cut(p.outputs["features_out"]),
    )
    return [
        Drafted(e, place, out, logits.get(i))
        for i, (e, place, out) in enumerate(zip(*parts, strict=True))
    ]


def _commit(
    p: RecordedForward, rows: ForwardRows, fused: RecordedForward, place: int
) -> dict[int, Committed]:
    given = rows.cut(p.inputs["features"])
    aux = fused.inputs["aux_hidden_states"][place : place + rows.count]
    return {
        rows.start + i: Committed(
            r.embeds, r.position, r.features, r.logits, aux=aux[i], fused=given[i]
        )
        for i, r in enumerate(_rows(p, rows))
    }


def _level(p: RecordedForward, rows: ForwardRows, num_rows: int) -> list[Drafted]:
    """Read the rows of a level.

    Their slots begin at ``num_rows``. All of them see the slots below ``past``.
    """
    found = []
    for i, row in enumerate(_rows(p, rows)):
        own = rows.start + i - num_rows
        below = range(max(0, rows.past - num_rows))
        tail = (rows.past - num_rows + j for j, seen in enumerate(rows.mask[i].tolist()) if seen)
        seen = frozenset({*below, *tail} - {own})
        found.append(
            Drafted(
                row.embeds,
                row.position,
                row.features,
                row.logits,
                max(seen, default=-1),
                len(seen) + 1,
                seen,
            )
        )
    return found
