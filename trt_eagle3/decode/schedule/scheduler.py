"""Continuous batching: who runs in the next step, and on which pages.

A step admits waiting sequences while pages and places last, runs one prefill pass over a bounded
number of prompt rows, and one cycle of all sequences that decode, so that a long prompt stalls
nobody for longer than a chunk. Pages are taken as they are needed; when they run out, cached
prefixes go first, then the sequence that came last is put off and computed again later, from the
tokens that it has.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from trt_eagle3.decode.forward.chunks import chunk_rows, prefill_budget
from trt_eagle3.decode.memory.page_manager import KvManager
from trt_eagle3.decode.memory.prefix_cache import PrefixCache
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.policy.protocol import BatchState, FixedPolicy, Policy, StepStats
from trt_eagle3.decode.request.prompt import Prompt, Vision
from trt_eagle3.decode.schedule.emission import Emission, joined
from trt_eagle3.decode.step.decoder import AnyTree, Decoder
from trt_eagle3.decode.step.launched import LaunchedPrefill, launch_prefill

__all__ = ["Encoder", "Scheduler"]

_PATIENCE_SECONDS = 1.0  # that a request waits for its first token before it takes another's place
_TURN_TOKENS = 128  # that a sequence may emit before it is preempted for such a request


class Encoder(Protocol):
    """Makes visual embeddings of a prompt's images (``vision_encoder.VisionEncoder``)."""

    def encode(self, prompt: Prompt) -> Vision:
        """Run the vision tower; what it raises fails this prompt alone."""
        ...


