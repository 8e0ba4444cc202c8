"""DraftBackfill: rows that were decoded without the draft, and are given to it later.

Of a sequence that decodes without a tree, the target's aux hidden states are kept (``deferred``).
The draft computes nothing until it is to propose, or until as many rows are kept as may be.

Where shapes are captured, the rows of each sequence are padded to a power of two, and so is the
number of sequences; neither exceeds what chunk and batch hold. The first run of a shape loads
kernels and allocates memory, which may take as long as several steps; shapes of few sequences
(``DraftBackfill.shapes``) run before the first request (``warm_up``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from trt_eagle3.decode.forward.batch import padded
from trt_eagle3.decode.forward.segment import Segment
from trt_eagle3.decode.memory.row_ref import RowRef, gather_padded
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.engine.runtime.buckets import power_of_two
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.engine.runtime.memory import MAX_DEFERRED

__all__ = ["Commit", "DraftBackfill"]

_WINDOW = 8  # share of the rows that may be kept, within which all sequences are backfilled

Commit = Callable[[Sequence[Segment], Tensor, Tensor], None]
"""Gives the draft the rows of segments: ``embeds`` [B, S, Hd] of the tokens ahead, and ``aux``
[B, S, k * H]."""


class DraftBackfill:
    """Keeps deferred rows, and runs the draft over them."""

    def __init__(
        self,
        embedding: EmbeddingTable,
        aux_width: int,
        commit: Commit,
        *,
        max_rows: int,
        max_sequences: int | None,
        fixed_shapes: bool,
    ) -> None:
        """``embedding``: the draft's. ``aux_width``: k * H. ``max_rows``: of a forward.
        ``max_sequences``: in one; None: any. ``fixed_shapes``: pad to shapes that come again.
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
                s.deferred.append(RowRef(aux, row))

    def defer_zeros(self, sequences: Sequence[SequenceState], num_rows: int) -> None:
        """Let each of ``sequences`` lack ``num_rows`` rows of zeros, as steps leave them: a step's
        rows of all sequences lie in one tensor.
        """
        shape = num_rows, len(sequences), self._aux_width
        steps = torch.zeros(shape, dtype=self._embedding.dtype, device=self._embedding.device)
        for i, s in enumerate(sequences):
            s.deferred = [RowRef(rows, i) for rows in steps.unbind()]

    def due(self, sequences: Sequence[SequenceState]) -> Sequence[SequenceState]:
        """Those of ``sequences``, which decode without a tree, to backfill now: before they lack
        as many rows as may be kept, a few of them in each step.
        """
        limit = self.max_deferred
        window = limit // _WINDOW
        due = [s for s in sequences if len(s.deferred) >= limit - window]
        due.sort(key=lambda s: -len(s.deferred))
        count = -(-len(sequences) // window) if window else len(due)
        overdue = sum(len(s.deferred) >= limit for s in due)
        return due[: max(count, overdue)]

    def run(self, sequences: Sequence[SequenceState]) -> int:
        """Give the draft the rows that it lacks of ``sequences``, in forwards of those that lack
        about as many. Returns the number of rows.
        """
        num_rows = sum(len(s.deferred) for s in sequences)
        for alike, width in self._groups(sequences):
            self._run(alike, width)
        return num_rows

    def _groups(
        self, sequences: Sequence[SequenceState]
    ) -> Iterator[tuple[list[SequenceState], int]]:
        """Sequences of one forward, the last one repeated as padding, and to how many rows each is
        padded.
        """
        left = sorted((s for s in sequences if s.deferred), key=lambda s: len(s.deferred))
        while left:
            width = self.width(len(left[-1].deferred))
            most = self._most_sequences(width)
            left, alike = left[:-most], left[-most:]
            padding = self._num_batch_rows(len(alike), most) - len(alike)
            yield alike + padding * alike[-1:], width

    def shapes(self, counts: Sequence[int], most: int) -> list[tuple[int, int]]:
        """Batch rows and width of every forward over up to ``counts`` sequences, each of which
        lacks ``most`` rows at most.
        """
        widths = dict.fromkeys(self.width(n) for n in range(1, most + 1))
        found: dict[tuple[int, int], None] = {}
        for count in counts:
            for width in widths:
                alike = min(count, self._most_sequences(width), self.max_sequences or count)
                found[self._num_batch_rows(alike, self._most_sequences(width)), width] = None
        return list(found)

    def width(self, num_rows: int) -> int:
        """To how many rows those of a sequence that lacks ``num_rows`` are padded."""
        if not self._fixed_shapes:
            return num_rows
        return max(num_rows, min(power_of_two(num_rows), self._max_rows))

    def _most_sequences(self, width: int) -> int:
        """Sequences of one forward at most, each padded to ``width``."""
        most = max(self._max_rows // width, 1)
        return 1 << (most.bit_length() - 1) if self._fixed_shapes else most  # a power of two

    def _num_batch_rows(self, count: int, most: int) -> int:
        """Of a forward over ``count`` of at most ``most`` sequences; those beyond repeat the last
        one, and write the same as it.
        """
        if not self._fixed_shapes:
            return count
        return min(power_of_two(count), most, max(self.max_sequences or most, count))

    def _run(self, sequences: Sequence[SequenceState], width: int) -> None:
        """The rows of ``sequences``, those of each padded to ``width``."""
        counts = [len(s.deferred) for s in sequences]
        ahead = [s.ids(s.draft_length + 1, s.length + 1) for s in sequences]
        embeds = self._embedding.lookup(padded(ahead, width))
        aux = gather_padded([s.deferred for s in sequences], width)
        segments = [Segment(s, s.draft_length, n) for s, n in zip(sequences, counts, strict=True)]
        self._commit(segments, embeds, aux)
        for s in sequences:
            s.deferred.clear()
