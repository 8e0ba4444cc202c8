"""Stepper: one step of a batch, ``launch -> InFlight -> collect -> StepOutput``.

A step proposes a tree for each sequence and verifies all trees in one target forward. It accepts
tokens on the device and extends the draft there. Meanwhile the host reads the tokens. Without a
tree, a step is a forward over the roots.

With fixed shapes a step may run ahead of the host (``run_ahead``). A step without a tree takes its
roots from the previous step on the device. It is launched before the host reads the previous
tokens. A speculative step proposes the next trees at once. In a large batch, the next step is
launched before the tokens are delivered. Otherwise a step is collected as soon as it is launched.

Shapes: B sequences of a padded batch, T tree nodes, D nodes of the deepest path, k aux layers, H
target hidden, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trt_eagle3.decode.forward.device_batch import BatchRows, DeviceBatch
from trt_eagle3.decode.forward.runner import AttentionMetadata, TargetInputs, TargetRunner, all_rows
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.sampling.logprobs import LogprobsReadback
from trt_eagle3.decode.speculation.accept import Accepted, AcceptedPaths
from trt_eagle3.decode.speculation.drafter import Drafter
from trt_eagle3.decode.speculation.proposal import Proposal, tree_proposal, tree_shape
from trt_eagle3.decode.speculation.tree import AnyTree, Tree
from trt_eagle3.decode.speculation.tree_masks import TreeMasks
from trt_eagle3.decode.speculation.verify import LogitsForm, logits_form_of, take_draws, verify
from trt_eagle3.decode.step.in_flight import Forward, InFlight, StepOutput
from trt_eagle3.engine.runtime.buckets import padded_size
from trt_eagle3.engine.runtime.session import Reduction
from trt_eagle3.host_copy import Readback

__all__ = ["Stepper", "num_tree_rows"]

_ROOT = Tree.root_only()
_LAUNCHED_AHEAD = 8
"""Least batch size at which a speculative step is launched before the previous step's tokens are
delivered. A sequence that ended with those tokens wastes its rows: a large share of a small
batch."""

_Run = Callable[[TargetInputs, Reduction | None], tuple[Tensor, Tensor | None]]
"""Runs rows as ``TargetRunner.forward`` does."""


def num_tree_rows(tree: AnyTree) -> int:
    """Return the rows per sequence that ``tree`` needs in target and draft."""
    return max(tree.num_nodes, tree.num_draft_rows)


class Stepper:
    """Launches and collects steps.

    At most one step is in flight between two calls; ``launch_mixed`` may add the forward after it.

    Attributes:
        run_ahead: steps may run ahead of the host. Change it only while nothing is in flight.
        num_ahead: steps that were launched ahead so far.
    """

    def __init__(
        self,
        target: TargetRunner,
        drafter: Drafter | None,
        *,
        max_seq_len: int,
        max_batch_size: int | None,
        run_ahead: bool,
    ) -> None:
        """Create a stepper.

        ``max_batch_size``: the largest size that batches are padded to; None: they are not padded.
        ``run_ahead``: steps may run ahead of the host.
        """
        self.run_ahead = run_ahead
        self.num_ahead = 0
        self._target = target
        self._drafter = drafter
        self._states = target.states
        self._max_seq_len = max_seq_len
        self._max_batch_size = max_batch_size
        self._in_flight: InFlight | None = None
        self._mixed: Forward | None = None  # ran in one batch with a prefill

    def step(self, sequences: Sequence[SequenceState], tree: AnyTree | None) -> StepOutput:
        """Collect the step in flight; without one, launch a step over ``tree`` and collect it.

        A step in flight may be older than a sequence of the batch, or than a change of tree. These
        take effect with the next step.
        """
        if not any(self.speculates(s, tree) for s in sequences):
            tree = None
        in_flight, mixed = self._take(sequences)
        if in_flight is not None and in_flight.tree is None and tree is not None:
            self._swap_entries(in_flight, sequences)
            return self._collect(in_flight, sequences)  # the next step backfills these rows
        num_backfilled = self._backfill(sequences, tree)
        if in_flight is None and mixed is not None and tree is None:
            in_flight, mixed = self._accept(mixed), None
        elif in_flight is None:
            in_flight = self.launch(sequences, tree)
        self._swap_entries(in_flight, sequences)
        ahead: Forward | None = None
        if in_flight.tree is None and tree is None:
            ahead = mixed or self._forward_after(in_flight, sequences, self._forward)
        output = self._collect(in_flight, sequences)
        if ahead is not None:  # the host has the previous tokens now
            self._in_flight = self._accept(ahead)
        elif in_flight.tree is not None and tree is not None:
            self._in_flight = self._launch_ahead(sequences, tree)
        self.num_ahead += self._in_flight is not None
        return replace(output, num_backfilled=num_backfilled)

    def launch(self, sequences: Sequence[SequenceState], tree: AnyTree | None) -> InFlight:
        """Launch a step whose roots are on the host.

        It runs over ``tree`` for each sequence that can take it, else over the root.
        """
        speculates = [self.speculates(s, tree) for s in sequences]
        if tree is None or not any(speculates):
            return self._accept(self._first_forward(sequences, self._forward))
        assert self._drafter is not None
        self._states.check_tree(tree.num_nodes)
        if self.run_ahead:
            for s in sequences:  # near the limit no tree is proposed ahead, so fewer rows suffice
                self._try_reserve(
                    s, min(s.num_computed_tokens + _rows_ahead(tree), self._max_seq_len)
                )
        num_new = [num_tree_rows(tree) if takes_tree else 1 for takes_tree in speculates]
        num_computed_tokens = [s.num_computed_tokens for s in sequences]
        batch = self._batch(sequences, num_computed_tokens, [-1] * len(sequences), num_new)
        proposal = self._drafter.propose(sequences, tree, batch, speculates)
        masks = TreeMasks([s.sampler for s in sequences], proposal)
        logits_form = logits_form_of([s.sampler for s in sequences])
        reduced, aux = self._forward(self._rows(proposal, batch), logits_form.reduction)
        rows = BatchRows(sequences, num_computed_tokens, range(len(sequences)))
        forward = Forward(sequences, rows, batch, proposal, speculates, logits_form, reduced, aux)
        return self._accept(forward, masks)

    def launch_mixed(
        self, sequences: Sequence[SequenceState], prompts: TargetInputs
    ) -> tuple[Tensor, Tensor | None] | None:
        """Run ``prompts`` and the next step without a tree of ``sequences`` as one forward.

        ``step`` continues from that forward.

        Returns:
            As ``TargetRunner.forward`` of ``prompts``. None if nothing was run: a tree is being
            verified, no sequence continues, or pages are lacking.
        """
        prompt_outputs: list[tuple[Tensor, Tensor | None]] = []

        def run(rows: TargetInputs, reduce: Reduction | None) -> tuple[Tensor, Tensor | None]:
            of_prompts, of_steps = self._target.forward_mixed(prompts, rows, reduce)
            prompt_outputs.append(of_prompts)
            return of_steps

        before = self._in_flight
        if before is not None and before.tree is not None:
            return None
        if before is not None and max(before.rows.rows_of(sequences)) >= 0:
            self._mixed = self._forward_after(before, sequences, run)
        elif all(self._try_reserve(s, s.num_computed_tokens + 1) for s in sequences):
            self._mixed = self._first_forward(sequences, run)
        return prompt_outputs[0] if prompt_outputs else None

    def run_dummy(self, size: int, tree: AnyTree | None, table_len: int, times: int) -> None:
        """Run ``times`` steps of a batch of ``size`` padding rows.

        ``table_len``: pages in a page table.
        """
        table = self._target.embedding
        batch = DeviceBatch.dummy(self._states, size, table_len, table.num_tokens, table.device)
        for _ in range(times):
            if tree is None:
                roots = tree_proposal(_ROOT, batch.roots.long()[:, None])
                self._forward(self._rows(roots, batch), LogitsForm.TOKENS.reduction)
                continue
            assert self._drafter is not None
            proposal = self._drafter.dummy_proposal(tree, batch, table.dtype)
            reduced, aux = self._forward(self._rows(proposal, batch), LogitsForm.TOKENS.reduction)
            assert aux is not None
            paths = verify(LogitsForm.TOKENS, [], proposal, reduced, TreeMasks([], proposal))
            self._drafter.extend(batch, proposal, paths, aux, ahead=False)
            self._commit(batch, paths, page_size=1, in_place=True)

    def speculates(self, sequence: SequenceState, tree: AnyTree | None) -> bool:
        """Return whether ``sequence`` takes ``tree`` in its next step.

        Near the length limit it decodes without speculation.
        """
        return sequence.drafting and self._drafter is not None and self.holds(sequence, tree)

    def holds(self, sequence: SequenceState, tree: AnyTree | None) -> bool:
        """Return whether the length limit leaves room for ``tree`` after the known tokens."""
        if tree is None:
            return False
        return sequence.num_prefill + num_tree_rows(tree) < self._max_seq_len

    def _take(self, sequences: Sequence[SequenceState]) -> tuple[InFlight | None, Forward | None]:
        """Take the step in flight for any of ``sequences``, and the mixed forward after it."""
        in_flight, mixed = self._in_flight, self._mixed
        self._in_flight = self._mixed = None
        if in_flight is not None and max(in_flight.rows.rows_of(sequences)) < 0:
            in_flight = None
        return in_flight, mixed if mixed is not None and mixed.after is in_flight else None

    def _backfill(self, sequences: Sequence[SequenceState], tree: AnyTree | None) -> int:
        """Backfill the rows that the draft needs now; returns their number."""
        if self._drafter is None:
            return 0
        backfill = self._drafter.backfill
        return backfill.run(sequences if tree is not None else backfill.due(sequences))

    def _first_forward(self, sequences: Sequence[SequenceState], run: _Run) -> Forward:
        """Launch a forward over roots that are on the host."""
        return self._root_forward(sequences, None, [-1] * len(sequences), run)

    def _forward_after(
        self, before: InFlight, sequences: Sequence[SequenceState], run: _Run
    ) -> Forward | None:
        """Launch the forward after ``before``, over roots that are on the device.

        It runs the ``sequences`` that continue. None if no sequence continues, or pages are
        lacking.
        """
        if not self.run_ahead:
            return None
        rows = before.rows.rows_of(sequences)
        continuing = [
            (s, row)
            for s, row in zip(sequences, rows, strict=True)
            if self._continues(s, num_unread=int(row >= 0))
        ]
        if not continuing or not all(
            self._try_reserve(s, s.num_computed_tokens + 2) for s, _ in continuing
        ):
            return None
        before_rows = [row for _, row in continuing]
        return self._root_forward([s for s, _ in continuing], before, before_rows, run)

    def _root_forward(
        self,
        sequences: Sequence[SequenceState],
        before: InFlight | None,
        rows: Sequence[int],
        run: _Run,
    ) -> Forward:
        """Launch a forward over one root per sequence; ``rows``: its row in ``before``, or -1."""
        num_computed_tokens = [
            s.num_computed_tokens + (row >= 0) for s, row in zip(sequences, rows, strict=True)
        ]
        batch = self._batch(sequences, num_computed_tokens, rows, [1] * len(sequences))
        roots = batch.roots.long()
        if before is not None:
            unchanged = list(rows) == list(range(len(rows)))
            roots = _roots_after(before, batch, unchanged=unchanged)
        proposal = tree_proposal(_ROOT, roots[:, None])
        logits_form = logits_form_of([s.sampler for s in sequences])
        reduced, aux = run(self._rows(proposal, batch), logits_form.reduction)
        # a copy: the next forward may overwrite a session's outputs
        drafts = aux is not None and any(s.draft for s in sequences)
        aux = aux[:, :1].clone() if aux is not None and drafts else None
        own = BatchRows(sequences, num_computed_tokens, range(len(sequences)))
        return Forward(sequences, own, batch, proposal, (), logits_form, reduced, aux, before)

    def _accept(self, forward: Forward, masks: TreeMasks | None = None) -> InFlight:
        """Accept tokens of ``forward`` on the device, and commit the accepted rows.

        ``masks``: created before the forward; None for roots, whose masks need no draft.
        """
        sequences, batch, proposal = forward.sequences, forward.batch, forward.proposal
        samplers = [s.sampler for s in sequences]
        masks = masks or TreeMasks(samplers, proposal)
        paths = verify(forward.logits_form, samplers, proposal, forward.reduced, masks)
        logprobs = None
        if forward.logits_form is LogitsForm.FLOAT32:
            num_best = [s.sampling.logprobs for s in sequences]
            logprobs = LogprobsReadback(num_best, forward.reduced, paths.path, paths.tokens)
        packed = paths.packed()
        readback = Readback(packed)  # before the draft's work, so the host does not wait for it
        in_flight = InFlight(forward.rows, None, (), packed, readback, logprobs)
        if not forward.speculates:
            deferred = None if forward.aux is None else forward.aux[:, 0]
            return replace(in_flight, deferred=deferred)
        assert self._drafter is not None
        assert forward.aux is not None
        tree = proposal.tree
        waits = self.run_ahead and self._drafter.waits_for_host(sequences)
        num_rows = max(s.num_computed_tokens for s in sequences) + _rows_ahead(tree)
        ahead = self.run_ahead and not waits and num_rows <= self._max_seq_len
        drafted = self._drafter.extend(batch, proposal, paths, forward.aux, ahead=ahead)
        self._commit(batch, paths, sequences[0].pool.page_size, in_place=proposal.is_chain)
        return replace(
            in_flight,
            tree=tree,
            speculates=forward.speculates,
            last=paths.last,
            drafted=drafted,
            waits_for_host=waits,
        )

    def _commit(
        self, batch: DeviceBatch, paths: AcceptedPaths, page_size: int, *, in_place: bool
    ) -> None:
        """Commit the target's rows of accepted nodes; ``in_place``: they are already in front."""
        inputs, path, counts = batch.state_inputs, paths.path, paths.counts
        self._states.commit(
            inputs, batch.num_computed_tokens, path, counts, page_size, in_place=in_place
        )

    def _collect(self, done: InFlight, sequences: Sequence[SequenceState]) -> StepOutput:
        """Read the tokens of ``done`` and append them to the ``sequences`` that are in it.

        The caller has already swapped the entries of these sequences (``_swap_entries``).
        """
        rows = done.rows.rows_of(sequences)
        accepted_by_row = self._read(done, rows)
        members = [(s, row) for s, row in zip(sequences, rows, strict=True) if row >= 0]
        for s, row in members:
            if s.sampler.error:
                accepted_by_row[row] = Accepted(())
            take_draws(s.sampler, accepted_by_row[row].draws)
        member_sequences, member_rows = [s for s, _ in members], [row for _, row in members]
        if self._drafter is not None and done.deferred is not None:
            self._drafter.backfill.defer(member_sequences, member_rows, done.deferred)
        for s, row in members:
            accepted = accepted_by_row[row]
            s.append_tokens(accepted.tokens, accepted.logprobs)
            s.num_computed_tokens += len(accepted.tokens)
        if self._drafter is not None and done.tree is not None and done.drafted is not None:
            self._drafter.keep(member_sequences, member_rows, done.drafted)
            if done.waits_for_host:
                self._propose_ahead(member_sequences, done.tree)
        return StepOutput([accepted_by_row[row] if row >= 0 else None for row in rows], done.tree)

    def _swap_entries(self, done: InFlight, sequences: Sequence[SequenceState]) -> None:
        """Swap in the states that ``done`` wrote, for the ``sequences`` that are in it.

        This must come before the next launch over these sequences.
        """
        rows = done.rows.rows_of(sequences)
        self._states.swap_entries([s for s, row in zip(sequences, rows, strict=True) if row >= 0])

    def _read(self, done: InFlight, rows: Sequence[int]) -> list[Accepted]:
        """Read the tokens of each row of ``done``, and the log-probabilities at ``rows``."""
        depth = done.tree.depth if done.tree else 0
        accepted_by_row = AcceptedPaths.unpacked(done.readback.wait(), depth)
        for row in rows:
            if row < 0:
                continue
            accepted = accepted_by_row[row]
            if done.tree is not None and not done.speculates[row]:
                accepted = replace(accepted, tree_depth=0)
            if done.logprobs is not None:
                logprobs = done.logprobs.wait(row, len(accepted.tokens))
                accepted = replace(accepted, logprobs=logprobs)
            accepted_by_row[row] = accepted
        return accepted_by_row

    def _launch_ahead(self, sequences: Sequence[SequenceState], tree: AnyTree) -> InFlight | None:
        """Launch the next step of the ``sequences`` that continue.

        None for a small batch, or if pages are lacking.
        """
        if not self.run_ahead or len(sequences) < _LAUNCHED_AHEAD:
            return None
        continuing = [s for s in sequences if self._continues(s, num_unread=0)]
        num_rows = [num_tree_rows(tree) if self.speculates(s, tree) else 1 for s in continuing]
        pairs = zip(continuing, num_rows, strict=True)
        if max(num_rows, default=1) == 1 or not all(
            self._try_reserve(s, s.num_computed_tokens + n) for s, n in pairs
        ):
            return None
        return self.launch(continuing, tree)

    def _propose_ahead(self, sequences: Sequence[SequenceState], tree: AnyTree) -> None:
        """Propose the next trees, if all ``sequences`` can take one.

        Their tokens are on the host.
        """
        assert self._drafter is not None
        if not any(s.drafting for s in sequences) or not all(
            self.holds(s, tree)
            and self._try_reserve(s, s.num_computed_tokens + num_tree_rows(tree))
            for s in sequences
        ):
            return
        num_computed_tokens = [s.num_computed_tokens for s in sequences]
        num_new = [num_tree_rows(tree)] * len(sequences)
        batch = self._batch(sequences, num_computed_tokens, [-1] * len(sequences), num_new)
        self._drafter.propose_ahead(sequences, tree, batch)

    def _continues(self, sequence: SequenceState, *, num_unread: int) -> bool:
        """Return whether the limits leave ``sequence`` another token after ``num_unread`` more.

        ``num_unread``: emitted tokens that the host has not read.
        """
        has_tokens_left = len(sequence.tokens) + num_unread < sequence.sampling.max_tokens
        return has_tokens_left and sequence.num_tokens + num_unread < self._max_seq_len

    def _try_reserve(self, sequence: SequenceState, num_rows: int) -> bool:
        """Reserve pages for ``num_rows`` rows without preemption; returns False if lacking."""
        if self._states.lacking(sequence, num_rows) > 0:
            return False
        self._states.reserve(sequence, num_rows)
        return True

    def _batch(
        self,
        sequences: Sequence[SequenceState],
        num_computed_tokens: Sequence[int],
        rows: Sequence[int],
        num_new: Sequence[int],
    ) -> DeviceBatch:
        size = len(sequences)
        if self._max_batch_size is not None:
            size = padded_size(size, self._max_batch_size)
        device = self._target.embedding.device
        return DeviceBatch.of(
            self._states, sequences, num_computed_tokens, rows, num_new, size, device
        )

    def _forward(
        self, rows: TargetInputs, reduce: Reduction | None
    ) -> tuple[Tensor, Tensor | None]:
        return self._target.forward(rows.embeds, rows.metadata, rows.logit_rows, reduce=reduce)

    def _rows(self, proposal: Proposal, batch: DeviceBatch) -> TargetInputs:
        """Build the target's inputs from the tree nodes of each sequence."""
        size, num_nodes = proposal.tokens.shape
        tree, device = proposal.tree, batch.positions.device
        fixed = isinstance(tree, Tree)  # its shape is cached on the device
        depths = tree_shape(tree, device).depths if fixed else proposal.depths.int()
        metadata = AttentionMetadata(
            past=batch.num_computed_tokens,
            counts=[num_nodes] * size if proposal.num_kept is None else proposal.num_kept,
            state_inputs=batch.state_inputs,
            mask=proposal.mask,
            positions=(batch.positions[:, None] + depths).expand(3, -1, -1),
        )
        embeds = self._target.embedding.lookup(proposal.tokens)
        return TargetInputs(embeds, metadata, all_rows(size, num_nodes))


def _rows_ahead(tree: AnyTree) -> int:
    """Return the rows per sequence that a step over ``tree`` and the next tree need."""
    return 2 * num_tree_rows(tree)


def _roots_after(before: InFlight, batch: DeviceBatch, *, unchanged: bool) -> Tensor:
    """Return the last token of each row of ``batch``, int64 [B].

    It comes from ``before``, or from the host for rows that are not in ``before``. ``unchanged``:
    both batches have the same rows.
    """
    emitted = before.last.clamp(min=0)
    if unchanged and len(emitted) == batch.size:
        return emitted
    emitted = emitted.index_select(0, batch.rows.clamp(min=0))
    return torch.where(batch.rows >= 0, emitted, batch.roots.long())
