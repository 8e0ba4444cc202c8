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
    """int64 [*shape]: token ids from all over a vocabulary of ``num_tokens``, so that what depends
    on tokens (a mixture of experts reads those that a row is routed to) takes its usual time.
    """
    count = prod(shape)
    ids = torch.arange(count, device=device) * max(1, num_tokens // count)
    return (ids % num_tokens).view(shape)


class BatchRows:
    """The row that each sequence has in a forward; it may have ended since, or begun again."""

    def __init__(
        self, sequences: Sequence[SequenceState], lengths: Sequence[int], rows: Sequence[int]
    ) -> None:
        every = zip(sequences, lengths, rows, strict=True)
        self._rows = {id(s): (weakref.ref(s), s.epoch, n, row) for s, n, row in every}

    def rows_of(self, sequences: Sequence[SequenceState]) -> list[int]:
        """The row of each sequence that is as it was in the forward, -1 of any other."""
        return [self._row_of(s) for s in sequences]

    def _row_of(self, sequence: SequenceState) -> int:
        known = self._rows.get(id(sequence))
        if known is None:
            return -1
        held, epoch, length, row = known
        same = held() is sequence and epoch == sequence.epoch and length == sequence.length
        return row if same else -1


@dataclass(frozen=True)
class DeviceBatch:
    """Where the next rows of a padded batch stand, on the device: int32 [B] each.

    Attributes:
        lengths: rows of each sequence. positions: rope position of the next one.
        roots: last tokens, as far as the host knows.
        rows: row of each sequence in the forward before, -1 where it had none.
        state_inputs: where the states lie.
    """

    lengths: Tensor
    positions: Tensor
    roots: Tensor
    rows: Tensor
    state_inputs: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        states: LayerStates,
        sequences: Sequence[SequenceState],
        lengths: Sequence[int],
        rows: Sequence[int],
        num_new: Sequence[int],
        size: int,
        device: torch.device,
    ) -> DeviceBatch:
        """Sequences that have ``lengths`` rows before this forward, which reads or writes
        ``num_new`` more of each, padded to ``size``.

        Padding has no rows, and page 0.
        """
        numbers = torch.zeros(4, size, dtype=torch.int32)
        positions = [n + s.prompt.rope_delta for s, n in zip(sequences, lengths, strict=True)]
        fields = [lengths, positions, [s.tokens[-1] for s in sequences], rows]
        numbers[:, : len(sequences)] = torch.tensor(fields, dtype=torch.int32)
        there = to_device(numbers, device)
        num_rows = [n + new for n, new in zip(lengths, num_new, strict=True)]
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
        """Padding alone, which writes to page 0; its last tokens are spread over the
        vocabulary.
        """
        none = torch.zeros(size, dtype=torch.int32, device=device)
        pages = torch.zeros(size, table_len, dtype=torch.int32, device=device)
        roots = spread_tokens((size,), num_tokens, device).int()
        return cls(none, none, roots, none - 1, states.padding(size, pages))

    def only(self, rows: Tensor) -> DeviceBatch:
        """The same with padding in place of all but ``rows`` bool [B]; paged states alone."""
        pages = self.state_inputs["page_table"] * rows[:, None]
        return replace(self, lengths=self.lengths * rows, state_inputs={"page_table": pages})

    @property
    def pages(self) -> Mapping[str, Tensor]:
        """Of ``state_inputs`` what says where paged states lie: a draft has no others."""
        return {"page_table": self.state_inputs["page_table"]}

    @property
    def size(self) -> int:
        """B."""
        return len(self.lengths)
