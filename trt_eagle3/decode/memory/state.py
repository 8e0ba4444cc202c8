"""The states of a graph's layers: what they keep of each sequence between forwards.

Paged states have a row per token, in pages that target and draft share. Per-sequence states have
one entry per sequence, which every token changes: those of recurrent layers. A forward starts from
what was committed before it. Where it verifies a tree, ``commit`` says on the device which of its
new rows stay; of a prompt all stay. ``swap_entries`` then makes the written entries the sequences'.

Shapes: B sequences of a padded batch, D nodes of a path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trt_eagle3.decode.memory.kv_cache import BatchTable, KVCache
from trt_eagle3.decode.memory.recurrent import RecurrentStates
from trt_eagle3.decode.memory.sequence import SequenceState, Snapshot
from trt_eagle3.engine.runtime.session import Session
from trt_eagle3.errors import UserError
from trt_eagle3.spec import StateSpec

__all__ = ["LayerStates", "PagedStates", "PerSequenceStates", "Prefix", "layer_states"]


@dataclass(frozen=True)
class Prefix:
    """A known beginning of a sequence.

    Attributes:
        pages: that hold its rows, all of them full.
        snapshot: of the per-sequence states after these rows; None in a model without such states.
    """

    pages: tuple[int, ...] = ()
    snapshot: Snapshot | None = None


class PagedStates:
    """States with one row per token, in the pages of the sequence (``sequence.pages``)."""

    def __init__(
        self, states: Sequence[StateSpec], num_slots: int, device: torch.device | str = "cpu"
    ) -> None:
        self._cache = KVCache(states, num_slots, device)
        self._tables = BatchTable(device)

    def bind(self, session: Session) -> None:
        """Give the buffers to a session of the graph, as inputs and outputs."""
        for name, buffer in self._cache.bindings():
            session.bind(name, buffer)

    def inputs(
        self, sequences: Sequence[SequenceState], num_rows: Sequence[int], size: int | None = None
    ) -> dict[str, Tensor]:
        """``page_table`` int32 [size, P]: the pages of the first ``num_rows`` [B] rows.

        ``size``: B or more, B by default.
        """
        return {"page_table": self._tables.of([s.pages for s in sequences], num_rows, size)}

    def move(self, page_table: Tensor, source: Tensor, destination: Tensor, page_size: int) -> None:
        """Copy rows ``source`` of the sequences of ``page_table`` int32 [B, P] to ``destination``
        (integers [B, K], on its device), as if at once.
        """
        slots = []
        for rows in (source, destination):
            rows = rows.long()
            pages = page_table.long().gather(1, rows // page_size)
            slots.append((pages * page_size + rows % page_size).flatten())
        self._cache.move(*slots)


class PerSequenceStates(Protocol):
    """States with one entry per sequence, which every token changes.

    A forward leaves the entry that it reads as it was, writes another one, and gives what each row
    adds, to replay those that stay.
    """

    @property
    def max_tree_nodes(self) -> int:
        """Nodes of a tree that can be replayed, at most."""
        ...

    def bind(self, session: Session) -> None:
        """Give the buffers to a session of the graph, as inputs and outputs."""
        ...

    def inputs(
        self,
        sequences: Sequence[SequenceState],
        certain: Sequence[int],
        size: int | None = None,
    ) -> Mapping[str, Tensor]:
        """The graph's inputs that say which entry each batch row of the next forward has.

        ``certain`` [B]: first new rows of each that stay whatever the forward says. ``size``: B or
        more, B by default; those past B are padding.
        """
        ...

    def take(self, outputs: Mapping[str, Tensor]) -> None:
        """Keep what ``replay`` takes of a forward's outputs."""
        ...

    def reserve(self, sequence: SequenceState) -> None:
        """Give ``sequence`` an entry, that of no token, unless it has one."""
        ...

    def release(self, sequence: SequenceState) -> None:
        """Take the entry of ``sequence`` back, if it has one."""
        ...

    def replay(self, inputs: Mapping[str, Tensor], path: Tensor, counts: Tensor) -> None:
        """Bring the entries that the last forward wrote along the first ``counts`` int64 [B] nodes
        of ``path`` int64 [B, D]. ``inputs``: of that forward.
        """
        ...

    def swap_entries(self, sequences: Sequence[SequenceState]) -> None:
        """Let the entry that the last forward wrote be the one that the next reads."""
        ...

    def save(self, sequence: SequenceState) -> Snapshot | None:
        """Copy the entry of ``sequence``; None where there is no room for one more copy."""
        ...

    def restore(self, sequence: SequenceState, snapshot: Snapshot) -> None:
        """Give ``sequence`` an entry with the content of ``snapshot``, which stays as it is."""
        ...


