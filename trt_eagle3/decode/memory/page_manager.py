"""PageManager: the pages and per-sequence states of sequences, and what the prefix cache keeps.

Whoever asks for room gets that of cached prefixes, the least recently used first. What is launched
ahead of the host asks nobody to give anything back, so as many pages as it may want are made free
before (``free_ahead``): else decoding would wait for the host as soon as the cache has filled all
pages, which is the normal state of a server.
"""

from __future__ import annotations

from collections.abc import Sequence

from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.prefix_cache import PrefixCache, may_begin
from trt_eagle3.decode.memory.sequence import SequenceState, Snapshot
from trt_eagle3.decode.memory.state import LayerStates

__all__ = ["PageManager"]


class PageManager:
    """Gives room to sequences and takes it back. Not thread-safe: the scheduler's own."""

    def __init__(self, states: LayerStates, prefixes: PrefixCache | None) -> None:
        """``prefixes``: None: nothing is kept of sequences that have ended."""
        self._states = states
        self._prefixes = prefixes

    def may_begin(self, sequence: SequenceState, running: Sequence[SequenceState]) -> bool:
        """As ``prefix_cache.may_begin``."""
        with_snapshot = self._states.has_snapshots
        return may_begin(sequence, running, self._prefixes, with_snapshot=with_snapshot)

    def begin(self, sequence: SequenceState, num_rows: int) -> bool:
        """Give ``sequence`` its known beginning, and pages for ``num_rows`` rows; nothing, and
        False, where these are lacking.
        """
        if self._prefixes is not None:
            prefix = self._prefixes.find(sequence, with_snapshot=self._states.has_snapshots)
            self._states.restore(sequence, prefix)
        if self.reserve(sequence, num_rows):
            return True
        self.release(sequence)
        return False

    def reserve(self, sequence: SequenceState, num_rows: int) -> bool:
        """Give ``sequence`` pages for ``num_rows`` rows, cached prefixes evicted where need be;
        False where that is not enough.
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
        """Evict cached prefixes until ``pool`` has pages for ``num_rows`` more rows of each of
        ``num_sequences``, or nothing is left to evict.
        """
        if self._prefixes is not None:
            wanted = num_sequences * -(-num_rows // pool.page_size)
            self._prefixes.evict(max(wanted - pool.num_free, 0))

    def chunk_end(self, sequence: SequenceState, budget: int) -> int:
        """Where a chunk of ``budget`` rows at most ends.

        Where states are to be saved, that is where a page does, and the prompt's last page that can
        be reused is not passed.
        """
        stop = min(sequence.length + budget, sequence.num_prefill)
        if self._saves:
            size = sequence.pool.page_size
            border = min(stop, sequence.num_prefill - 1) // size * size
            stop = border if border > sequence.length else stop
        return stop

    @property
    def _saves(self) -> bool:
        """Whether per-sequence states are saved for prompts that begin alike."""
        return self._prefixes is not None and self._states.has_snapshots

    def save_where_pages_end(self, sequences: Sequence[SequenceState]) -> None:
        """Save the per-sequence states of those whose rows fill their pages."""
        for s in sequences if self._saves else ():
            if s.length % s.pool.page_size == 0 and (snapshot := self._snapshot(s)) is not None:
                s.keep_snapshot(snapshot)

    def _snapshot(self, sequence: SequenceState) -> Snapshot | None:
        """A copy of its states; None where there is no room for it.

        Few prompts begin with half an answer: of an answer the newest copy alone is kept, and only
        those of prompts take the room of others, the least recently used or their own first one.
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
        """Keep what the rows of ``sequence`` fill, for prompts that begin alike."""
        if self._prefixes is not None:
            self._prefixes.remember(sequence)

    def retire(self, sequence: SequenceState) -> None:
        """Take back what ``sequence`` has; what its pages hold stays known until it is needed."""
        self.remember(sequence)
        self.release(sequence)

    def release(self, sequence: SequenceState) -> None:
        """Take back what ``sequence`` has; what its pages hold is not reused."""
        self._states.release(sequence)

    def clear(self) -> None:
        """Forget cached prefixes."""
        if self._prefixes is not None:
            self._prefixes.clear()
