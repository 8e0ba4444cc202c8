"""Segment: rows of a sequence that form one batch row of a forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trt_eagle3.decode.forward.chunks import segment_width
from trt_eagle3.decode.memory.sequence import SequenceState

__all__ = ["Segment", "cut", "last_segments"]


@dataclass(frozen=True)
class Segment:
    """Rows ``[start, start + count)`` of a sequence.

    ``is_last``: it is the sequence's last segment in the forward.
    """

    sequence: SequenceState
    start: int
    count: int
    is_last: bool = True

    @property
    def stop(self) -> int:
        """One past its last row."""
        return self.start + self.count


def cut(
    chunks: Sequence[tuple[SequenceState, int]], max_segments: int | None = None
) -> list[Segment]:
    """Split the next rows of each sequence into segments with little padding."""
    width = segment_width([count for _, count in chunks], max_segments)
    return [
        Segment(s, s.num_computed_tokens + start, min(width, count - start), start + width >= count)
        for s, count in chunks
        for start in range(0, count, width)
    ]


def last_segments(segments: Sequence[Segment]) -> list[int]:
    """Return the index of the last segment of each sequence."""
    return [i for i, segment in enumerate(segments) if segment.is_last]
