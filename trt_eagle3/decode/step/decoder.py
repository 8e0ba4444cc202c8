"""Decoder: prefills and decoding steps over one target and an optional draft."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from trt_eagle3.decode.forward.runner import TargetRunner
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.memory.state import LayerStates
from trt_eagle3.decode.speculation.drafter import Drafter
from trt_eagle3.decode.speculation.tree import AnyTree
from trt_eagle3.decode.step.in_flight import StepOutput
from trt_eagle3.decode.step.prefill import Prefiller
from trt_eagle3.decode.step.stepper import Stepper, num_tree_rows
from trt_eagle3.engine.runtime.buckets import BATCH_SIZES, PROMPT_LOGIT_ROWS

__all__ = ["Decoder"]


class Decoder:
    """Runs prefills and steps. The caller (``schedule.scheduler``) chooses sequences and pages.

    Attributes:
        prefiller: runs prompts. stepper: runs steps.
        drafter: the draft; None in a bundle without one.
    """

    def __init__(
        self,
        target: TargetRunner,
        drafter: Drafter | None,
        *,
        max_seq_len: int,
        prefill_chunk: int,
        fixed_shapes: bool = False,
        run_ahead: bool = True,
        max_batch_size: int | None = None,
    ) -> None:
        """Create a decoder.

        ``fixed_shapes``: pad batches and rows to recurring shapes, as captured graphs require.
        ``run_ahead``: launch steps ahead of the host, if shapes are fixed. ``max_batch_size``:
        batch rows that the sessions accept; None: any number.
        """
        self.max_seq_len = max_seq_len
        self.prefill_chunk = prefill_chunk
        self.drafter = drafter
        self._fixed_shapes = fixed_shapes
        self.max_batch_size = BATCH_SIZES[-1] if max_batch_size is None else max_batch_size
        self._target = target
        self.stepper = Stepper(
            target,
            drafter,
            max_seq_len=max_seq_len,
            max_batch_size=self.max_batch_size if fixed_shapes else None,
            run_ahead=fixed_shapes and run_ahead,
        )
        # batch rows of a prefill that splits prompts; a sequence with per-sequence states takes
        # exactly one row, so it is not split
        self.max_segments = 0 if self.states.has_snapshots else max_batch_size
        self.prefiller = Prefiller(
            target,
            drafter,
            self.stepper,
            max_seq_len=max_seq_len,
            chunk=prefill_chunk,
            max_segments=self.max_segments,
            fixed_shapes=fixed_shapes,
        )

    @property
    def states(self) -> LayerStates:
        """The target's layer states. Target and draft share their pages."""
        return self._target.states

    @property
    def runs_ahead(self) -> bool:
        """Whether steps are launched before the host has read the previous tokens."""
        return self.stepper.run_ahead

    def use_run_ahead(self) -> None:
        """Launch steps ahead of the host from now on, if shapes are fixed.

        Call it while no sequence is running.
        """
        self.stepper.run_ahead = self._fixed_shapes

    @property
    def captures_steps(self) -> bool:
        """Whether running a batch of padding captures graphs at little cost."""
        return self.runs_ahead and self._target.reduces

    @property
    def mixes(self) -> bool:
        """Whether a prefill may be batched with a step of decoding sequences."""
        return self.runs_ahead and self._target.mixes

    def capture_prompts(self, table_len: int, has_room: Callable[[], bool]) -> None:
        """Capture prefills of target and draft, as far as possible, while ``has_room``.

        ``table_len``: pages in a page table.
        """
        self._target.capture_rows(self.prefill_chunk, table_len, has_room)
        if self.drafter is not None:
            self.drafter.capture_prompts(self.prefill_chunk, table_len, has_room)

    def most_rows(self, sequence: SequenceState) -> int:
        """Return the most rows of a prompt in its next forward."""
        limit = PROMPT_LOGIT_ROWS if sequence.needs_prompt_logits else self.prefill_chunk
        return min(limit, self.prefill_chunk)

    def rows_wanted(self, sequence: SequenceState, tree: AnyTree | None) -> int:
        """Return the rows that the pages of ``sequence`` must hold for its next step.

        That includes the first step after its prompt.
        """
        takes = tree is not None and self.stepper.speculates(sequence, tree)
        return sequence.num_prefill + (num_tree_rows(tree) if tree and takes else 1)

    def rows_ahead(self, tree: AnyTree | None) -> int:
        """Return the most rows of a sequence that a step over ``tree`` launches ahead.

        They are needed in addition to ``rows_wanted``: accepted rows, and the next tree.
        """
        if not self.runs_ahead:
            return 0
        return 1 if tree is None else 2 * num_tree_rows(tree)

    def step(self, sequences: Sequence[SequenceState], tree: AnyTree | None) -> StepOutput:
        """Run one step; sequences that cannot take ``tree`` emit one token.

        A sequence whose logits are not finite emits no token and has failed.
        """
        return self.stepper.step(sequences, tree)

    def run(
        self, sequence: SequenceState, tree: AnyTree | None = None
    ) -> Generator[tuple[int, ...]]:
        """Decode one sequence alone; yields the tokens of each target forward.

        It ends when the caller stops, or at ``max_seq_len`` tokens.

        Raises:
            EngineFailedError: the target's logits are not finite.
        """
        try:
            while not sequence.prefilled:
                count = min(
                    self.most_rows(sequence), sequence.num_prefill - sequence.num_computed_tokens
                )
                self.states.reserve(sequence, sequence.num_computed_tokens + count)
                self.prefiller.run([(sequence, count)]).append()
                if sequence.num_computed_tokens >= sequence.num_prefill and not sequence.tokens:
                    raise sequence.failure()
            yield tuple(sequence.tokens)
            while sequence.num_tokens < self.max_seq_len:
                self.states.reserve(sequence, self.rows_wanted(sequence, tree))
                accepted = self.step([sequence], tree).accepted[0]
                if accepted is None or not accepted.tokens:
                    raise sequence.failure()
                yield accepted.tokens
        finally:
            self.states.release(sequence)
