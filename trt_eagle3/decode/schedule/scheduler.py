"""Continuous batching: which sequences run in the next step, and on which pages.

A step admits waiting sequences while there are free pages and batch slots. It launches one prefill
over as many prompt rows as fit into its target time. Then it runs a decoding step of all prefilled
sequences. So a long prompt delays them by one chunk at most. Pages are allocated on demand. If they
run out, cached prefixes are evicted. Then a backpressured sequence is preempted, else the newest. A
request that waited a second for its first token may preempt the sequence with the most tokens since
its admission. A preempted sequence is recomputed later from its tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from trt_eagle3.decode.forward.chunks import MAX_STEP_MS, chunk_rows, prefill_budget
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

_PATIENCE_SECONDS = 1.0  # wait for a first token after which a request may preempt another one
_TURN_TOKENS = 128  # least tokens since admission before a sequence is preempted for such a request


@dataclass(frozen=True)
class Batch:
    """The prompt rows of the next step, and the decoding sequences batched with them.

    Attributes:
        chunks: prompts, each with the number of its next rows.
        beside: decoding sequences whose step without a tree may run in the prompts' forward.
        decodes: whether the step decodes any sequence.
    """

    chunks: Sequence[Chunk] = ()
    beside: Sequence[SequenceState] = ()
    decodes: bool = False


class Encoder(Protocol):
    """Encodes a prompt's images to visual embeddings (``vision_encoder.VisionEncoder``)."""

    def keeps(self, prompt: Prompt) -> bool:
        """Return whether ``encode`` would run no tower."""
        ...

    def encode(self, prompt: Prompt) -> Vision:
        """Run the vision tower, or find kept embeddings. An exception fails only this prompt."""
        ...


