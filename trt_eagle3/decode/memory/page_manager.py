"""PageManager: pages and per-sequence states of sequences, and of the prefix cache.

A reservation evicts cached prefixes if needed, the least recently used first. A step that is
launched ahead of the host evicts nothing. So ``free_ahead`` frees the pages that it may need. On a
server the prefix cache normally fills all pages. Without ``free_ahead``, every step would then wait
for the host.
"""

from __future__ import annotations

from collections.abc import Sequence

from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.prefix_cache import PrefixCache, may_begin
from trt_eagle3.decode.memory.sequence import SequenceState, Snapshot
from trt_eagle3.decode.memory.state import LayerStates

__all__ = ["PageManager"]


class PageManager:
    """Allocates and releases memory of sequences. Not thread-safe: only the scheduler uses it."""

    def __init__(self, states: LayerStates, prefixes: PrefixCache | None) -> None:
        """Create a manager. ``prefixes``: None: pages of ended sequences are not kept."""
        self._states = states
        self._prefixes = prefixes

    def may_begin(self, sequence: SequenceState, running: Sequence[SequenceState]) -> bool:
        """Return whether ``sequence`` may start now (``prefix_cache.may_begin``)."""
        with_snapshot = self._states.has_snapshots
        return may_begin(sequence, running, self._prefixes, with_snapshot=with_snapshot)

    def begin(self, sequence: SequenceState, num_rows: int) -> bool:
        """Give ``sequence`` its cached prefix, and pages for ``num_rows`` rows.

        If pages are lacking, it gets nothing; returns False.
        """
        if self._prefixes is not None:
            prefix = self._prefixes.find(sequence, with_snapshot=self._states.has_snapshots)
            self._states.restore(sequence, prefix)
        if self.reserve(sequence, num_rows):
            return True
        self.release(sequence)
        return False

    def reserve(self, sequence: SequenceState, num_rows: int) -> bool:
        """Reserve pages for ``num_rows`` rows of ``sequence``, and evict cached prefixes if needed.

        Returns False if that is not enough.
        """
        lacking = self._states.lacking(sequence, num_rows)
        if lacking > 0 and self._prefixes is not None:
            self._prefixes.evict(lacking)
            lacking = self._states.lacking(sequence, num_rows)
        if lacking > 0:
            return False
        self._states.reserve(sequence, num_rows)
        return True

    def free_ahead(self, pool: PagePool, num_sequences: int, num_rows: int) -> None:
        """Evict cached prefixes until ``pool`` has pages for rows that are launched ahead.

        That is ``num_rows`` more rows of each of ``num_sequences``. Stops when nothing is left to
        evict.
        """
        if self._prefixes is not None:
            num_pages = num_sequences * -(-num_rows // pool.page_size)
            self._prefixes.evict(max(num_pages - pool.num_free, 0))

    def chunk_end(self, sequence: SequenceState, budget: int) -> int:
        """Return the end row of a chunk of at most ``budget`` rows.

        If states are saved, a chunk ends at a page border. It does not pass the border of the
        prompt's last reusable page.
        """
        stop = min(sequence.num_computed_tokens + budget, sequence.num_prefill)
        if self._saves:
            size = sequence.pool.page_size
            border = min(stop, sequence.num_prefill - 1) // size * size
            stop = border if border > sequence.num_computed_tokens else stop
        return stop

    @property
    def _saves(self) -> bool:
        """Whether per-sequence states are saved for prompts with the same prefix."""
        return self._prefixes is not None and self._states.has_snapshots

    def save_where_pages_end(self, sequences: Sequence[SequenceState]) -> None:
        """Save the per-sequence states of sequences whose rows end at a page border."""
        for s in sequences if self._saves else ():
            if (
                s.num_computed_tokens % s.pool.page_size == 0
                and (snapshot := self._snapshot(s)) is not None
            ):
                s.keep_snapshot(snapshot)

    def _snapshot(self, sequence: SequenceState) -> Snapshot | None:
        """Copy the per-sequence states of ``sequence``; None if there is no room.

        Few prompts start with a part of an answer, so only the newest copy of an answer is kept.
        A copy of a prompt may replace another one: the least recently used of the cache, or the
        first one of its own sequence.
        """
        assert self._prefixes is not None
        if sequence.in_answer:
            sequence.drop_snapshots(in_answer=True)
            return self._states.save(sequence)
        snapshot = self._states.save(sequence)
        if snapshot is None and (
            self._prefixes.evict_snapshot() or sequence.drop_snapshots(in_answer=False)
        ):
            return self._states.save(sequence)
        return snapshot

    def remember(self, sequence: SequenceState) -> None:
        """Keep the filled pages of ``sequence`` for prompts with the same prefix."""
        if self._prefixes is not None:
            self._prefixes.remember(sequence)

    def retire(self, sequence: SequenceState) -> None:
        """Release the memory of ``sequence``; the prefix cache keeps its filled pages."""
        self.remember(sequence)
        self.release(sequence)

    def release(self, sequence: SequenceState) -> None:
        """Release the memory of ``sequence``; the content of its pages is not reused."""
        self._states.release(sequence)

    def clear(self) -> None:
        """Drop all cached prefixes."""
        if self._prefixes is not None:
            self._prefixes.clear()
