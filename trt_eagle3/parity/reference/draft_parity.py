"""DraftParity: compare the draft of an engine with its reference, by kind of drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from trt_eagle3.parity.record.record import Record
from trt_eagle3.parity.reference.compared_draft import ComparedDraft
from trt_eagle3.parity.reference.drafting import Acceptance, DraftReference
from trt_eagle3.parity.reference.expected import ExpectedAnswer

__all__ = ["DraftParity", "Errors", "Rounding"]

Errors = Iterator[tuple[str, Tensor]]
"""Name of a tensor, and the errors of its rows."""


Rounding = Callable[[Record, ExpectedAnswer], Mapping[str, Tensor]]
"""Returns errors float64 [n] of an answer's draft rows, by tensor."""


class DraftParity(Protocol):
    """What differs between kinds of drafts in a validation."""

    @property
    def reference(self) -> DraftReference:
        """The draft of the checkpoint."""
        ...

    def compare(
        self, record: Record, expected: Sequence[ExpectedAnswer], progress: Callable[[], object]
    ) -> tuple[list[ComparedDraft], Acceptance]:
        """Compare every answer's draft rows, and count accepted proposals by position."""
        ...

    def inside(self, record: Record, e: ExpectedAnswer) -> Errors:
        """Yield errors of the tensors inside the draft's graph, from the engine's own inputs."""
        ...

    def accepted(self, e: ExpectedAnswer, steps: int) -> Tensor:
        """int64 [T]: number of drafted tokens that equal the target's best, from each row.

        A chain of ``steps`` tokens begins at each row t that predicts a token of the answer but the
        last: it is drafted after token t + 1. It is followed as far as the answer has the target's
        best tokens.
        """
        ...

    @property
    def rounding(self) -> Rounding | None:
        """Measures what PyTorch loses in the engine's dtype; None: no error is excused."""
        ...