class Scheduler:
    """Steps many sequences through one decoder.

    Attributes:
        num_draft_tokens: draft tokens per drafting sequence in the last step's cycle; 0 if none
            drafted; None if the step had no cycle.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_batch_size: int,
        policy: Policy | None = None,
        prefix_cache: PrefixCache | None = None,
        vision: Encoder | None = None,
        max_step_ms: float = MAX_STEP_MS,
    ) -> None:
        """Create a scheduler over ``decoder``.

        ``policy``: chooses the tree of each step; None: no speculation. ``vision``: encodes
        images; None: prompts already contain their embeddings. ``max_step_ms``: target for the
        time of a step with prompts while sequences decode.
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
        self._max_step_s = 1e-3 * max_step_ms
        self.policy: Policy = policy or FixedPolicy(None)
        self._step_end: float | None = None  # of the last step; None: the engine was idle after it
        self._stats: StepStats | None = None  # of the current step
        self._vision = vision
        self._launched = LaunchedPrefill()  # its first tokens are not read yet
        self._logits_last = False  # the last prefill returned the logits of a whole prompt chunk

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return all(s.backpressured for s in (*self.running, *self.waiting))

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence. The policy decides whether it is drafted."""
        if sequence.drafting:
            others = [*self.running, *self.waiting][: self._max_batch_size - 1]
            batch = [*others, sequence]
            sequence.drafting = self.policy.should_draft(_state_of(batch, len(batch)))
        self.waiting.append(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Remove a running or waiting sequence, and release its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._pages.retire(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if self.idle:
            self._step_end = None

    def reset(self) -> list[SequenceState]:
        """Drop cached prefixes and the sequences of a failed step; returns these sequences.

        Waiting sequences stay queued, unless none was running.
        """
        # with none running, a waiting sequence caused the failure
        self._launched = LaunchedPrefill()
        failed = self.running if self.running else self.waiting
        lost = list(failed)
        failed.clear()
        for sequence in lost:
            self._pages.release(sequence)
        self._pages.clear()
        return lost

    def step(self) -> list[Emission]:
        """Schedule, launch and collect a step; returns one emission per sequence with a result.

        The caller must ``remove`` sequences that are done. First tokens are read after the next
        prefill is launched, if there is other work.
        """
        self.num_draft_tokens, self._stats = None, None
        # a preempted sequence may be admitted again, so its first token must be known
        all_run = self._still_running(self._launched.sequences) == self._launched.sequences
        found = [] if all_run else self._read_first_tokens(self._taken())
        found += self._admit()
        batch, before = self.schedule(), self._taken()
        launched = self._decoder.prefiller.launch(batch.chunks, batch.beside)
        found += self._end_launch(launched)
        found += self._read_first_tokens(before)
        self._launched = launched
        # includes sequences whose first tokens were just read
        decoding = self._decoding() if batch.decodes else []
        goes_on = (
            found or decoding or any(s.num_computed_tokens < s.num_prefill for s in self.running)
        )
        if not (goes_on and self._decoder.runs_ahead):
            found += self._read_first_tokens(self._taken())
        found += self._decode(self._still_running(decoding), batch)
        self._record()
        return joined(found)

    def schedule(self) -> Batch:
        """Choose the prompt rows of the next step, and the sequences that are batched with them.

        Rows and their padding are at most ``prefill_chunk``. A prompt whose logits are needed runs
        alone, in few rows at a time, and in turn with other prompts.
        """
        decoding = self._decoding()
        ready = [
            s for s in self.running if s.num_computed_tokens < s.num_prefill and not s.backpressured
        ]
        with_logits = [s for s in ready if s.needs_prompt_logits]
        others = [s for s in ready if not s.needs_prompt_logits]
        self._logits_last = bool(with_logits) and not (self._logits_last and others)
        if self._logits_last:
            first = with_logits[0]
            end = self._pages.chunk_end(first, self._decoder.most_rows(first))
            return Batch([(first, end - first.num_computed_tokens)], (), bool(decoding))
        return self._schedule_rows(others, decoding)

    def _schedule_rows(
        self, ready: Sequence[SequenceState], decoding: list[SequenceState]
    ) -> Batch:
        """Choose the next rows of the prompts of ``ready``."""
        beside = self._beside(decoding)
        left = [s.num_prefill - s.num_computed_tokens for s in ready]
        decoder = self._decoder
        budget = prefill_budget(decoder.prefill_chunk, self._rows_in_time(decoding))
        rows = chunk_rows(left, max(budget - len(beside), 1), decoder.max_segments)
        ends = {i: self._pages.chunk_end(ready[i], count) for i, count in rows.items()}
        chunks = [(ready[i], end - ready[i].num_computed_tokens) for i, end in ends.items()]
        return Batch(chunks, beside, bool(decoding))

    def _rows_in_time(self, decoding: Sequence[SequenceState]) -> int | None:
        """Return how many prompt rows fit into the step's target time; None: not known."""
        if not decoding:
            return None
        return self.policy.prompt_rows(_state_of(decoding, len(self.running)), self._max_step_s)

    def _record(self) -> None:
        """Pass the step's result and seconds to the policy."""
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
            self.running.append(sequence)  # before ``remove``, so that metrics always count it
            self.waiting.remove(sequence)
            sequence.turn_start = len(sequence.tokens)
            if sequence.queue_seconds is None:
                sequence.queue_seconds = time.perf_counter() - sequence.created
            if not sequence.prompt.has_visual(sequence.num_computed_tokens, sequence.num_prefill):
                continue
            is_fast = self._vision is None or self._vision.keeps(sequence.prompt)
            try:
                self._encode(sequence)
            except Exception as error:  # bad images fail only their own prompt
                failed.append(self._fail(sequence, error))
            if not is_fast and any(s.prefilled and not s.backpressured for s in self.running):
                break  # decoding sequences are delayed by the images of one prompt at most
        return failed

    def _encode(self, sequence: SequenceState) -> None:
        if self._vision is not None and sequence.vision is None:
            sequence.vision = self._vision.encode(sequence.prompt)

    def _next(self) -> SequenceState | None:
        """Return the first waiting sequence that can run now, with pages allocated.

        To make room, backpressured sequences are preempted first; after a second's wait, the
        sequence with the most tokens since its admission.
        Preempted sequences go to the end of the queue.
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
            self.waiting.rotate(-1)  # preemption puts it at the front; move it to the end
        return sequence

    def _give_pages(self, sequence: SequenceState) -> bool:
        """Allocate pages for ``sequence`` up to its first cycle, its cached prefix included.

        Returns False if pages are lacking.
        """
        tree = self._tree_for([*self.running, sequence])
        if not self._pages.begin(sequence, self._decoder.rows_wanted(sequence, tree)):
            return False
        self.num_reused_rows += sequence.num_computed_tokens
        return True

    def _end_launch(self, launched: LaunchedPrefill) -> list[Emission]:
        """Save the states that a launched prefill wrote; returns the sequences that failed."""
        self._pages.save_where_pages_end(launched.sequences)
        if self._vision is not None:  # after a preemption the images are encoded or found again
            for s in launched.ended:
                s.vision = None
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
            elif s.tokens and (runs or s in self.waiting):  # a preempted sequence has its token too
                if runs:
                    self._pages.remember(s)
                found.append(Emission(s, tuple(s.tokens), begins=True, full=self._is_full(s)))
        return found

    def _beside(self, decoding: list[SequenceState]) -> list[SequenceState]:
        """Return the sequences that may be batched with a prefill: ``decoding``, if without a tree,
        else none.
        """
        if not self._decoder.mixes:
            return []
        if any(s.drafting for s in decoding) and self._tree_for(decoding) is not None:
            return []
        self._free_ahead(decoding, None)
        return decoding

    def _decode(self, sequences: list[SequenceState], batch: Batch) -> list[Emission]:
        """Run a decoding step of ``sequences``; ``batch``: the prompts of this scheduler step."""
        tree = self._tree_for(sequences)
        before = self.num_preempted
        for s in sequences:
            if self.num_preempted == before or s in self.running:
                self._reserve(s, self._decoder.rows_wanted(s, tree))
        # ``_reserve`` may have preempted some
        ready = self._still_running(sequences)
        if not ready:
            return []
        self._free_ahead(ready, tree)
        done = self._decoder.step(ready, tree)
        self._pages.save_where_pages_end(ready)
        self.num_draft_tokens = done.tree.num_nodes - 1 if done.tree else 0
        in_it = [(s, a) for s, a in zip(ready, done.accepted, strict=True) if a is not None]
        levels = [len(a.tokens) - 1 if a.tree_depth else None for _, a in in_it]
        self._stats = StepStats(
            _state_of([s for s, _ in in_it], len(self.running)),
            done.tree,
            levels,
            prompt_rows=sum(count for _, count in batch.chunks),
            backfilled_rows=done.num_backfilled,
        )
        return [
            Emission(s, accepted.tokens, full=self._is_full(s), tree_depth=accepted.tree_depth)
            if accepted.tokens
            else self._fail(s, s.failure())
            for s, accepted in in_it
        ]

    def _free_ahead(self, sequences: Sequence[SequenceState], tree: AnyTree | None) -> None:
        """Free pages for rows of ``sequences`` that are launched ahead, without preemption."""
        if sequences:
            num_rows = self._decoder.rows_ahead(tree)
            self._pages.free_ahead(sequences[0].pool, len(sequences), num_rows)

    def _still_running(self, sequences: list[SequenceState]) -> list[SequenceState]:
        running = {id(s) for s in self.running}
        return [s for s in sequences if id(s) in running]

    def _fail(self, sequence: SequenceState, error: Exception) -> Emission:
        """End a failed sequence. The prefix cache does not keep its pages."""
        self.running.remove(sequence)
        self._pages.release(sequence)
        return Emission(sequence, (), error=error)

    def _reserve(self, sequence: SequenceState, num_rows: int) -> None:
        """Reserve pages for ``num_rows`` rows of ``sequence``.

        If pages run out, backpressured sequences are preempted, then the newest one. That may be
        ``sequence`` itself.
        """
        while not self._pages.reserve(sequence, num_rows):
            last = self._lagging() or self.running[-1]
            self._preempt(last)
            if last is sequence:
                return

    def _lagging(self) -> SequenceState | None:
        """Return the newest running sequence that is backpressured."""
        return next((s for s in reversed(self.running) if s.backpressured), None)

    def _longest(self, waiting: SequenceState) -> SequenceState | None:
        """Return the running sequence with the longest turn, if ``waiting`` has waited long.

        Only a wait for the first token counts. A server cannot distinguish a stopped reader from
        one whose machine buffers whole answers. So no sequence keeps its slot for long while others
        wait.
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
    """Describe a batch of ``sequences`` among ``num_running`` running sequences."""
    return BatchState(
        size=len(sequences),
        num_drafting=sum(s.drafting for s in sequences),
        num_running=max(num_running, len(sequences)),
        seeded=any(s.sampling.seed is not None and not s.sampling.greedy for s in sequences),
    )
