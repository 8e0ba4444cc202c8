"""RecurrentStates: states of recurrent layers, one entry per sequence.

A forward reads a sequence's entry and writes another one: the state after the rows that stay in
any case (all rows of a prompt, the root of a tree). The device then replays the other accepted rows
on the written entry, which becomes the current one. Per drafted token, only the rows that a replay
needs are kept. The entry that was read is not changed. So a snapshot is a second owner of it, and a
failed forward can be repeated.

Which entry the next forward reads does not depend on the accepted tokens. So the host swaps entries
before it reads these tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.decode.memory.sequence import SequenceState, Snapshot
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.runtime.memory import num_entries
from trt_eagle3.engine.runtime.state_moves import commit_delta, commit_window
from trt_eagle3.errors import UserError
from trt_eagle3.graph.ops.gated_delta import TREE_ROWS
from trt_eagle3.host_copy import to_device
from trt_eagle3.spec import StateKind, StateSpec

__all__ = ["RecurrentStates"]

_NO_TOKEN = 0  # the entry of a sequence without rows; never written
_PADDING = 1  # the entry that padding rows write
_REPLAYED_BYTES = 256 << 20  # bytes of states that are replayed at once

_REPLAYS: Mapping[StateKind, Callable[[Tensor, Tensor, Tensor, Tensor], None]] = {
    "window": commit_window,
    "delta": commit_delta,
}


class _Entries:
    """The free entries, and the owner counts of the others."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, _PADDING, -1))
        self._owners = [1, 1] + [0] * (count - 2)

    def take(self) -> int:
        """Allocate a free entry."""
        entry = self._free.pop()
        self._owners[entry] = 1
        return entry

    def share(self, entry: int) -> int:
        """Add an owner to ``entry``; returns it."""
        self._owners[entry] += 1
        return entry

    def drop(self, entry: int) -> None:
        """Remove an owner from ``entry``; without an owner it becomes free."""
        self._owners[entry] -= 1
        if self._owners[entry] == 0:
            self._free.append(entry)


@dataclass
class _Held:
    """A sequence's entries: the one that a forward reads, and the one that it writes."""

    read: int
    write: int


class _EntrySnapshot:
    """An owner of an entry; implements ``Snapshot``."""

    def __init__(self, states: RecurrentStates, entry: int) -> None:
        self.entry = entry
        self._states: RecurrentStates | None = states

    def release(self) -> None:
        """Release the entry; must be called only once."""
        assert self._states is not None, "released already"
        self._states.forget(self.entry)
        self._states = None


