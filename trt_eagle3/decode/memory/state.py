"""LayerStates: what a graph's layers keep of each sequence between forwards.

Paged states have a row per token, in pages that target and draft share. Per-sequence states, those
of recurrent layers, have one entry per sequence, which every token changes. A forward starts from
the committed state. After it verified a tree, ``commit`` selects on the device which new rows stay.
All rows of a prompt stay. Then ``swap_entries`` makes the written entries the current ones.

Shapes: B sequences of a padded batch, D nodes of a path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.decode.memory.kv_cache import BatchTable, KVCache
from trt_eagle3.decode.memory.recurrent import RecurrentStates
from trt_eagle3.decode.memory.sequence import SequenceState, Snapshot
from trt_eagle3.engine.runtime.session import Session
from trt_eagle3.errors import UserError
from trt_eagle3.spec import StateSpec

__all__ = ["LayerStates", "PagedStates", "Prefix", "layer_states"]


@dataclass(frozen=True)
class Prefix:
    """A cached prefix of a sequence.

    Attributes:
        pages: the full pages that hold its rows.
        snapshot: of the per-sequence states after these rows; None in a model without such states.
    """

    pages: tuple[int, ...] = ()
    snapshot: Snapshot | None = None


class PagedStates:
    """States with one row per token, in the sequence's pages (``sequence.pages``)."""

    def __init__(
        self, states: Sequence[StateSpec], num_slots: int, device: torch.device | str = "cpu"
    ) -> None:
        self._cache = KVCache(states, num_slots, device)
        self._tables = BatchTable(device)

    def bind(self, session: Session) -> None:
        """Bind the buffers to a session of the graph, as inputs and outputs."""
        for name, buffer in self._cache.bindings():
            session.bind(name, buffer)

    def inputs(
        self, sequences: Sequence[SequenceState], num_rows: Sequence[int], size: int | None = None
    ) -> dict[str, Tensor]:
        """Return ``page_table`` int32 [size, P]: the pages of the first ``num_rows`` [B] rows.

        ``size``: B or more, B by default.
        """
        return {"page_table": self._tables.of([s.pages for s in sequences], num_rows, size)}

    def move(self, page_table: Tensor, source: Tensor, destination: Tensor, page_size: int) -> None:
        """Copy rows ``source`` to rows ``destination`` of the sequences of ``page_table``.

        All rows are read before any is written. ``page_table``: int32 [B, P]. ``source``,
        ``destination``: integers [B, K], on the same device.
        """
        slots = []
        for rows in (source, destination):
            rows = rows.long()
            pages = page_table.long().gather(1, rows // page_size)
            slots.append((pages * page_size + rows % page_size).flatten())
        self._cache.move(*slots)


class LayerStates:
    """All states of one graph, paged and per-sequence.

    Target and draft share the pages of a sequence. So only the target's ``LayerStates`` reserves,
    restores and releases, for both.
    """

    def __init__(self, paged: PagedStates, per_sequence: RecurrentStates | None = None) -> None:
        self._paged = paged
        self._per_sequence = per_sequence

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
        if not in_place:
            place = torch.arange(path.shape[1], device=path.device)
            stays, first = place < counts[:, None], first[:, None]
            source, destination = (first + torch.where(stays, rows, 0) for rows in (path, place))
            self._paged.move(inputs["page_table"], source, destination, page_size)
        if self._per_sequence is not None:
            self._per_sequence.replay(inputs, path, counts)

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
