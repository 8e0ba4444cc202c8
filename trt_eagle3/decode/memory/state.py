"""LayerStates: what a graph's layers keep of each sequence between forwards.

Paged states have a row per token, in pages that target and draft share. Per-sequence states, those
of recurrent layers, have one entry per sequence, which every token changes. A forward starts from
the committed state. After it verified a tree, ``commit`` selects on the device which new rows stay.
All rows of a prompt stay. Then ``swap_entries`` makes the written entries the current ones.

Shapes: B sequences of a padded batch, D nodes of a path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.decode.memory.kv_cache import BatchTable, KVCache
from trt_eagle3.decode.memory.recurrent import RecurrentStates
from trt_eagle3.decode.memory.sequence import SequenceState, Snapshot
from trt_eagle3.engine.runtime.session import Session
from trt_eagle3.errors import UserError
from trt_eagle3.spec import StateSpec

__all__ = ["LayerStates", "PagedStates", "Prefix", "StateMoves", "layer_states"]


@dataclass(frozen=True)
class Prefix:
    """A cached prefix of a sequence.

    Attributes:
        pages: the full pages that hold its rows.
        snapshot: of the per-sequence states after these rows; None in a model without such states.
    """

    pages: tuple[int, ...] = ()
    snapshot: Snapshot | None = None


@dataclass(frozen=True)
class StateMoves:
    """The changes of one commit, on the device. None: no such change.

    Attributes:
        source, destination: int64 [n] cache slots: rows to copy, all read before any is written.
        entries: int32 [B] entries of per-sequence states to advance.
        path: int32 [B, K] rows of the last forward; numbers after the last are negative.
    """

    source: Tensor | None = None
    destination: Tensor | None = None
    entries: Tensor | None = None
    path: Tensor | None = None


class PagedStates:
    """States with one row per token, in the sequence's pages (``sequence.pages``)."""

    def __init__(
        self, states: Sequence[StateSpec], num_slots: int, device: torch.device | str = "cpu"
    ) -> None:
        self._cache = KVCache(states, num_slots, device)
        self._tables = BatchTable(device)

    def bindings(self) -> Iterator[tuple[str, Tensor]]:
        """Yield graph name and buffer of every state's input and output."""
        return self._cache.bindings()

    def inputs(
        self, sequences: Sequence[SequenceState], num_rows: Sequence[int], size: int | None = None
    ) -> dict[str, Tensor]:
        """Return ``page_table`` int32 [size, P]: the pages of the first ``num_rows`` [B] rows.

        ``size``: B or more, B by default.
        """
        return {"page_table": self._tables.of([s.pages for s in sequences], num_rows, size)}

    def slots(self, page_table: Tensor, rows: Tensor, page_size: int) -> Tensor:
        """Return the cache slots of ``rows``, integers [B, K], in sequence order: int64 [B * K].

        ``page_table``: int32 [B, P], on the same device.
        """
        rows = rows.long()
        pages = page_table.long().gather(1, rows // page_size)
        return (pages * page_size + rows % page_size).flatten()

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy the rows at slots ``source`` int64 [n] to slots ``destination``.

        All rows are read before any is written.
        """
        self._cache.move(source, destination)


class LayerStates:
    """All states of one graph, paged and per-sequence.

    Target and draft share the pages of a sequence. So only the target's ``LayerStates`` reserves,
    restores and releases, for both.
    """

    def __init__(self, paged: PagedStates, per_sequence: RecurrentStates | None = None) -> None:
        self._paged = paged
        self._per_sequence = per_sequence
        self._mirror: Callable[[StateMoves], None] | None = None

    def mirror(self, commit: Callable[[StateMoves], None]) -> None:
        """Call ``commit`` with the moves of every commit, before they are applied here."""
        self._mirror = commit

    @property
    def has_snapshots(self) -> bool:
        """Whether reusing a cached prefix requires a snapshot of the states after it."""
        return self._per_sequence is not None

    def check_tree(self, num_nodes: int) -> None:
        """Assert that a tree of ``num_nodes`` can be committed."""
        if self._per_sequence is not None:
            most = self._per_sequence.max_tree_nodes
            assert num_nodes <= most, f"a tree of {num_nodes} nodes, at most {most} can be replayed"

    def bind(self, session: Session) -> None:
        """Bind the buffers to a session of the graph."""
        for name, buffer in self.bindings():
            session.bind(name, buffer)

    def bindings(self) -> Iterator[tuple[str, Tensor]]:
        """Yield graph name and buffer of every state's input and output; both share a buffer."""
        yield from self._paged.bindings()
        if self._per_sequence is not None:
            yield from self._per_sequence.bindings()

    def inputs(
        self,
        sequences: Sequence[SequenceState],
        num_rows: Sequence[int],
        size: int | None = None,
        certain: Sequence[int] | None = None,
    ) -> dict[str, Tensor]:
        """Return the graph inputs that locate the states of ``sequences`` [B].

        ``num_rows`` [B]: rows of each that the forward reads or writes. ``size``: B or more, B by
        default; rows past B are padding. ``certain`` [B]: leading new rows that stay in any case;
        by default 1, a tree's root.
        """
        found = self._paged.inputs(sequences, num_rows, size)
        return {**found, **self._entries(sequences, certain or [1] * len(sequences), size)}

    def padding(self, size: int, pages: Tensor) -> dict[str, Tensor]:
        """Return ``inputs`` for ``size`` padding rows with the page table ``pages``."""
        return {"page_table": pages, **self._entries([], [], size)}

    def _entries(
        self, sequences: Sequence[SequenceState], certain: Sequence[int], size: int | None
    ) -> Mapping[str, Tensor]:
        if self._per_sequence is None:
            return {}
        return self._per_sequence.inputs(sequences, certain, size)

    def take(self, outputs: Mapping[str, Tensor]) -> None:
        """Keep the outputs of a forward that ``commit`` needs."""
        if self._per_sequence is not None:
            self._per_sequence.take(outputs)

    def lacking(self, sequence: SequenceState, num_rows: int) -> int:
        """Return how many pages must become free before ``sequence`` can have ``num_rows`` rows.

        0 or less: it can have them now.
        """
        return sequence.pages.lacking(num_rows)

    def reserve(self, sequence: SequenceState, num_rows: int) -> None:
        """Reserve memory for ``num_rows`` rows of ``sequence``.

        Raises:
            UserError: there are not enough pages.
        """
        sequence.pages.reserve(num_rows)
        if self._per_sequence is not None:
            self._per_sequence.reserve(sequence)

    def commit(
        self,
        inputs: Mapping[str, Tensor],
        first: Tensor,
        path: Tensor,
        counts: Tensor,
        page_size: int,
        *,
        in_place: bool,
    ) -> None:
        """Keep the accepted rows of the last forward; call ``swap_entries`` afterwards.

        Args:
            inputs: of the last forward.
            first: int32 [B] rows of each sequence before the forward.
            path: int64 [B, D] new rows, ascending; the first ``counts`` int64 [B] stay.
            in_place: the rows of every path are already in front.
        """
        source = destination = entries = rows = None
        if not in_place:
            place = torch.arange(path.shape[1], device=path.device)
            stays, first = place < counts[:, None], first[:, None]
            source, destination = (
                self._paged.slots(inputs["page_table"], first + torch.where(stays, r, 0), page_size)
                for r in (path, place)
            )
        if self._per_sequence is not None:
            entries, rows = self._per_sequence.to_replay(inputs, path, counts)
        moves = StateMoves(source, destination, entries, rows)
        if self._mirror is not None:
            self._mirror(moves)
        self.apply(moves)

    def apply(self, moves: StateMoves) -> None:
        """Change the states as ``moves`` describes, after the forward of ``take``."""
        if moves.source is not None and moves.destination is not None:
            self._paged.move(moves.source, moves.destination)
        if moves.entries is not None and moves.path is not None:
            assert self._per_sequence is not None, "this graph has no per-sequence states"
            self._per_sequence.replay(moves.entries, moves.path)

    def swap_entries(self, sequences: Sequence[SequenceState]) -> None:
        """Make the per-sequence states that the last forward wrote the current ones."""
        if self._per_sequence is not None:
            self._per_sequence.swap_entries(sequences)

    def save(self, sequence: SequenceState) -> Snapshot | None:
        """Copy the per-sequence states; None if there are none, or no room for a copy."""
        return None if self._per_sequence is None else self._per_sequence.save(sequence)

    def restore(self, sequence: SequenceState, prefix: Prefix) -> None:
        """Start ``sequence``, which has no rows yet, with the rows of ``prefix``."""
        sequence.adopt(prefix.pages)
        if not sequence.tokens:
            sequence.num_reused_rows = sequence.num_computed_tokens
        if self._per_sequence is not None and prefix.snapshot is not None:
            self._per_sequence.restore(sequence, prefix.snapshot)

    def release(self, sequence: SequenceState) -> None:
        """Release all rows of ``sequence``.

        Its output tokens stay, so that their rows can be recomputed.
        """
        if self._per_sequence is not None:
            self._per_sequence.release(sequence)
        sequence.reset()


def layer_states(
    states: Sequence[StateSpec],
    num_slots: int,
    device: torch.device | str = "cpu",
    max_sequences: int = 1,
    num_snapshots: int = 0,
) -> LayerStates:
    """Allocate the states of a graph (``Session.states``).

    Args:
        num_slots: rows of the paged states, page 0 included.
        max_sequences: sequences that run at once. num_snapshots: most snapshots of per-sequence
            states.
    Raises:
        UserError: the graph lists no states, or there is not enough memory.
    """
    if not states:
        raise UserError(
            "this bundle's graphs list no layer states: an older version built it. "
            "Rebuild: trt-eagle3 build --config <its config>"
        )
    paged = [state for state in states if state.kind == "paged"]
    others = [state for state in states if state.kind != "paged"]
    recurrent = RecurrentStates(others, max_sequences, num_snapshots, device) if others else None
    return LayerStates(PagedStates(paged, num_slots, device), recurrent)
