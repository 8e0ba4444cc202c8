"""The decoder: prefill, then cycles of propose, verify, accept, compact, extend, over a batch of
sequences.

Shapes: B sequences, S rows of each in one pass, T tree nodes, H target hidden, Hd draft hidden, V
vocab. Sequences that need fewer rows than S are padded; padding writes to page 0.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trt_eagle3.decode.forward.batch import (
    of_width,
    padded,
    segment_inputs,
    segment_metadata,
    widened,
)
from trt_eagle3.decode.forward.prompt_rows import PromptRows
from trt_eagle3.decode.forward.runner import AttentionMetadata, Rows, TargetRunner, all_rows
from trt_eagle3.decode.forward.segment import Segment, cut, last_segments
from trt_eagle3.decode.memory.row_ref import RowRef, rows_of
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.memory.state import Commit, LayerStates
from trt_eagle3.decode.speculation.accept import Accepted, CycleOutcome
from trt_eagle3.decode.speculation.catch_up import CatchUp
from trt_eagle3.decode.speculation.draft_ahead import DraftAhead
from trt_eagle3.decode.speculation.drafting import Drafting
from trt_eagle3.decode.speculation.propose import Drafters, Proposal, draft_decode_position
from trt_eagle3.decode.speculation.tree import AnyTree
from trt_eagle3.decode.speculation.tree_masks import TreeMasks
from trt_eagle3.decode.speculation.verify import verify_tree
from trt_eagle3.decode.step.async_cycle import AsyncCycles
from trt_eagle3.decode.step.first_token import FirstTokens
from trt_eagle3.engine.buckets import BATCH_SIZES, PROMPTS

__all__ = ["AnyTree", "Decoder", "Drafting"]


class Decoder:
    """Advances sequences.

    Who runs when, and with which pages, is its caller's choice (``scheduler``).
    """

    def __init__(
        self,
        target: TargetRunner,
        drafting: Drafting | None,
        *,
        max_seq_len: int,
        prefill_chunk: int,
        fixed_shapes: bool = False,
        asynchronous: bool = True,
        max_batch_size: int | None = None,
    ) -> None:
        """``fixed_shapes``: pad batches, and the draft's rows after a cycle to the tree's width, so
        that CUDA graphs fit again. ``asynchronous``: cycles are, where shapes are fixed.
        ``max_batch_size``: batch rows that the sessions take, and to which batches are padded at
        most; None: any.
        """
        self.max_seq_len = max_seq_len
        self.prefill_chunk = prefill_chunk
        self._target = target
        self._drafting = drafting
        self._fixed_shapes = fixed_shapes
        self._max_batch_size = max_batch_size
        self.catch_up: CatchUp | None = None
        if drafting is not None:
            self.catch_up = CatchUp(
                drafting,
                max_rows=prefill_chunk,
                max_sequences=max_batch_size,
                fixed_shapes=fixed_shapes,
            )
        self._async: AsyncCycles | None = None
        if fixed_shapes and asynchronous:
            draft = DraftAhead(drafting.proposer, drafting.manifest) if drafting else None
            most = BATCH_SIZES[-1] if max_batch_size is None else max_batch_size
            self._async = AsyncCycles(target, draft, max_seq_len=max_seq_len, max_batch_size=most)

    @property
    def max_segments(self) -> int | None:
        """Batch rows of a prefill whose prompts are cut, None: any; 0: a sequence is in one row
        alone, as its per-sequence states are.
        """
        return 0 if self.states.has_snapshots else self._max_batch_size

    @property
    def async_cycles(self) -> AsyncCycles | None:
        """Cycles whose shapes can be captured ahead; None where they do not stand still."""
        return self._async

    @property
    def states(self) -> LayerStates:
        """What the target's layers keep of every sequence; its pages are the draft's too."""
        return self._target.states

    def speculates(self, sequence: SequenceState, tree: AnyTree | None) -> bool:
        """Whether ``sequence``, once prefilled, can take ``tree``: near the length limit it
        decodes plainly.
        """
        return sequence.drafting and self._drafting is not None and self._holds(sequence, tree)

    def _holds(self, sequence: SequenceState, tree: AnyTree | None) -> bool:
        return tree is not None and sequence.num_prefill + _num_rows(tree) < self.max_seq_len

    def rows_wanted(self, sequence: SequenceState, tree: AnyTree | None) -> int:
        """Rows that the pages of ``sequence`` must hold for its next cycle, the first one after
        its prompt included.
        """
        along = self.async_cycles is not None and not sequence.drafting  # with others' trees
        takes = (along and self._holds(sequence, tree)) or self.speculates(sequence, tree)
        return sequence.num_prefill + (_num_rows(tree) if tree and takes else 1)

    def rows_ahead(self, tree: AnyTree | None) -> int:
        """Rows of a sequence at most that are launched in its cycle over ``tree`` besides those of
        ``rows_wanted``: those accepted, and the next tree.
        """
        if not self.launches_ahead:
            return 0
        return 1 if tree is None else 2 * _num_rows(tree)

    def run(
        self, sequence: SequenceState, tree: AnyTree | None = None
    ) -> Generator[tuple[int, ...]]:
        """Decode one sequence alone; yields the tokens of each target pass until the caller stops,
        or the sequence has ``max_seq_len`` tokens.

        Raises:
            EngineFailedError: the target's logits are no numbers.
        """
        try:
            while not sequence.prefilled:
                count = min(self.prefill_chunk, sequence.num_prefill - sequence.length)
                self.states.reserve(sequence, sequence.length + count)
                self.prefill([(sequence, count)]).append()
                if sequence.length >= sequence.num_prefill and not sequence.tokens:
                    raise sequence.failure()
            yield tuple(sequence.tokens)
            while sequence.num_tokens < self.max_seq_len:
                self.states.reserve(sequence, self.rows_wanted(sequence, tree))
                accepted = self.cycle([sequence], tree).accepted[0]
                if accepted is None or not accepted.tokens:
                    raise sequence.failure()
                yield accepted.tokens
        finally:
            self.states.release(sequence)

    @property
    def launches_ahead(self) -> bool:
        """Whether a prefill may be launched before the first tokens of the one before are read."""
        return self.async_cycles is not None

    @property
    def mixes(self) -> bool:
        """Whether a prefill may run with a step of sequences that decode."""
        return self.async_cycles is not None and self._target.mixes

    def capture_rows(self, table_len: int, has_room: Callable[[], bool]) -> None:
        """Capture what can be of prefills, the draft's part of them among it, while ``has_room``;
        ``table_len``: pages in a page table.
        """
        self._target.capture_rows(self.prefill_chunk, table_len, has_room)
        if self._drafting is not None:
            runner = self._drafting.proposer.runner
            runner.capture_rows(self.prefill_chunk, table_len, has_room)

    def prefill(
        self,
        chunks: Sequence[tuple[SequenceState, int]],
        beside: Sequence[SequenceState] = (),
    ) -> FirstTokens:
        """Launch the next rows of each sequence, so many of each. One that is through with its
        prompt has a token when the caller appends it; none, if its logits are no numbers.

        ``beside``: sequences that decode plainly, where this ``mixes``: their next step may run in
        the same forward, and ``cycle`` goes on from there.
        """
        segments = cut(chunks, self.max_segments)
        width = self._prompt_width(segments, len(beside))
        table = self._target.embedding
        rows = PromptRows.of(segments, width, table.device)
        embeds = table.lookup(rows.ids[:, :-1])
        inputs = segment_inputs(self.states, segments)
        metadata = segment_metadata(segments, rows.positions[..., :-1], inputs, embeds.device)
        visual_levels = None
        if any(s.sequence.prompt.has_visual(s.start, s.count) for s in segments):
            visual_levels = embeds.new_zeros(self._target.num_visual_levels, *embeds.shape)
            for i, s in enumerate(segments):
                s.sequence.prompt.put_visual(embeds[i], s.start)
                s.sequence.prompt.put_visual_levels(visual_levels[:, i], s.start)
        last_rows = torch.tensor([[s.count - 1] for s in segments])
        mixed = None
        if beside and self._async is not None:
            mixed = self._async.launch_beside(
                beside, Rows(embeds, metadata, last_rows, visual_levels)
            )
        logits, aux = mixed or self._target.forward(embeds, metadata, last_rows, visual_levels)
        first_tokens = FirstTokens(chunks, rows_of(logits[:, 0], last_segments(segments)))
        try:
            if aux is not None:
                self._draft_prompt(rows, inputs["page_table"], aux, first_tokens)
        except Exception:
            # who is prefilled again, since the draft ran out of memory, has its token
            first_tokens.append()
            raise
        # last: a prefill whose draft runs out of memory is run again, over the same states
        self.states.commit([Commit(s, s.length, range(count)) for s, count in chunks])
        for sequence, count in chunks:
            sequence.length += count
        return first_tokens

    def _prompt_width(self, segments: Sequence[Segment], num_beside: int = 0) -> int:
        """Rows of each of ``segments`` in one forward; one alone is padded, with ``num_beside``
        others, to a width that comes again, if chunk and length limit hold that.
        """
        widest = max(s.count for s in segments)
        if not self._fixed_shapes or len(segments) > 1:
            return widest
        room = min(self.prefill_chunk - num_beside, self.max_seq_len - segments[0].start)
        return max(widest, min(PROMPTS.size_of(widest + num_beside) - num_beside, room))

    def cycle(self, sequences: Sequence[SequenceState], tree: AnyTree | None) -> CycleOutcome:
        """What one target forward over a tree of each sequence says; those that cannot take
        ``tree`` emit one token.

        A sequence whose logits are no numbers says nothing, and cannot go on. Where a pass runs
        since the last call, it is that one's outcome, and ``tree`` is for the next.
        """
        cycles = self.async_cycles
        if not any(s.drafting for s in sequences):
            tree = None
        if cycles is not None and cycles.only_plain and tree is not None:
            running = cycles.finish(sequences)  # before the draft catches up, with its row too
            if running is not None:
                return running
        if self.catch_up is not None:
            self.catch_up.run(sequences if tree is not None else self.catch_up.late(sequences))
        speculating = [i for i, s in enumerate(sequences) if self.speculates(s, tree)]
        others = [s for i, s in enumerate(sequences) if i not in speculating]
        if cycles is not None and (
            not speculating or not others or cycles.takes_along(others, tree)
        ):
            return cycles.cycle(sequences, tree if speculating else None)
        found = cycles.finish(sequences) if cycles is not None else None
        return found or self._cycle(sequences, tree, speculating)

    def _cycle(
        self,
        sequences: Sequence[SequenceState],
        tree: AnyTree | None,
        speculating: Sequence[int],
    ) -> CycleOutcome:
        """A cycle of any sequences, those at ``speculating`` with ``tree``."""
        proposal = widened(
            self._propose([sequences[i] for i in speculating], tree), speculating, sequences
        )
        num_nodes = proposal.tokens.shape[1]
        counts = [num_nodes if i in speculating else 1 for i in range(len(sequences))]
        masks = TreeMasks([s.sampler for s in sequences], proposal)
        logits, aux = self._verify(sequences, proposal, counts)
        found = verify_tree(sequences, proposal, logits, counts, masks)
        self.states.commit(
            [
                Commit(s, s.length, accepted.path[: len(accepted.tokens)])
                for s, accepted in zip(sequences, found, strict=True)
            ]
        )
        if aux is not None and tree is not None:
            self._extend(sequences, found, aux, num_nodes)
        elif aux is not None:
            self._defer(sequences, aux)
        for sequence, accepted in zip(sequences, found, strict=True):
            sequence.append_tokens(accepted.tokens, accepted.logprobs)
            sequence.length += len(accepted.tokens)
        depths = dict.fromkeys(speculating, tree.steps) if tree else {}
        said = [replace(accepted, steps=depths.get(i, 0)) for i, accepted in enumerate(found)]
        return CycleOutcome(said, tree if speculating else None)

    def _draft_prompt(
        self, rows: PromptRows, page_table: Tensor, aux: Tensor, first_tokens: FirstTokens
    ) -> None:
        """Give those of the rows to the draft that it follows."""
        followed = [i for i, s in enumerate(rows.segments) if s.sequence.drafting]
        if self._drafting is None or not followed:
            return
        # a width that comes again, where others beside the prompt made the target's an odd one
        width = self._prompt_width([rows.segments[i] for i in followed])
        aux = of_width(rows_of(aux, followed), width, dim=1)
        some = rows.only(followed, width)
        self._drafting.follow(some, rows_of(page_table, followed), aux, first_tokens)

    def _propose(self, sequences: Sequence[SequenceState], tree: AnyTree | None) -> Proposal | None:
        if not sequences or tree is None or self._drafting is None:
            return None
        manifest = self._drafting.manifest
        for s in sequences:
            assert s.draft_length == s.length, (
                f"draft holds {s.draft_length} rows, target {s.length}"
            )
        positions = [
            draft_decode_position(manifest, s.length, s.length + s.prompt.rope_delta)
            for s in sequences
        ]
        drafters = Drafters(
            states=[s.draft for s in sequences if s.draft],
            roots=[s.tokens[-1] for s in sequences],
            positions=positions,
            state_inputs=self._drafting.proposer.runner.states.inputs(
                sequences, [s.length + tree.num_draft_rows for s in sequences]
            ),
            filter=self._drafting.proposer.filter_of([s.sampler for s in sequences]),
        )
        return self._drafting.proposer.propose(tree, drafters)

    def _verify(
        self, sequences: Sequence[SequenceState], proposal: Proposal, counts: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Logits f32 [B, T, V] and aux hidden states [B, T, k * H] of the nodes."""
        position = torch.tensor([s.length + s.prompt.rope_delta for s in sequences])[:, None]
        positions = proposal.depths + position.to(proposal.depths.device, non_blocking=True)
        metadata = AttentionMetadata(
            past=[s.length for s in sequences],
            counts=counts,
            state_inputs=self.states.inputs(
                sequences, [s.length + n for s, n in zip(sequences, counts, strict=True)]
            ),
            mask=proposal.mask,
            positions=positions.int().expand(3, -1, -1),
        )
        rows = all_rows(*proposal.tokens.shape)
        return self._target.forward(self._target.embedding.lookup(proposal.tokens), metadata, rows)

    def _extend(
        self,
        sequences: Sequence[SequenceState],
        found: Sequence[Accepted],
        aux: Tensor,
        num_nodes: int,
    ) -> None:
        """Overwrite the draft's guesses by rows with true features for what was accepted."""
        rows = [i for i, s in enumerate(sequences) if s.draft]
        if self._drafting is None or not rows:
            return
        some, paths = [sequences[i] for i in rows], [found[i].path for i in rows]
        counts = [len(path) for path in paths]
        width = num_nodes if self._fixed_shapes else max(counts)
        aux = rows_of(aux, rows)
        if all(path == tuple(range(len(path))) for path in paths):
            aux = aux[:, :width]
        else:
            index = padded([torch.tensor(path) for path in paths], width).to(
                aux.device, non_blocking=True
            )
            aux = aux.gather(1, index[..., None].expand(-1, -1, aux.shape[2]))
        tokens = padded([torch.tensor(found[i].tokens, dtype=torch.int64) for i in rows], width)
        embeds = self._drafting.proposer.runner.embedding.lookup(tokens)
        segments = [Segment(s, s.draft_length, n) for s, n in zip(some, counts, strict=True)]
        self._drafting.extend(segments, embeds, aux)

    def _defer(self, sequences: Sequence[SequenceState], aux: Tensor) -> None:
        """Keep what the draft will want if speculation pays again: asking it now would be for
        nothing.
        """
        if not any(s.draft for s in sequences):
            return
        rows = aux[:, 0].clone()  # the next forward overwrites a session's outputs
        for i, s in enumerate(sequences):
            if s.draft:
                s.deferred.append(RowRef(rows, i))


def _num_rows(tree: AnyTree) -> int:
    return max(tree.num_nodes, tree.num_draft_rows)
