"""CatchUp: a draft is given the rows that were decoded without it.

Of a sequence that decodes plainly the target's aux hidden states are kept (``deferred``); its draft
computes nothing until it is to propose, or as many rows are kept as may be.

Where shapes are captured, the rows of each sequence are padded to a power of two, and so is the
number of sequences; neither exceeds what chunk and batch hold. The first run of a shape loads
kernels and allocates memory, which may take as long as several cycles; those of few sequences
(``CatchUp.shapes``) run before the first request (``capture``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trt_eagle3.decode.forward.batch import padded
from trt_eagle3.decode.forward.segment import Segment
from trt_eagle3.decode.memory.row_ref import gather_padded
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.speculation.drafting import Drafting
from trt_eagle3.engine.buckets import power_of_two
from trt_eagle3.engine.memory import MAX_DEFERRED

__all__ = ["CatchUp"]

_WINDOW = 8  # share of the rows that may be kept, within which all sequences catch up


class CatchUp:
    """Runs the draft over deferred rows."""

    def __init__(
        self,
        drafting: Drafting,
        *,
        max_rows: int,
        max_sequences: int | None,
        fixed_shapes: bool,
    ) -> None:
        """``max_rows``: of a forward, ``max_sequences``: in one, None: any. ``fixed_shapes``: pad
        to shapes that come again.
        """
        self.drafting = drafting
        self._max_rows = max_rows
        self.max_sequences = max_sequences
        self._fixed_shapes = fixed_shapes

    @property
    def max_deferred(self) -> int:
        """Rows of one sequence that may be kept."""
        return min(self._max_rows, MAX_DEFERRED)

    def late(self, sequences: Sequence[SequenceState]) -> Sequence[SequenceState]:
        """Of sequences that decode plainly, those whose draft catches up now: before they lack as
        many rows as may be kept, a few of them in each cycle.
        """
        limit = self.max_deferred
        window = limit // _WINDOW
        late = [s for s in sequences if len(s.deferred) >= limit - window]
        late.sort(key=lambda s: -len(s.deferred))
        count = -(-len(sequences) // window) if window else len(late)
        overdue = sum(len(s.deferred) >= limit for s in late)
        return late[: max(count, overdue)]

    def run(self, sequences: Sequence[SequenceState]) -> None:
        """Give the draft the rows that it lacks of ``sequences``, those that lack about as many at
        once.
        """
        for together, width in self._groups(sequences):
            self._run(together, width)

    def _groups(
        self, sequences: Sequence[SequenceState]
    ) -> Iterator[tuple[list[SequenceState], int]]:
        """Those that run together, the last one repeated as padding, and to how many rows each is
        padded.
        """
        late = sorted((s for s in sequences if s.deferred), key=lambda s: len(s.deferred))
        while late:
            width = self.width(len(late[-1].deferred))
            most = self._most_sequences(width)
            late, together = late[:-most], late[-most:]
            padding = self._num_batch_rows(len(together), most) - len(together)
            yield together + padding * together[-1:], width

    def shapes(self, counts: Sequence[int], most: int) -> list[tuple[int, int]]:
        """Batch rows and width of every forward over up to ``counts`` sequences, each of which
        lacks ``most`` rows at most.
        """
        widths = dict.fromkeys(self.width(n) for n in range(1, most + 1))
        found: dict[tuple[int, int], None] = {}
        for count in counts:
            for width in widths:
                together = min(count, self._most_sequences(width), self.max_sequences or count)
                found[self._num_batch_rows(together, self._most_sequences(width)), width] = None
        return list(found)

    def width(self, num_rows: int) -> int:
        """To how many rows those of a sequence that lacks ``num_rows`` are padded."""
        if not self._fixed_shapes:
            return num_rows
        return max(num_rows, min(power_of_two(num_rows), self._max_rows))

    def _most_sequences(self, width: int) -> int:
        """That run together, each padded to ``width``."""
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
        embeds = self.drafting.proposer.runner.embedding.lookup(padded(ahead, width))
        aux = gather_padded([s.deferred for s in sequences], width)
        segments = [Segment(s, s.draft_length, n) for s, n in zip(sequences, counts, strict=True)]
        self.drafting.extend(segments, embeds, aux)
        for s in sequences:
            s.deferred.clear()
