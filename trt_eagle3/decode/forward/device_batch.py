"""DeviceBatch: a padded batch of sequences on the device, and which row each sequence has."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.memory.state import LayerStates
from trt_eagle3.host_copy import to_device

__all__ = [
    "DeviceBatch",
    "BatchRows",
    "spread_tokens",
]


def spread_tokens(shape: tuple[int, ...], num_tokens: int, device: torch.device) -> Tensor:
    """Return token ids spread over a vocabulary of ``num_tokens``, int64 [*shape].

    So work that depends on tokens, such as expert routing, takes a realistic time.
    """
    count = prod(shape)
    ids = torch.arange(count, device=device) * max(1, num_tokens // count)
    return (ids % num_tokens).view(shape)


class BatchRows:
    """The row of each sequence in a forward. A sequence may have ended or restarted since."""

    def __init__(
        self,
        sequences: Sequence[SequenceState],
        num_computed_tokens: Sequence[int],
        rows: Sequence[int],
    ) -> None:
        every = zip(sequences, num_computed_tokens, rows, strict=True)
        self._rows = {id(s): (weakref.ref(s), s.epoch, n, row) for s, n, row in every}

    def rows_of(self, sequences: Sequence[SequenceState]) -> list[int]:
        """Return the row of each sequence that is unchanged since the forward, -1 for any other."""
        return [self._row_of(s) for s in sequences]

    def _row_of(self, sequence: SequenceState) -> int:
        known = self._rows.get(id(sequence))
        if known is None:
            return -1
        held, epoch, num_computed_tokens, row = known
        same = (
            held() is sequence
            and epoch == sequence.epoch
            and num_computed_tokens == sequence.num_computed_tokens
        )
        return row if same else -1


@dataclass(frozen=True)
class DeviceBatch:
    """Row counts and positions of a padded batch, on the device: int32 [B] each.

    Attributes:
        num_computed_tokens: rows of each sequence. positions: rope position of the next row.
        roots: last tokens that the host has.
        rows: row of each sequence in the previous forward, -1 if it had none.
        state_inputs: graph inputs that locate the states.
    """

    num_computed_tokens: Tensor
    positions: Tensor
    roots: Tensor
    rows: Tensor
    state_inputs: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        states: LayerStates,
        sequences: Sequence[SequenceState],
        num_computed_tokens: Sequence[int],
        rows: Sequence[int],
        num_new: Sequence[int],
        size: int,
        device: torch.device,
    ) -> DeviceBatch:
        """Make a batch of ``sequences``, padded to ``size``.

        Each has ``num_computed_tokens`` rows before the forward, which reads or writes ``num_new``
        more. Padding has no rows, and page 0.
        """
        numbers = torch.zeros(4, size, dtype=torch.int32)
        positions = [
            n + s.prompt.rope_delta for s, n in zip(sequences, num_computed_tokens, strict=True)
        ]
        fields = [num_computed_tokens, positions, [s.tokens[-1] for s in sequences], rows]
        numbers[:, : len(sequences)] = torch.tensor(fields, dtype=torch.int32)
        there = to_device(numbers, device)
        num_rows = [n + new for n, new in zip(num_computed_tokens, num_new, strict=True)]
        state_inputs = states.inputs(sequences, num_rows, size)
        return cls(there[0], there[1], there[2], there[3], state_inputs)

    @classmethod
    def dummy(
        cls,
        states: LayerStates,
        size: int,
        table_len: int,
        num_tokens: int,
        device: torch.device,
    ) -> DeviceBatch:
        """Make a batch of padding, which writes to page 0.

        Its last tokens are spread over the vocabulary.
        """
        none = torch.zeros(size, dtype=torch.int32, device=device)
        pages = torch.zeros(size, table_len, dtype=torch.int32, device=device)
        roots = spread_tokens((size,), num_tokens, device).int()
        return cls(none, none, roots, none - 1, states.padding(size, pages))

    def only(self, rows: Tensor) -> DeviceBatch:
        """Keep ``rows`` bool [B], and make all other rows padding. Only paged states remain."""
        pages = self.state_inputs["page_table"] * rows[:, None]
        return replace(
            self,
            num_computed_tokens=self.num_computed_tokens * rows,
            state_inputs={"page_table": pages},
        )

    @property
    def pages(self) -> Mapping[str, Tensor]:
        """The part of ``state_inputs`` for paged states; a draft has no others."""
        return {"page_table": self.state_inputs["page_table"]}

    @property
    def size(self) -> int:
        """Batch rows B, padding included."""
        return len(self.num_computed_tokens)
