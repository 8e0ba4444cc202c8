"""Continuous batching: which sequences run in the next step, and on which pages.

A step admits waiting sequences while pages and places last. It launches one prefill over a bounded
number of prompt rows, and then a decoding step of all sequences that have a root, so that a long
prompt delays them by no more than a chunk. Pages are taken as they are needed. When they run out,
cached prefixes are evicted first. Then the newest sequence is preempted, and computed again later
from the tokens that it has.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from trt_eagle3.decode.forward.chunks import chunk_rows, prefill_budget
from trt_eagle3.decode.memory.page_manager import PageManager
from trt_eagle3.decode.memory.prefix_cache import PrefixCache
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.policy.protocol import BatchState, FixedPolicy, Policy, StepStats
from trt_eagle3.decode.request.prompt import Prompt, Vision
from trt_eagle3.decode.schedule.emission import Emission, joined
from trt_eagle3.decode.speculation.tree import AnyTree
from trt_eagle3.decode.step.decoder import Decoder
from trt_eagle3.decode.step.prefill import Chunk, LaunchedPrefill

__all__ = ["Batch", "Encoder", "Scheduler"]

_PATIENCE_SECONDS = 1.0  # wait for a first token after which a request takes another's place
_TURN_TOKENS = 128  # tokens that a sequence may emit before it is preempted for such a request


@dataclass(frozen=True)
class Batch:
    """What the next step runs beside the sequences that decode.

    Attributes:
        chunks: prompts, and how many of their next rows.
        beside: sequences whose step without a tree may run in the prompts' forward.
        decodes: whether sequences decode.
    """

    chunks: Sequence[Chunk] = ()
    beside: Sequence[SequenceState] = ()
    decodes: bool = False


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
        self._pages = PageManager(decoder.states, prefix_cache)
        self._max_batch_size = max_batch_size
        self.policy: Policy = policy or FixedPolicy(None)
        self._step_end: float | None = None  # of the last step; None: the engine was idle since
        self._stats: StepStats | None = None  # of the step under way
        self._vision = vision
        self._launched = LaunchedPrefill()  # whose first tokens are not read yet

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
            self._pages.retire(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if self.idle:
            self._step_end = None

    def reset(self) -> list[SequenceState]:
        """After a step that failed: forget cached prefixes and the step's sequences, and return
        these; others wait on.
        """
        # with none running, a waiting one was at fault
        self._launched = LaunchedPrefill()
        failed = self.running if self.running else self.waiting
        lost = list(failed)
        failed.clear()
        for sequence in lost:
            self._pages.release(sequence)
        self._pages.clear()
        return lost

    def step(self) -> list[Emission]:
        """Schedule a step, launch it and collect it; returns the emitted tokens, once of each
        sequence, for the caller to ``remove`` those that are done.

        First tokens are read after the next prefill is launched, if there is work meanwhile.
        """
        self.num_draft_tokens, self._stats = None, None
        # a preempted sequence may be admitted again, with the token that it has
        all_run = self._still_running(self._launched.sequences) == self._launched.sequences
        found = [] if all_run else self._read_first_tokens(self._taken())
        found += self._admit()
        batch, before = self.schedule(), self._taken()
        launched = self._decoder.prefiller.launch(batch.chunks, batch.beside)
        found += self._end_launch(launched)
        found += self._read_first_tokens(before)
        self._launched = launched
        # with those whose first tokens were just read
        decoding = self._decoding() if batch.decodes else []
        goes_on = found or decoding or any(s.length < s.num_prefill for s in self.running)
        if not (goes_on and self._decoder.runs_ahead):
            found += self._read_first_tokens(self._taken())
        found += self._decode(self._still_running(decoding), batch)
        self._record()
        return joined(found)

    def schedule(self) -> Batch:
        """The prompt rows of the next step, ``prefill_chunk`` at most with their padding, and the
        sequences that may run beside them.
        """
        decoding = self._decoding()
        beside = self._beside(decoding)
        ready = [s for s in self.running if s.length < s.num_prefill and not s.backpressured]
        left = [s.num_prefill - s.length for s in ready]
        decoder = self._decoder
        budget = prefill_budget(decoder.prefill_chunk, len(decoding), sum(left))
        rows = chunk_rows(left, max(budget - len(beside), 1), decoder.max_segments)
        ends = {i: self._pages.chunk_end(ready[i], count) for i, count in rows.items()}
        chunks = [(ready[i], end - ready[i].length) for i, end in ends.items()]
        return Batch(chunks, beside, bool(decoding))

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
            self.running.append(sequence)  # first, so that it is counted throughout
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
        """The first of the waiting that can run now, its pages given.

        Sequences whose readers lag make room for it, then the one that has run longest. They wait
        on, behind all others.
        """
        ready = (s for s in self.waiting if self._pages.may_begin(s, self.running))
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
        if not self._pages.begin(sequence, self._decoder.rows_wanted(sequence, tree)):
            return False
        self.num_reused_rows += sequence.length
        return True

    def _end_launch(self, launched: LaunchedPrefill) -> list[Emission]:
        """Keep what a launched prefill has written; returns the sequences that failed."""
        self._pages.save_where_pages_end(launched.sequences)
        if self._vision is not None:  # images in the cache are wanted again only by a new start
            for s in launched.ended:
                s.prompt = s.prompt.with_vision(None)
        return [self._fail(s, error) for s, error in launched.failed]

    def _taken(self) -> LaunchedPrefill:
        launched, self._launched = self._launched, LaunchedPrefill()
        return launched

    def _read_first_tokens(self, launched: LaunchedPrefill) -> list[Emission]:
        """Read the first tokens of prompts that ended in ``launched``."""
        found = []
        for s in launched.wait():
            runs = s in self.running
            if runs and not s.tokens:
                found.append(self._fail(s, s.failure()))
            elif s.tokens and (runs or s in self.waiting):  # a preempted one has its token, too
                if runs:
                    self._pages.remember(s)
                found.append(Emission(s, tuple(s.tokens), begins=True, full=self._is_full(s)))
        return found

    def _beside(self, decoding: list[SequenceState]) -> list[SequenceState]:
        """Sequences whose next step may run in one forward with prompts: ``decoding``, if without a
        tree.
        """
        if not self._decoder.mixes:
            return []
        if any(s.drafting for s in decoding) and self._tree_for(decoding) is not None:
            return []
        self._free_ahead(decoding, None)
        return decoding

    def _decode(self, sequences: list[SequenceState], batch: Batch) -> list[Emission]:
        """Run a decoding step of ``sequences``, beside the prompts of ``batch``."""
        tree = self._tree_for(sequences)
        before = self.num_preempted
        for s in sequences:
            if self.num_preempted == before or s in self.running:
                self._reserve(s, self._decoder.rows_wanted(s, tree))
        # some may have been preempted to make room
        ready = self._still_running(sequences)
        if not ready:
            return []
        self._free_ahead(ready, tree)
        done = self._decoder.step(ready, tree)
        self._pages.save_where_pages_end(ready)
        self.num_draft_tokens = done.tree.num_nodes - 1 if done.tree else 0
        in_it = [(s, a) for s, a in zip(ready, done.accepted, strict=True) if a is not None]
        levels = [len(a.tokens) - 1 if a.steps else None for _, a in in_it]
        self._stats = StepStats(
            _state_of([s for s, _ in in_it], len(self.running)),
            done.tree,
            levels,
            prompt_rows=sum(count for _, count in batch.chunks),
            backfilled_rows=done.num_backfilled,
        )
        return [
            Emission(s, accepted.tokens, full=self._is_full(s), steps=accepted.steps)
            if accepted.tokens
            else self._fail(s, s.failure())
            for s, accepted in in_it
        ]

    def _free_ahead(self, sequences: Sequence[SequenceState], tree: AnyTree | None) -> None:
        """Make room for what is launched ahead of ``sequences``, which preempts no sequence."""
        if sequences:
            num_rows = self._decoder.rows_ahead(tree)
            self._pages.free_ahead(sequences[0].pool, len(sequences), num_rows)

    def _still_running(self, sequences: list[SequenceState]) -> list[SequenceState]:
        running = {id(s) for s in self.running}
        return [s for s in sequences if id(s) in running]

    def _fail(self, sequence: SequenceState, error: Exception) -> Emission:
        """End a sequence that cannot go on; what its pages hold is not reused."""
        self.running.remove(sequence)
        self._pages.release(sequence)
        return Emission(sequence, (), error=error)

    def _reserve(self, sequence: SequenceState, num_rows: int) -> None:
        """Pages for ``num_rows`` rows: preempt sequences whose readers lag, then the newest, be it
        ``sequence``.
        """
        while not self._pages.reserve(sequence, num_rows):
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
        answers. So no sequence keeps a place for long that others wait for.
        """
        if waiting.tokens or time.perf_counter() - waiting.created < _PATIENCE_SECONDS:
            return None
        longest = max(self.running, key=lambda s: s.turn_length, default=None)
        return longest if longest is not None and longest.turn_length >= _TURN_TOKENS else None

    def _preempt(self, sequence: SequenceState) -> None:
        self.running.remove(sequence)
        self._pages.retire(sequence)
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