@dataclass(frozen=True)
class _Layers:
    """The states of one kind, shape and type, of all layers.

    Attributes:
        buffer: [layers, E, *shape], with E entries.
    """

    specs: tuple[StateSpec, ...]
    buffer: Tensor

    def bindings(self) -> list[tuple[str, Tensor]]:
        found = []
        for spec, entries in zip(self.specs, self.buffer, strict=True):
            found += [(spec.name, entries), (spec.output_name, entries)]
        return found

    def replay(self, rows: Mapping[str, Tensor], entries: Tensor, path: Tensor) -> None:
        """Advance ``entries`` int32 [B] along ``path`` int32 [B, K].

        ``path``: rows of the forward; numbers after the last are negative.
        """
        size = max(_REPLAYED_BYTES // (self.buffer[0, 0].nbytes * len(entries)), 1)
        for start in range(0, len(self.specs), size):
            some = slice(start, start + size)
            taken = torch.stack([rows[spec.rows_name] for spec in self.specs[some]])
            _REPLAYS[self.specs[0].kind](self.buffer[some], taken, entries, path)


class RecurrentStates:
    """States with one entry per sequence, which every token changes."""

    def __init__(
        self,
        states: Sequence[StateSpec],
        max_sequences: int,
        num_snapshots: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate ``num_entries`` of each of ``states``.

        Raises:
            UserError: not enough memory.
        """
        self._device = torch.device(device)
        self._room = num_snapshots
        count = num_entries(max_sequences, num_snapshots)
        self._entries = _Entries(count)
        self._layers = [_allocated(alike, count, self._device) for alike in _alike(states)]
        self._held: dict[SequenceState, _Held] = {}
        self._rows: Mapping[str, Tensor] = {}

    @property
    def max_tree_nodes(self) -> int:
        """Most nodes of a tree: a forward outputs replay data for that many rows."""
        return TREE_ROWS

    def bindings(self) -> Iterator[tuple[str, Tensor]]:
        """Yield graph name and buffer of every state's input and output."""
        for layers in self._layers:
            yield from layers.bindings()

    def inputs(
        self,
        sequences: Sequence[SequenceState],
        certain: Sequence[int],
        size: int | None = None,
    ) -> dict[str, Tensor]:
        """Return ``state_reads``, ``state_writes`` and ``certain``, int32 [size] each.

        ``certain`` [B]: leading new rows that stay in any case. ``size``: B or more, B by default;
        rows past B are padding.
        """
        held = [self._held[s] for s in sequences]
        padding = (size or len(held)) - len(held)
        numbers = [
            [h.read for h in held] + [_NO_TOKEN] * padding,
            [h.write for h in held] + [_PADDING] * padding,
            [*certain] + [1] * padding,
        ]
        there = to_device(torch.tensor(numbers, dtype=torch.int32), self._device)
        return dict(zip(("state_reads", "state_writes", "certain"), there, strict=True))

    def take(self, outputs: Mapping[str, Tensor]) -> None:
        """Keep the last forward's outputs that ``replay`` needs."""
        self._rows = outputs

    def reserve(self, sequence: SequenceState) -> None:
        """Give ``sequence`` an entry in the state before any token, unless it has one."""
        if sequence not in self._held:
            write = self._entries.take()
            self._held[sequence] = _Held(self._entries.share(_NO_TOKEN), write)

    def release(self, sequence: SequenceState) -> None:
        """Release the entries of ``sequence``, if it has any."""
        held = self._held.pop(sequence, None)
        if held is not None:
            self._entries.drop(held.read)
            self._entries.drop(held.write)

    def to_replay(
        self, inputs: Mapping[str, Tensor], path: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what ``replay`` takes for the forward of ``inputs``.

        That is the written entries int32 [B], and int32 [B, D - 1]: the accepted rows after the
        root, then negative numbers. ``path`` int64 [B, D]: its first ``counts`` int64 [B] nodes are
        accepted.
        """
        place = torch.arange(path.shape[1], device=path.device)
        rows = path.masked_fill(place >= counts[:, None], -1)[:, 1:].int().contiguous()
        return inputs["state_writes"], rows

    def replay(self, entries: Tensor, path: Tensor) -> None:
        """Advance ``entries`` int32 [B], which the last forward wrote, along ``path`` [B, K]."""
        if path.shape[1]:
            for layers in self._layers:
                layers.replay(self._rows, entries, path)

    def swap_entries(self, sequences: Sequence[SequenceState]) -> None:
        """Make the entry that the last forward wrote the one that the next forward reads."""
        for sequence in sequences:
            held = self._held[sequence]
            self._entries.drop(held.read)
            held.read, held.write = held.write, self._entries.take()

    def save(self, sequence: SequenceState) -> Snapshot | None:
        """Share the entry of ``sequence``; None if the limit of snapshots is reached."""
        if self._room == 0:
            return None
        self._room -= 1
        return _EntrySnapshot(self, self._entries.share(self._held[sequence].read))

    def restore(self, sequence: SequenceState, snapshot: Snapshot) -> None:
        """Start ``sequence`` with the state that ``snapshot`` holds."""
        assert isinstance(snapshot, _EntrySnapshot)
        self.reserve(sequence)
        held = self._held[sequence]
        self._entries.drop(held.read)
        held.read = self._entries.share(snapshot.entry)

    def forget(self, entry: int) -> None:
        """Release a snapshot's ownership of ``entry``."""
        self._entries.drop(entry)
        self._room += 1


def _alike(states: Sequence[StateSpec]) -> list[tuple[StateSpec, ...]]:
    """Group states by kind, shape and type."""
    found: dict[tuple[object, ...], list[StateSpec]] = {}
    for state in states:
        found.setdefault((state.kind, state.shape, state.dtype), []).append(state)
    return [tuple(alike) for alike in found.values()]


def _allocated(states: tuple[StateSpec, ...], count: int, device: torch.device) -> _Layers:
    shape = (len(states), count, *states[0].shape)
    dtype = dtype_named(states[0].dtype).torch
    try:
        return _Layers(states, torch.zeros(shape, dtype=dtype, device=device))
    except RuntimeError as error:  # out of memory on the CPU; torch.OutOfMemoryError is one too
        raise UserError(
            f"{states[0].name}: {count} entries of {len(states)} layers need more memory than "
            "there is. Rebuild with a smaller limits.max_batch_size."
        ) from error