class LayerStates:
    """All states of one graph, of both kinds.

    Target and draft share the pages of a sequence, so one of their ``LayerStates``, the target's,
    reserves, restores and releases for both.
    """

    def __init__(self, paged: PagedStates, per_sequence: PerSequenceStates | None = None) -> None:
        self._paged = paged
        self._per_sequence = per_sequence

    @property
    def has_snapshots(self) -> bool:
        """Whether a known beginning can be reused only where the states after it were saved."""
        return self._per_sequence is not None

    def check_tree(self, num_nodes: int) -> None:
        """Assert that a tree of ``num_nodes`` can be committed."""
        if self._per_sequence is not None:
            most = self._per_sequence.max_tree_nodes
            assert num_nodes <= most, f"a tree of {num_nodes} nodes, at most {most} can be replayed"

    def bind(self, session: Session) -> None:
        """Give the buffers to a session of the graph."""
        self._paged.bind(session)
        if self._per_sequence is not None:
            self._per_sequence.bind(session)

    def inputs(
        self,
        sequences: Sequence[SequenceState],
        num_rows: Sequence[int],
        size: int | None = None,
        certain: Sequence[int] | None = None,
    ) -> dict[str, Tensor]:
        """The graph's inputs that say where the states of ``sequences`` [B] lie.

        ``num_rows`` [B]: rows of each that the forward reads or writes. ``size``: B or more, B by
        default; those past B are padding. ``certain`` [B]: first new rows of each that stay
        whatever the forward says; a tree's root by default.
        """
        found = self._paged.inputs(sequences, num_rows, size)
        return {**found, **self._entries(sequences, certain or [1] * len(sequences), size)}

    def padding(self, size: int, pages: Tensor) -> dict[str, Tensor]:
        """``inputs`` of ``size`` batch rows of padding, with the page table ``pages``."""
        return {"page_table": pages, **self._entries([], [], size)}

    def _entries(
        self, sequences: Sequence[SequenceState], certain: Sequence[int], size: int | None
    ) -> Mapping[str, Tensor]:
        if self._per_sequence is None:
            return {}
        return self._per_sequence.inputs(sequences, certain, size)

    def take(self, outputs: Mapping[str, Tensor]) -> None:
        """Keep what ``commit`` takes of a forward's outputs."""
        if self._per_sequence is not None:
            self._per_sequence.take(outputs)

    def lacking(self, sequence: SequenceState, num_rows: int) -> int:
        """Pages that must become free before ``sequence`` can have ``num_rows`` rows; 0 or less
        where it can.
        """
        return sequence.pages.lacking(num_rows)

    def reserve(self, sequence: SequenceState, num_rows: int) -> None:
        """Give ``sequence`` room for ``num_rows`` rows.

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
        """Keep the accepted rows of the last forward, which had ``inputs``; ``swap_entries``
        follows.

        Args:
            first: int32 [B] rows of each sequence before the forward.
            path: int64 [B, D] new rows, ascending, of which the first ``counts`` int64 [B] stay.
            in_place: the rows of every path stand at the front already.
        """
        if not in_place:
            place = torch.arange(path.shape[1], device=path.device)
            stays, first = place < counts[:, None], first[:, None]
            source, destination = (first + torch.where(stays, rows, 0) for rows in (path, place))
            self._paged.move(inputs["page_table"], source, destination, page_size)
        if self._per_sequence is not None:
            self._per_sequence.replay(inputs, path, counts)

    def swap_entries(self, sequences: Sequence[SequenceState]) -> None:
        """Let what the last forward of ``sequences`` led to be their per-sequence states."""
        if self._per_sequence is not None:
            self._per_sequence.swap_entries(sequences)

    def save(self, sequence: SequenceState) -> Snapshot | None:
        """Copy the per-sequence states; None where there are none, or no room for a copy."""
        return None if self._per_sequence is None else self._per_sequence.save(sequence)

    def restore(self, sequence: SequenceState, prefix: Prefix) -> None:
        """Let ``sequence``, which has no rows yet, begin with those of ``prefix``."""
        sequence.adopt(prefix.pages)
        if not sequence.tokens:
            sequence.num_reused_rows = sequence.length
        if self._per_sequence is not None and prefix.snapshot is not None:
            self._per_sequence.restore(sequence, prefix.snapshot)

    def release(self, sequence: SequenceState) -> None:
        """Forget all rows of ``sequence``; its output tokens stay, so that they can be computed
        again.
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
        num_slots: rows of the paged ones, page 0 included.
        max_sequences: that run at once. num_snapshots: of per-sequence states, kept at most.
    Raises:
        UserError: a graph that lists no states; not enough memory.
    """
    if not states:
        raise UserError(
            "this bundle's graphs list no states of their layers: an older version built it. "
            "Rebuild: trt-eagle3 build --config <its config>"
        )
    paged = [state for state in states if state.kind == "paged"]
    others = [state for state in states if state.kind != "paged"]
    recurrent = RecurrentStates(others, max_sequences, num_snapshots, device) if others else None
    return LayerStates(PagedStates(paged, num_slots, device), recurrent)