class Scheduler:
    """Steps many sequences through one decoder.

    Attributes:
        num_draft_tokens: for each sequence that drafted in the last step's cycle, 0 where none did;
            None where the step had no cycle.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_batch_size: int,
        policy: Policy | None = None,
        prefix_cache: PrefixCache | None = None,
        vision: Encoder | None = None,
    ) -> None:
        """``policy``: chooses the tree of each step; None: no speculation. ``vision``: encodes
        images; None: prompts come with their embeddings.
        """
        self.running: list[SequenceState] = []
        self.waiting: deque[SequenceState] = deque()
        self.num_preempted = 0
        self.num_reused_rows = 0
        self.num_draft_tokens: int | None = None
        self.clock = time.perf_counter
        self._decoder = decoder
        self._kv = KvManager(decoder.states, prefix_cache)
        self._max_batch_size = max_batch_size
        self.policy: Policy = policy or FixedPolicy(None)
        self._step_end: float | None = None  # of the last step; None: the engine was idle since
        self._stats: StepStats | None = None  # of the step under way
        self._vision = vision
        self._launched = LaunchedPrefill()  # whose first tokens nobody has read

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return all(s.backpressured for s in (*self.running, *self.waiting))

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence; it gets a draft where the policy admits it."""
        if sequence.drafting:
            others = [*self.running, *self.waiting][: self._max_batch_size - 1]
            batch = [*others, sequence]
            sequence.drafting = self.policy.should_draft(_state_of(batch, len(batch)))
        self.waiting.append(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Forget a sequence, wherever it is, and give its pages back."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._kv.let_go(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if self.idle:
            self._step_end = None

    def reset(self) -> list[SequenceState]:
        """After a pass that failed: forget cached prefixes and those it was for, and return
        these; others wait on.
        """
        # with nobody running, a waiting one was at fault
        self._launched = LaunchedPrefill()
        failed = self.running if self.running else self.waiting
        lost = list(failed)
        failed.clear()
        for sequence in lost:
            self._kv.release(sequence)
        self._kv.clear()
        return lost

    def step(self) -> list[Emission]:
        """Admit, prefill, decode; return the emitted tokens, once of each sequence, for the caller
        to ``remove`` those that are done.
        """
        self.num_draft_tokens, self._stats = None, None
        # who was put off meanwhile may be admitted again, with the token that it has
        all_run = self._still_running(self._launched.sequences) == self._launched.sequences
        found = [] if all_run else self._end_prefill(self._taken())
        found += self._admit()
        found += self._prefill_and_decode()
        self._record()
        return joined(found)

    def _record(self) -> None:
        """Pass the step's result and its seconds to the policy."""
        start, end = self._step_end, self.clock()
        self._step_end = end
        if self._stats is not None:
            seconds = None if start is None else end - start
            self.policy.record(replace(self._stats, seconds=seconds))

    def _tree_for(self, sequences: Sequence[SequenceState]) -> AnyTree | None:
        return self.policy.choose(_state_of(sequences, len(self.running)))

    def _decoding(self) -> list[SequenceState]:
        return [
            s for s in self.running if s.prefilled and not s.backpressured and not self._is_full(s)
        ]

    def _admit(self) -> list[Emission]:
        failed = []
        while (sequence := self._next()) is not None:
            self.running.append(sequence)  # first, so that whoever counts misses nobody
            self.waiting.remove(sequence)
            sequence.turn_start = len(sequence.tokens)
            if sequence.queue_seconds is None:
                sequence.queue_seconds = time.perf_counter() - sequence.created
            if not sequence.prompt.has_visual(sequence.length, sequence.num_prefill):
                continue
            try:
                self._encode(sequence)
            except Exception as error:  # one prompt's images fail that prompt alone
                failed.append(self._fail(sequence, error))
            if any(s.prefilled and not s.backpressured for s in self.running):
                break  # running sequences wait for the images of one prompt at most
        return failed

    def _encode(self, sequence: SequenceState) -> None:
        if self._vision is not None and sequence.prompt.vision is None:
            sequence.prompt = sequence.prompt.with_vision(self._vision.encode(sequence.prompt))

    def _next(self) -> SequenceState | None:
        """Who of the waiting can run now, its pages given.

        Those whose readers lag make room for it, then the one that has run longest; they wait on,
        behind all others.
        """
        ready = (s for s in self.waiting if self._kv.may_begin(s, self.running))
        sequence = next(ready, None)
        while sequence is not None:
            if len(self.running) < self._max_batch_size and self._give_pages(sequence):
                break
            victim = self._lagging() or self._longest(sequence)
            if victim is None:
                return None
            self._preempt(victim)
            self.waiting.rotate(-1)  # from the front, where preemption puts it, behind all others
        return sequence

    def _give_pages(self, sequence: SequenceState) -> bool:
        """Pages for all that ``sequence`` needs up to its first cycle, its known beginning among
        them.
        """
        tree = self._tree_for([*self.running, sequence])
        if not self._kv.begin(sequence, self._decoder.rows_wanted(sequence, tree)):
            return False
        self.num_reused_rows += sequence.length
        return True

    def _prefill_and_decode(self) -> list[Emission]:
        """Launch a prefill, read the first tokens of the one before, and run a cycle of those that
        decode. The new one's first tokens are read by the next step, if there is work meanwhile.
        """
        before, decoding = self._taken(), self._decoding()
        launched, found, num_rows = self._prefill(decoding)
        found += self._end_prefill(before)
        self._launched = launched
        # with those first tokens, which are not kept for a cycle of their own, behind the prefill
        decoding = self._decoding() if decoding else []
        goes_on = found or decoding or any(s.length < s.num_prefill for s in self.running)
        if not (goes_on and self._decoder.launches_ahead):
            found += self._end_prefill(self._taken())
        return found + self._decode(self._still_running(decoding), num_rows)

    def _prefill(
        self, decoding: list[SequenceState]
    ) -> tuple[LaunchedPrefill, list[Emission], int]:
        """The launched prefill, failed sequences and number of prompt rows.

        ``decoding``: sequences that decode meanwhile.
        """
        beside = self._beside(decoding)
        chunks = self._chunks(len(decoding), len(beside))
        launched = launch_prefill(self._decoder, chunks, beside)
        self._kv.save_where_pages_end(launched.sequences)
        if self._vision is not None:  # once they are in the cache, only who starts again asks
            for s in launched.ended:
                s.prompt = s.prompt.with_vision(None)
        failed = [self._fail(s, error) for s, error in launched.failed]
        return launched, failed, sum(count for _, count in chunks)

    def _taken(self) -> LaunchedPrefill:
        launched, self._launched = self._launched, LaunchedPrefill()
        return launched

    def _end_prefill(self, launched: LaunchedPrefill) -> list[Emission]:
        """Read the first tokens."""
        found = []
        for s in launched.wait():
            runs = s in self.running
            if runs and not s.tokens:
                found.append(self._fail(s, s.failure()))
            elif s.tokens and (runs or s in self.waiting):  # who was put off has its token, too
                if runs:
                    self._kv.remember(s)
                found.append(Emission(s, tuple(s.tokens), begins=True, full=self._is_full(s)))
        return found

    def _beside(self, decoding: list[SequenceState]) -> list[SequenceState]:
        """Those whose next step may run in one forward with prompts: ``decoding``, if plainly."""
        if not self._decoder.mixes:
            return []
        if any(s.drafting for s in decoding) and self._tree_for(decoding) is not None:
            return []
        self._free_ahead(decoding, None)
        return decoding

    def _chunks(self, num_decoding: int, num_beside: int) -> list[tuple[SequenceState, int]]:
        """Prompt rows of one pass, ``prefill_chunk`` at most with their padding and ``num_beside``
        others; ``num_decoding``: who decodes meanwhile.
        """
        ready = [s for s in self.running if s.length < s.num_prefill and not s.backpressured]
        left = [s.num_prefill - s.length for s in ready]
        decoder = self._decoder
        budget = prefill_budget(decoder.prefill_chunk, num_decoding, sum(left))
        rows = chunk_rows(left, max(budget - num_beside, 1), decoder.max_segments)
        ends = {i: self._kv.chunk_end(ready[i], count) for i, count in rows.items()}
        return [(ready[i], end - ready[i].length) for i, end in ends.items()]

    def _decode(self, sequences: list[SequenceState], prompt_rows: int) -> list[Emission]:
        """Run a cycle. ``prompt_rows``: rows of prompts in the same step."""
        tree = self._tree_for(sequences)
        before = self.num_preempted
        for s in sequences:
            if self.num_preempted == before or s in self.running:
                self._reserve(s, self._decoder.rows_wanted(s, tree))
        # some may have been put off to make room
        ready = self._still_running(sequences)
        if not ready:
            return []
        self._free_ahead(ready, tree)
        late = sum(len(s.deferred) for s in ready)
        done = self._decoder.cycle(ready, tree)
        self._kv.save_where_pages_end(ready)
        self.num_draft_tokens = done.tree.num_nodes - 1 if done.tree else 0
        in_it = [(s, a) for s, a in zip(ready, done.accepted, strict=True) if a is not None]
        levels = [len(a.tokens) - 1 if a.steps else None for _, a in in_it]
        self._stats = StepStats(
            _state_of([s for s, _ in in_it], len(self.running)),
            done.tree,
            levels,
            prompt_rows=prompt_rows,
            backfilled_rows=max(late - sum(len(s.deferred) for s in ready), 0),
        )
        return [
            Emission(s, accepted.tokens, full=self._is_full(s), steps=accepted.steps)
            if accepted.tokens
            else self._fail(s, s.failure())
            for s, accepted in in_it
        ]

    def _free_ahead(self, sequences: Sequence[SequenceState], tree: AnyTree | None) -> None:
        """Make room for what is launched ahead of ``sequences``, which takes nobody's."""
        if sequences:
            num_rows = self._decoder.rows_ahead(tree)
            self._kv.free_ahead(sequences[0].pool, len(sequences), num_rows)

    def _still_running(self, sequences: list[SequenceState]) -> list[SequenceState]:
        running = {id(s) for s in self.running}
        return [s for s in sequences if id(s) in running]

    def _fail(self, sequence: SequenceState, error: Exception) -> Emission:
        """Put out a sequence that cannot go on; nobody shall reuse what its pages hold."""
        self.running.remove(sequence)
        self._kv.release(sequence)
        return Emission(sequence, (), error=error)

    def _reserve(self, sequence: SequenceState, num_rows: int) -> None:
        """Pages for ``num_rows`` rows: preempt those that nobody reads, then the newest, be it
        ``sequence``.
        """
        while not self._kv.reserve(sequence, num_rows):
            last = self._lagging() or self.running[-1]
            self._preempt(last)
            if last is sequence:
                return

    def _lagging(self) -> SequenceState | None:
        """The newest of the running whose reader lags."""
        return next((s for s in reversed(self.running) if s.backpressured), None)

    def _longest(self, waiting: SequenceState) -> SequenceState | None:
        """The running sequence with the longest turn, where ``waiting`` has waited long for its
        first token.

        A server cannot tell a reader that has stopped from one whose machine takes in whole
        answers: so nobody keeps a place for long that others wait for.
        """
        if waiting.tokens or time.perf_counter() - waiting.created < _PATIENCE_SECONDS:
            return None
        longest = max(self.running, key=lambda s: s.turn_length, default=None)
        return longest if longest is not None and longest.turn_length >= _TURN_TOKENS else None

    def _preempt(self, sequence: SequenceState) -> None:
        self.running.remove(sequence)
        self._kv.let_go(sequence)
        self.waiting.appendleft(sequence)
        self.num_preempted += 1

    def _is_full(self, sequence: SequenceState) -> bool:
        return sequence.num_tokens >= self._decoder.max_seq_len


def _state_of(sequences: Sequence[SequenceState], num_running: int) -> BatchState:
    """The state of a batch of ``sequences`` among ``num_running`` running ones."""
    return BatchState(
        size=len(sequences),
        num_drafting=sum(s.drafting for s in sequences),
        num_running=max(num_running, len(sequences)),
        seeded=any(s.sampling.seed is not None and not s.sampling.greedy for s in sequences),
    )
