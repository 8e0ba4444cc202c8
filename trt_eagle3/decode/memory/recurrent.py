"""States of recurrent layers: an entry per sequence, read by a forward and written anew.

A forward reads a sequence's entry and writes another: the state after the rows that stay in any
case (all rows of a prompt, the root of a tree). The device replays what else was accepted on the
written entry, which becomes the sequence's. Nothing is kept per drafted token but the rows that a
replay takes. An entry that was read stays as it was, so a snapshot is a second owner of it, and a
forward that failed can be run again.

Which entry the next forward reads does not depend on what was accepted. So the host swaps the
entries before it knows that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.decode.memory.sequence import SequenceState, Snapshot
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.runtime.memory import num_entries
from trt_eagle3.engine.runtime.session import Session
from trt_eagle3.engine.runtime.state_moves import commit_delta, commit_window
from trt_eagle3.errors import UserError
from trt_eagle3.graph.ops.gated_delta import TREE_ROWS
from trt_eagle3.host_copy import to_device
from trt_eagle3.spec import StateKind, StateSpec

__all__ = ["RecurrentStates"]

_NO_TOKEN = 0  # the entry of a sequence without rows; never written
_PADDING = 1  # the entry that batch rows of padding write
_REPLAYED_BYTES = 256 << 20  # of states that are replayed at once

_REPLAYS: Mapping[StateKind, Callable[[Tensor, Tensor, Tensor, Tensor], None]] = {
    "window": commit_window,
    "delta": commit_delta,
}


class _Entries:
    """Which entries are free, and how many own each of the others."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, _PADDING, -1))
        self._owners = [1, 1] + [0] * (count - 2)

    def take(self) -> int:
        """A free entry."""
        entry = self._free.pop()
        self._owners[entry] = 1
        return entry

    def share(self, entry: int) -> int:
        """``entry``, with one owner more."""
        self._owners[entry] += 1
        return entry

    def drop(self, entry: int) -> None:
        """One owner less."""
        self._owners[entry] -= 1
        if self._owners[entry] == 0:
            self._free.append(entry)


@dataclass
class _Held:
    """A sequence's entries: the one that is read, and the one that a forward writes."""

    read: int
    write: int


class _EntrySnapshot:
    """An owner of an entry; implements ``Snapshot``."""

    def __init__(self, states: RecurrentStates, entry: int) -> None:
        self.entry = entry
        self._states: RecurrentStates | None = states

    def release(self) -> None:
        """Give the entry back, once."""
        assert self._states is not None, "released already"
        self._states.forget(self.entry)
        self._states = None


@dataclass(frozen=True)
class _Layers:
    """The states of one kind and shape, of all layers.

    Attributes:
        buffer: [layers, E, *shape].
    """

    specs: tuple[StateSpec, ...]
    buffer: Tensor

    def bindings(self) -> list[tuple[str, Tensor]]:
        found = []
        for spec, entries in zip(self.specs, self.buffer, strict=True):
            found += [(spec.name, entries), (spec.output_name, entries)]
        return found

    def replay(self, rows: Mapping[str, Tensor], entries: Tensor, path: Tensor) -> None:
        """Bring ``entries`` int32 [B] further along ``path`` int32 [B, K]: rows of the forward,
        negative behind the last.
        """
        size = max(_REPLAYED_BYTES // (self.buffer[0, 0].nbytes * len(entries)), 1)
        for start in range(0, len(self.specs), size):
            some = slice(start, start + size)
            taken = torch.stack([rows[spec.rows_name] for spec in self.specs[some]])
            _REPLAYS[self.specs[0].kind](self.buffer[some], taken, entries, path)


class RecurrentStates:
    """Implements ``decode.memory.state.PerSequenceStates``."""

    def __init__(
        self,
        states: Sequence[StateSpec],
        max_sequences: int,
        num_snapshots: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate ``num_entries`` of each of ``states``.

        Raises:
            UserError: there is not enough memory.
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
        """Nodes of a tree at most: a forward gives what replays as many rows."""
        return TREE_ROWS

    def bind(self, session: Session) -> None:
        """Give the buffers to a session of the graph, as inputs and outputs."""
        for layers in self._layers:
            for name, buffer in layers.bindings():
                session.bind(name, buffer)

    def inputs(
        self,
        sequences: Sequence[SequenceState],
        certain: Sequence[int],
        size: int | None = None,
    ) -> dict[str, Tensor]:
        """``state_reads``, ``state_writes`` and ``certain``, int32 [size] each."""
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
        """Keep what ``replay`` takes of the last forward's outputs."""
        self._rows = outputs

    def reserve(self, sequence: SequenceState) -> None:
        """Give ``sequence`` the entry of no token, unless it has one."""
        if sequence not in self._held:
            write = self._entries.take()
            self._held[sequence] = _Held(self._entries.share(_NO_TOKEN), write)

    def release(self, sequence: SequenceState) -> None:
        """Take the entries of ``sequence`` back, if it has any."""
        held = self._held.pop(sequence, None)
        if held is not None:
            self._entries.drop(held.read)
            self._entries.drop(held.write)

    def replay(self, inputs: Mapping[str, Tensor], path: Tensor, counts: Tensor) -> None:
        """Bring the entries that the forward of ``inputs`` wrote further along the first
        ``counts`` int64 [B] nodes of ``path`` int64 [B, D].
        """
        if path.shape[1] > 1:
            place = torch.arange(path.shape[1], device=path.device)
            moves = path.masked_fill(place >= counts[:, None], -1)[:, 1:].int().contiguous()
            for layers in self._layers:
                layers.replay(self._rows, inputs["state_writes"], moves)

    def swap_entries(self, sequences: Sequence[SequenceState]) -> None:
        """Let the entry that the last forward wrote be the one that the next reads."""
        for sequence in sequences:
            held = self._held[sequence]
            self._entries.drop(held.read)
            held.read, held.write = held.write, self._entries.take()

    def save(self, sequence: SequenceState) -> Snapshot | None:
        """Share the entry of ``sequence``; None where as many snapshots are kept as may be."""
        if self._room == 0:
            return None
        self._room -= 1
        return _EntrySnapshot(self, self._entries.share(self._held[sequence].read))

    def restore(self, sequence: SequenceState, snapshot: Snapshot) -> None:
        """Let ``sequence`` begin with the state that ``snapshot`` holds."""
        assert isinstance(snapshot, _EntrySnapshot)
        self.reserve(sequence)
        held = self._held[sequence]
        self._entries.drop(held.read)
        held.read = self._entries.share(snapshot.entry)

    def forget(self, entry: int) -> None:
        """A snapshot of ``entry`` was released."""
        self._entries.drop(entry)
        self._room += 1


def _alike(states: Sequence[StateSpec]) -> list[tuple[StateSpec, ...]]:
    """Those of one kind, shape and type."""
    found: dict[tuple[object, ...], list[StateSpec]] = {}
    for state in states:
        found.setdefault((state.kind, state.shape, state.dtype), []).append(state)
    return [tuple(alike) for alike in found.values()]


def _allocated(states: tuple[StateSpec, ...], count: int, device: torch.device) -> _Layers:
    shape = (len(states), count, *states[0].shape)
    dtype = dtype_named(states[0].dtype).torch
    try:
        return _Layers(states, torch.zeros(shape, dtype=dtype, device=device))
    except RuntimeError as error:  # a CPU's, and torch.OutOfMemoryError is one too
        raise UserError(
            f"{states[0].name}: {count} entries of {len(states)} layers need more memory than "
            "there is. Rebuild with a smaller limits.max_batch_size."
        ) from error
