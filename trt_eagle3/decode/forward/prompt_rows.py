"""PromptRows: the rows of a prefill, for target and draft.

A draft's row t has token t + 1, and may have its position. So each segment includes one extra row.

Shapes: B segments, S rows of each in one forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.decode.forward.batch import of_width, padded, segment_positions
from trt_eagle3.decode.forward.segment import Segment
from trt_eagle3.decode.memory.tensor_row import rows_of
from trt_eagle3.host_copy import to_device

__all__ = ["PromptRows"]


@dataclass(frozen=True)
class PromptRows:
    """Segments stacked to one width, with arbitrary padding.

    Attributes:
        ids: int64 [B, S + 1], on the device: tokens, 0 if not known yet.
        positions: int32 [3, B, S + 1], on the host: rope positions.
    """

    segments: Sequence[Segment]
    ids: Tensor
    positions: Tensor

    @classmethod
    def of(cls, segments: Sequence[Segment], width: int, device: torch.device) -> PromptRows:
        """Make the rows of ``segments``. ``width``: S."""
        ids = padded([s.sequence.ids(s.start, s.stop + 1) for s in segments], width + 1)
        return cls(segments, to_device(ids, device), segment_positions(segments, width))

    def only(self, rows: Sequence[int], width: int) -> PromptRows:
        """Return the segments at ``rows``, with ``width`` rows each."""
        return PromptRows(
            [self.segments[i] for i in rows],
            of_width(rows_of(self.ids, rows), width + 1, dim=1),
            of_width(rows_of(self.positions, rows, dim=1), width + 1, dim=2),
        )
