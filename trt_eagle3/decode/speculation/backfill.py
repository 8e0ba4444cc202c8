"""DraftBackfill: run the draft later over rows that were decoded without it.

While a sequence decodes without a tree, the target's aux hidden states are kept (``deferred``).
The draft runs over them before it proposes, or when the limit of kept rows is near.

If shapes are captured, rows per sequence and number of sequences are padded to powers of two.
Chunk size and batch size bound both. The first run of a shape loads kernels
and allocates memory. It may take as long as several steps. So shapes of few sequences
(``DraftBackfill.shapes``) run before the first request (``warm_up``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Required, TypedDict

import torch
from torch import Tensor

from trt_eagle3.decode.forward.segment import Segment
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.memory.tensor_row import TensorRow, gather_padded
from trt_eagle3.engine.runtime.buckets import power_of_two
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.engine.runtime.memory import MAX_DEFERRED

__all__ = ["BackfillShapes", "Commit", "DraftBackfill"]

_WINDOW = 8  # the last 1 / 8 of the row limit, over which the backfills are spread

Commit = Callable[[Sequence[Segment], Tensor], None]
"""Runs the draft over rows of segments: ``aux`` [B, S, k * H]."""


class BackfillShapes(TypedDict, total=False):
    """Bounds of the forwards of ``DraftBackfill``, whose defaults are None and False.

    Attributes:
        max_rows: most rows of a forward. max_sequences: most sequences of a forward; None: any
            number. fixed_shapes: pad to recurring shapes.
    """

    max_rows: Required[int]
    max_sequences: int | None
    fixed_shapes: bool


class DraftBackfill:
    """Keeps deferred rows, and runs the draft over them."""

    def __init__(
        self,
        embedding: EmbeddingTable,
        aux_width: int,
        commit: Commit,
        *,
        max_rows: int,
        max_sequences: int | None = None,
        fixed_shapes: bool = False,
    ) -> None:
        """Create an empty store.

        ``embedding``: the draft's; rows have its type. ``aux_width``: k * H. ``commit``: runs the
        draft. Keyword arguments: ``BackfillShapes``.
        """
        self._embedding = embedding
        self._aux_width = aux_width
        self._commit = commit
        self._max_rows = max_rows
        self.max_sequences = max_sequences
        self._fixed_shapes = fixed_shapes

    @property
    def max_deferred(self) -> int:
        """Rows of one sequence that may be kept."""
        return min(self._max_rows, MAX_DEFERRED)

    def defer(self, sequences: Sequence[SequenceState], rows: Sequence[int], aux: Tensor) -> None:
        """Keep one row of each sequence that has a draft: ``aux`` [B, k * H] at ``rows``."""
        for s, row in zip(sequences, rows, strict=True):
            if s.draft:
                s.deferred.append(TensorRow(aux, row))

    def defer_zeros(self, sequences: Sequence[SequenceState], num_rows: int) -> None:
        """Defer ``num_rows`` rows of zeros for each of ``sequences``.

        As in real steps, one tensor holds a step's rows of all sequences.
        """
        shape = num_rows, len(sequences), self._aux_width
        steps = torch.zeros(shape, dtype=self._embedding.dtype, device=self._embedding.device)
        for i, s in enumerate(sequences):
            s.deferred = [TensorRow(rows, i) for rows in steps.unbind()]

    def due(self, sequences: Sequence[SequenceState]) -> Sequence[SequenceState]:
        """Return the sequences that are due for backfill in this step.

        ``sequences``: decode without a tree. A few are due in each step, before they reach the
        limit of kept rows.
        """
        limit = self.max_deferred
        window = limit // _WINDOW
        due = [s for s in sequences if len(s.deferred) >= limit - window]
        due.sort(key=lambda s: -len(s.deferred))
        count = -(-len(sequences) // window) if window else len(due)
        overdue = sum(len(s.deferred) >= limit for s in due)
        return due[: max(count, overdue)]

    def run(self, sequences: Sequence[SequenceState]) -> int:
        """Run the draft over the deferred rows of ``sequences``; returns the number of rows.

        Sequences with similar numbers of rows share a forward.
        """
        num_rows = sum(len(s.deferred) for s in sequences)
        for alike, width in self._groups(sequences):
            self._run(alike, width)
        return num_rows

    def _groups(
        self, sequences: Sequence[SequenceState]
    ) -> Iterator[tuple[list[SequenceState], int]]:
        """Yield the sequences of each forward, and the row count that each is padded to.

        The last sequence is repeated as padding.
        """
        left = sorted((s for s in sequences if s.deferred), key=lambda s: len(s.deferred))
        while left:
            width = self.width(len(left[-1].deferred))
            most = self._most_sequences(width)
            left, alike = left[:-most], left[-most:]
            padding = self._num_batch_rows(len(alike), most) - len(alike)
            yield alike + padding * alike[-1:], width

    def shapes(self, counts: Sequence[int], most: int) -> list[tuple[int, int]]:
        """Return batch rows and width of every forward over up to ``counts`` sequences.

        Each sequence has at most ``most`` deferred rows.
        """
        widths = dict.fromkeys(self.width(n) for n in range(1, most + 1))
        found: dict[tuple[int, int], None] = {}
        for count in counts:
            for width in widths:
                alike = min(count, self._most_sequences(width), self.max_sequences or count)
                found[self._num_batch_rows(alike, self._most_sequences(width)), width] = None
        return list(found)

    def width(self, num_rows: int) -> int:
        """Return the row count that ``num_rows`` deferred rows are padded to."""
        if not self._fixed_shapes:
            return num_rows
        return max(num_rows, min(power_of_two(num_rows), self._max_rows))

    def _most_sequences(self, width: int) -> int:
        """Return the most sequences of one forward, each padded to ``width``."""
        most = max(self._max_rows // width, 1)
        return 1 << (most.bit_length() - 1) if self._fixed_shapes else most  # a power of two

    def _num_batch_rows(self, count: int, most: int) -> int:
        """Return the batch rows of a forward over ``count`` of at most ``most`` sequences.

        Padding rows repeat the last sequence, and write the same values.
        """
        if not self._fixed_shapes:
            return count
        return min(power_of_two(count), most, max(self.max_sequences or most, count))

    def _run(self, sequences: Sequence[SequenceState], width: int) -> None:
        """Run one forward over ``sequences``, their rows padded to ``width``."""
        aux = gather_padded([s.deferred for s in sequences], width)
        self._commit(
            [Segment(s, s.num_draft_computed_tokens, len(s.deferred)) for s in sequences], aux
        )
        for s in sequences:
            s.deferred.clear()
