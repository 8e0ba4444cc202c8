"""Asynchronous cycles: the device is given its next work before the host has read the last step's
tokens.

A cycle is accepted on the device, which then extends the draft and proposes again while the host
reads the outcome; a large batch begins its next cycle before the host delivers the tokens. A plain
step takes its roots from the step before, which the host reads meanwhile.

Shapes: B sequences of a padded batch, T tree nodes, H target hidden, k aux layers, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trt_eagle3.decode.forward.device_batch import LAUNCHED_AHEAD, DeviceBatch, Seats
from trt_eagle3.decode.forward.runner import AttentionMetadata, Rows, TargetRunner, all_rows
from trt_eagle3.decode.memory.row_ref import RowRef
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.sampling.logprobs import LogprobsAhead
from trt_eagle3.decode.speculation.accept import Accepted, CycleOutcome
from trt_eagle3.decode.speculation.draft_ahead import DraftAhead
from trt_eagle3.decode.speculation.outcome import (
    Outcome,
    accept_trees,
    greedy_tokens,
    is_chain,
    tree_shape,
)
from trt_eagle3.decode.speculation.propose import Proposal, tree_proposal
from trt_eagle3.decode.speculation.tree import AnyTree, Tree
from trt_eagle3.decode.speculation.tree_masks import TreeMasks
from trt_eagle3.decode.speculation.tree_outcome import (
    gives_tokens,
    reduction,
    take_draws,
    tree_outcome,
)
from trt_eagle3.decode.step.async_step import (
    NextForward,
    PlainForward,
    PlainStep,
    TreeStep,
    roots_after,
)
from trt_eagle3.engine.buckets import padded_size
from trt_eagle3.engine.session import Reduction
from trt_eagle3.host_copy import Readback

__all__ = ["AsyncCycles"]


_ROOT = Tree.root_only()
_Run = Callable[[Rows, Reduction | None], tuple[Tensor, Tensor | None]]
"""Runs rows as ``TargetRunner.forward`` does."""
_NO_TOKEN = -1


class AsyncCycles:
    """Cycles of batches in which all sequences take one tree, or none does."""

    def __init__(
        self,
        target: TargetRunner,
        draft: DraftAhead | None,
        *,
        max_seq_len: int,
        max_batch_size: int,
    ) -> None:
        self._target = target
        self._draft = draft
        self._max_seq_len = max_seq_len
        self.max_batch_size = max_batch_size
        self._states = target.states
        self._in_flight: PlainStep | TreeStep | None = None
        self._beside: NextForward | None = None  # that ran with a prompt

    @property
    def capturable(self) -> bool:
        """Whether running a batch of padding captures graphs that cost little."""
        return self._target.reduces

    @property
    def only_plain(self) -> bool:
        """Whether a plain step runs."""
        return isinstance(self._in_flight, PlainStep)

    def takes_along(self, sequences: Sequence[SequenceState], tree: AnyTree | None) -> bool:
        """Whether ``sequences``, which no draft follows, have room for a ``tree`` of others: what
        is proposed for them is anything, and the target verifies it.
        """
        return tree is not None and all(not s.drafting and self._fits(s, tree) for s in sequences)

    def finish(self, sequences: Sequence[SequenceState]) -> CycleOutcome | None:
        """The outcome of a step that still runs; None where it is for none of these."""
        running = self._take(sequences)
        if running is None:
            return None
        self._hand_on(running, sequences)
        return self._append_tokens(running, sequences)

    def cycle(self, sequences: Sequence[SequenceState], tree: AnyTree | None) -> CycleOutcome:
        """The outcome of the step that runs, or runs now: over ``tree`` of each sequence, or one
        row.

        It may run since before a sequence joined, or another tree was wanted: that counts from the
        next step on.
        """
        beside = self._beside
        running = self._take(sequences)
        if tree is None and (running is None or isinstance(running, PlainStep)):
            follows = beside is not None and beside.after is running
            return self._plain(sequences, running, beside if follows else None)
        if running is None and tree is not None:
            running = self._launch_trees(sequences, tree)
        assert running is not None
        self._hand_on(running, sequences)
        found = self._append_tokens(running, sequences)
        if tree is not None and isinstance(running, TreeStep) and len(sequences) >= LAUNCHED_AHEAD:
            going = [s for s in sequences if self._goes_on(s, -1)]
            if _any_drafts(going) and all(self._fits(s, tree) for s in going):
                self._in_flight = self._launch_trees(going, tree)
        return found

    def _plain(
        self,
        sequences: Sequence[SequenceState],
        running: PlainStep | None,
        beside: NextForward | None,
    ) -> CycleOutcome:
        """A token of each sequence; the next step of those that go on is launched before the host
        waits, or was, ``beside`` a prompt.
        """
        if running is None:
            first = beside or self._launch_first(sequences, self._forward)
            running, beside = self._choose(first.forward, first.sequences), None
        self._hand_on(running, sequences)
        ahead = beside or self._launch_ahead(sequences, running, self._forward)
        found = self._append_tokens(running, sequences)
        if ahead is not None:  # now that the host knows what came before
            self._in_flight = self._choose(ahead.forward, ahead.sequences)
        return found

    def launch_beside(
        self, sequences: Sequence[SequenceState], prompts: Rows
    ) -> tuple[Tensor, Tensor | None] | None:
        """Run ``prompts`` and the next plain step of ``sequences`` as one forward, which ``cycle``
        then goes on from; what ``TargetRunner.forward`` returns of ``prompts``. None where nothing
        was run: a tree is being verified, nobody goes on, or pages are lacking.
        """
        found: list[tuple[Tensor, Tensor | None]] = []

        def run(rows: Rows, reduce: Reduction | None) -> tuple[Tensor, Tensor | None]:
            of_prompts, of_steps = self._target.forward_mixed(prompts, rows, reduce)
            found.append(of_prompts)
            return of_steps

        running = self._in_flight
        if isinstance(running, TreeStep):
            return None
        if running is not None and max(running.seats.rows_of(sequences)) >= 0:
            self._beside = self._launch_ahead(sequences, running, run)
        elif all(self._has_room(s, s.length + 1) for s in sequences):
            self._beside = self._launch_first(sequences, run)
        return found[0] if found else None

    def _launch_first(self, sequences: Sequence[SequenceState], run: _Run) -> NextForward:
        """The forward of a step before which none runs."""
        forward = self._launch(sequences, None, [-1] * len(sequences), run)
        return NextForward(None, sequences, forward)

    def _launch_ahead(
        self, sequences: Sequence[SequenceState], running: PlainStep, run: _Run
    ) -> NextForward | None:
        """The forward after ``running`` of those of ``sequences`` that go on; None where nobody
        does, or pages are lacking.
        """
        rows = running.seats.rows_of(sequences)
        going = [(s, row) for s, row in zip(sequences, rows, strict=True) if self._goes_on(s, row)]
        if not going or not all(self._has_room(s, s.length + 2) for s, _ in going):
            return None
        some = [s for s, _ in going]
        return NextForward(running, some, self._launch(some, running, [r for _, r in going], run))

    def _take(self, sequences: Sequence[SequenceState]) -> PlainStep | TreeStep | None:
        """The step that runs for any of ``sequences``."""
        running, self._in_flight, self._beside = self._in_flight, None, None
        if running is None or max(running.seats.rows_of(sequences)) < 0:
            return None
        return running

    def _launch_trees(self, sequences: Sequence[SequenceState], tree: AnyTree) -> TreeStep:
        """One cycle of sequences that all take ``tree``, up to the next trees."""
        assert self._draft is not None
        num_rows, count = tree.num_nodes + tree.num_draft_rows, len(sequences)
        for s in sequences:  # near the limit nothing is proposed ahead, which takes the rest
            self._has_room(s, min(s.length + num_rows, self._max_seq_len))
        lengths = [s.length for s in sequences]
        batch = self._batch(sequences, lengths, [-1] * count, num_rows)
        proposal = self._draft.proposal(sequences, tree, batch)
        samplers = [s.sampler for s in sequences]
        masks = TreeMasks(samplers, proposal)
        reduce = reduction(sequences)
        reduced, aux = self._verify(tree, proposal, batch, reduce)
        assert aux is not None
        # whose drafts are kept to grammars are proposed for once the host knows what those allow
        filtered = self._draft.filters(samplers)
        ahead = not filtered and max(lengths) + num_rows <= self._max_seq_len
        outcome = tree_outcome(reduce, sequences, tree, proposal, reduced, masks)
        logprobs = None
        if reduce is None:
            logprobs = LogprobsAhead(sequences, reduced, outcome.path, outcome.tokens)
        # before the draft's work: the host waits for no more
        readback = Readback(outcome.packed())
        tail = self._draft.follow(tree, outcome, aux, batch, ahead=ahead)
        self._commit(tree, batch, outcome, sequences[0].pool.page_size)
        seats = Seats(sequences, lengths, range(count))
        return TreeStep(seats, tree, tail, readback, logprobs, filtered)

    def run_nobody(self, size: int, tree: AnyTree | None, table_len: int, times: int) -> None:
        """Run cycles of a batch of ``size`` that is padding alone.

        ``table_len``: of the pages' pool.
        """
        table = self._target.embedding
        states, vocab_size = self._states, table.num_tokens
        batch = DeviceBatch.of_nobody(states, size, table_len, vocab_size, table.device)
        for _ in range(times):
            if tree is None:
                roots = tree_proposal(_ROOT, batch.roots.long()[:, None])
                self._verify(_ROOT, roots, batch, greedy_tokens)
                continue
            assert self._draft is not None
            proposal = self._draft.run_nobody(tree, batch, table.dtype)
            target_ids, aux = self._verify(tree, proposal, batch, greedy_tokens)
            assert aux is not None
            outcome = accept_trees(tree, proposal, target_ids)
            self._draft.extend(batch, outcome, aux, in_place=is_chain(tree))
            self._states.replay(batch.state_inputs, outcome.path, outcome.counts)

    def _launch(
        self,
        sequences: Sequence[SequenceState],
        before: PlainStep | None,
        rows: Sequence[int],
        run: _Run,
    ) -> PlainForward:
        """A forward of one row each, after that of ``before`` of those with a row there."""
        lengths = [s.length + (row >= 0) for s, row in zip(sequences, rows, strict=True)]
        batch = self._batch(sequences, lengths, rows, 1)
        roots = batch.roots.long()
        if before is not None:
            roots = roots_after(before, batch, unchanged=list(rows) == list(range(len(rows))))
        trees = tree_proposal(_ROOT, roots[:, None])
        reduce = reduction(sequences)
        reduced, aux = run(self._rows(_ROOT, trees, batch), reduce)
        wanted = any(s.draft for s in sequences)
        kept = aux[:, 0].clone() if aux is not None and wanted else None
        seats = Seats(sequences, lengths, range(len(sequences)))
        return PlainForward(seats, trees, reduced, kept, reduce)

    def _choose(self, forward: PlainForward, sequences: Sequence[SequenceState]) -> PlainStep:
        """The tokens that ``forward``, which is for ``sequences``, leads to."""
        tokens, logprobs, reduced = forward.reduced[:, 0], None, forward.reduced
        if not gives_tokens(forward.reduce):
            masks = TreeMasks([s.sampler for s in sequences], forward.roots)
            outcome = tree_outcome(forward.reduce, sequences, _ROOT, forward.roots, reduced, masks)
            tokens = outcome.last.masked_fill(~outcome.finite, _NO_TOKEN)
            if forward.reduce is None:
                logprobs = LogprobsAhead(sequences, reduced, outcome.path, outcome.tokens)
        # copies: the next forward may overwrite a session's outputs
        tokens = tokens.clone()
        return PlainStep(forward.seats, tokens, forward.aux, Readback(tokens), logprobs)

    def _append_tokens(
        self, done: PlainStep | TreeStep, sequences: Sequence[SequenceState]
    ) -> CycleOutcome:
        """The outcome of each sequence, which advances; None for those that are not in it."""
        rows = done.seats.rows_of(sequences)
        if isinstance(done, PlainStep):
            tokens = done.readback.wait()
            found = [Accepted((0,), (token,) if token >= 0 else ()) for token in tokens]
        else:
            found = Outcome.unpacked(done.readback.wait(), done.tree.steps)
        if done.logprobs is not None:
            found = done.logprobs.wait(found)
        for row, s in zip(rows, sequences, strict=True):
            if row >= 0 and found[row].steps and not s.drafting:
                found[row] = replace(found[row], steps=0)
        present = [(s, row) for s, row in zip(sequences, rows, strict=True) if row >= 0]
        for s, row in present:
            if s.sampler.error:
                found[row] = Accepted((0,), ())
        for s, row in present:
            take_draws(s, found[row].draws)
            _advance(s, found[row], done.aux if isinstance(done, PlainStep) else None, row)
        if isinstance(done, TreeStep):
            assert self._draft is not None
            advanced, seated = [s for s, _ in present], [row for _, row in present]
            self._draft.keep(advanced, seated, done.tree, done.tail)
            if done.filtered and _any_drafts(advanced):
                self._prepare(advanced, done.tree)
        tree = done.tree if isinstance(done, TreeStep) else None
        return CycleOutcome([found[row] if row >= 0 else None for row in rows], tree)

    def _prepare(self, sequences: Sequence[SequenceState], tree: AnyTree) -> None:
        """Propose the next trees of sequences whose tokens the host knows."""
        assert self._draft is not None
        if all(self._fits(s, tree) for s in sequences):
            lengths, num_rows = [s.length for s in sequences], tree.num_nodes + tree.num_draft_rows
            batch = self._batch(sequences, lengths, [-1] * len(sequences), num_rows)
            self._draft.prepare_for(sequences, tree, batch)

    def _goes_on(self, sequence: SequenceState, row: int) -> bool:
        """Whether ``sequence`` wants a token more than the step emits in which it has ``row``."""
        emitted = int(row >= 0)
        wanted = sequence.sampling.max_tokens - len(sequence.tokens) > emitted
        return wanted and sequence.num_tokens + emitted < self._max_seq_len

    def _fits(self, sequence: SequenceState, tree: AnyTree) -> bool:
        """Whether ``sequence`` can take ``tree`` now."""
        num_rows = sequence.length + max(tree.num_nodes, tree.num_draft_rows)
        return num_rows < self._max_seq_len and self._has_room(sequence, num_rows)

    def _has_room(self, sequence: SequenceState, num_rows: int) -> bool:
        """Whether ``num_rows`` rows have pages now; nobody is asked to give any back."""
        if self._states.lacking(sequence, num_rows) > 0:
            return False
        self._states.reserve(sequence, num_rows)
        return True

    def _batch(
        self,
        sequences: Sequence[SequenceState],
        lengths: Sequence[int],
        rows: Sequence[int],
        num_new: int,
    ) -> DeviceBatch:
        device = self._target.embedding.device
        size = padded_size(len(sequences), self.max_batch_size)
        return DeviceBatch.of(self._states, sequences, lengths, rows, num_new, size, device)

    def _verify(
        self, tree: AnyTree, proposal: Proposal, batch: DeviceBatch, reduce: Reduction | None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits f32 [B, T, V] of the nodes, or what ``reduce`` makes of them, and aux hidden
        states [B, T, k * H].
        """
        return self._forward(self._rows(tree, proposal, batch), reduce)

    def _forward(self, rows: Rows, reduce: Reduction | None) -> tuple[Tensor, Tensor | None]:
        return self._target.forward(rows.embeds, rows.metadata, rows.logit_rows, reduce=reduce)

    def _rows(self, tree: AnyTree, proposal: Proposal, batch: DeviceBatch) -> Rows:
        """The nodes of each sequence's tree."""
        size, num_nodes = proposal.tokens.shape
        device = batch.positions.device
        fixed = isinstance(tree, Tree)  # its shape is not to be copied every time
        depths = tree_shape(tree, device).depths if fixed else proposal.depths.int()
        metadata = AttentionMetadata(
            past=batch.lengths,
            counts=[num_nodes] * size,
            state_inputs=batch.state_inputs,
            mask=proposal.mask,
            positions=(batch.positions[:, None] + depths).expand(3, -1, -1),
        )
        embeds = self._target.embedding.lookup(proposal.tokens)
        return Rows(embeds, metadata, all_rows(size, num_nodes))

    def _commit(self, tree: AnyTree, batch: DeviceBatch, outcome: Outcome, page_size: int) -> None:
        """Move the rows of accepted nodes to the front; a chain's stand there already. States that
        have no rows are brought along the same nodes.
        """
        if not is_chain(tree):
            first = batch.lengths[:, None]
            nodes = torch.arange(tree.num_nodes, device=first.device)
            self._states.move(batch.state_inputs, first + outcome.path, first + nodes, page_size)
        self._states.replay(batch.state_inputs, outcome.path, outcome.counts)

    def _hand_on(self, done: PlainStep | TreeStep, sequences: Sequence[SequenceState]) -> None:
        """Let those of ``sequences`` that are in ``done`` have the states that it wrote, before
        anything is launched over them. Their tokens are appended in the same call.
        """
        rows = done.seats.rows_of(sequences)
        present = [s for s, row in zip(sequences, rows, strict=True) if row >= 0]
        self._states.hand_on(present)


def _any_drafts(sequences: Sequence[SequenceState]) -> bool:
    """Whether there is anything to propose for: those that draft may have left the others."""
    return any(s.draft for s in sequences)


def _advance(sequence: SequenceState, accepted: Accepted, aux: Tensor | None, row: int) -> None:
    """Append a plain step's token; ``aux`` [B, k * H] of it is kept for the draft."""
    if aux is not None and sequence.draft:
        sequence.deferred.append(RowRef(aux, row))
    sequence.append_tokens(accepted.tokens, accepted.logprobs)
    sequence.length += len(accepted.tokens)
