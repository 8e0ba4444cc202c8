"""Drafter: what decoding calls of a draft, and what all kinds of drafts do alike.

Shapes: B sequences of a padded batch, S rows of each, T tree nodes, D nodes of the deepest path, k
aux layers, H target hidden, P pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.decode.forward.block_runner import BlockRunner
from trt_eagle3.decode.forward.device_batch import DeviceBatch
from trt_eagle3.decode.forward.prompt_rows import PromptRows
from trt_eagle3.decode.forward.runner import DraftRunner
from trt_eagle3.decode.forward.segment import Segment
from trt_eagle3.decode.memory.sequence import DraftState, SequenceState
from trt_eagle3.decode.sampling.sampler import Sampler
from trt_eagle3.decode.speculation.accept import AcceptedPaths
from trt_eagle3.decode.speculation.backfill import BackfillShapes, DraftBackfill
from trt_eagle3.decode.speculation.draft_filter import DraftFilter, filtered_states
from trt_eagle3.decode.speculation.prepared import PreparedTrees, num_kept_of
from trt_eagle3.decode.speculation.proposal import Proposal
from trt_eagle3.decode.speculation.tree import AnyTree

__all__ = ["DraftOutput", "Drafter"]


@dataclass(frozen=True)
class DraftOutput:
    """Output of ``extend``, which only the drafter that made it reads.

    ``proposal``: the next trees; None if they were not requested.
    """

    proposal: Proposal | None


class Drafter(ABC):
    """Proposes trees, and keeps its own rows for every sequence with ``drafting``.

    ``backfill`` holds the rows that were decoded without the draft. Only the drafter tracks whether
    its rows are up to date.
    """

    runner: DraftRunner | BlockRunner
    manifest: DraftManifest

    def __init__(
        self,
        runner: DraftRunner | BlockRunner,
        manifest: DraftManifest,
        **shapes: Unpack[BackfillShapes],
    ) -> None:
        """Create a drafter. ``shapes``: as for ``DraftBackfill``."""
        self.runner = runner
        self.manifest = manifest
        aux_width = len(manifest.aux_layers) * manifest.target_hidden_size
        self.backfill = DraftBackfill(runner.embedding, aux_width, self._commit, **shapes)
        self._prepared = PreparedTrees()

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Map the draft's token ids to the target's, both int64 [...]."""
        return self.runner.target_ids(draft_ids)

    def capture_prompts(self, max_rows: int, table_len: int, has_room: Callable[[], bool]) -> None:
        """Capture forwards over up to ``max_rows`` prompt rows, as far as possible.

        Stops when ``has_room`` is False. ``table_len``: pages in a page table.
        """
        self.runner.capture_rows(max_rows, table_len, has_room)

    @abstractmethod
    def prefill(self, rows: PromptRows, next_ids: Tensor, page_table: Tensor, aux: Tensor) -> None:
        """Run over rows of prompts.

        Args:
            next_ids: int64 [B, S]: the token after each row. page_table: int32 [B, P], the
                target's. aux: [B, S, k * H].
        """

    @abstractmethod
    def _commit(self, segments: Sequence[Segment], aux: Tensor) -> None:
        """Run over deferred rows (``backfill.Commit``)."""

    def propose(
        self,
        sequences: Sequence[SequenceState],
        tree: AnyTree,
        batch: DeviceBatch,
        speculates: Sequence[bool],
    ) -> Proposal:
        """Propose a ``tree`` for each row of ``batch``: one proposed ahead if it fits, else anew.

        ``num_kept`` is 1 for a sequence that does not speculate.
        """
        num_kept = num_kept_of(speculates, tree, batch)
        proposal = self._prepared.take(sequences, tree, batch.size)
        if proposal is None:
            rows = batch if num_kept is None else batch.only(num_kept > 1)
            proposal = self._propose_checked(sequences, tree, rows, speculates)
        return proposal if num_kept is None else replace(proposal, num_kept=num_kept)

    def _propose_checked(
        self,
        sequences: Sequence[SequenceState],
        tree: AnyTree,
        rows: DeviceBatch,
        speculates: Sequence[bool],
    ) -> Proposal:
        """Propose trees for ``rows``, in which sequences that do not speculate are padding."""
        for s, takes_tree in zip(sequences, speculates, strict=True):
            assert not takes_tree or s.num_draft_computed_tokens == s.num_computed_tokens, (
                f"draft holds {s.num_draft_computed_tokens} rows, target {s.num_computed_tokens}"
            )
        samplers = [
            s.sampler if takes_tree else None
            for s, takes_tree in zip(sequences, speculates, strict=True)
        ]
        return self._propose_now(sequences, tree, rows, samplers)

    @abstractmethod
    def _propose_now(
        self,
        sequences: Sequence[SequenceState],
        tree: AnyTree,
        rows: DeviceBatch,
        samplers: Sequence[Sampler | None],
    ) -> Proposal:
        """Propose trees for ``rows``. ``samplers``: None for a sequence that does not speculate."""

    def _filter_of(self, samplers: Sequence[Sampler | None]) -> DraftFilter | None:
        """Return the filter of tokens that the grammars of ``samplers`` forbid, if it pays."""
        states = filtered_states(samplers)
        return DraftFilter(states, self.target_ids) if DraftFilter.pays(states) else None

    @abstractmethod
    def extend(
        self,
        batch: DeviceBatch,
        proposal: Proposal,
        paths: AcceptedPaths,
        aux: Tensor,
        *,
        ahead: bool,
    ) -> DraftOutput:
        """Overwrite drafted rows of accepted tokens by rows from the target's hidden states.

        Args:
            aux: [B, T, k * H] of the nodes. ahead: also propose the next trees.
        """

    def keep(
        self,
        sequences: Sequence[SequenceState],
        rows: Sequence[int],
        output: DraftOutput,
    ) -> None:
        """Store ``output`` for ``sequences``, at ``rows`` of the batch.

        Called when their tokens are on the host.
        """
        for s, row in zip(sequences, rows, strict=True):
            if s.drafting:
                s.draft = self._state_at(output, row)
                s.num_draft_computed_tokens = s.num_computed_tokens
        if output.proposal is not None:
            self._prepared.put(sequences, rows, output.proposal)

    @abstractmethod
    def _state_at(self, output: DraftOutput, row: int) -> DraftState:
        """Return the state of the sequence at ``row`` of the batch."""

    def waits_for_host(self, sequences: Sequence[SequenceState]) -> bool:
        """Return whether proposing the next trees requires the last tokens on the host.

        That is so if drafts are filtered by grammars, whose states the host advances.
        """
        return DraftFilter.pays(filtered_states([s.sampler for s in sequences]))

    def propose_ahead(
        self, sequences: Sequence[SequenceState], tree: AnyTree, batch: DeviceBatch
    ) -> None:
        """Propose the next trees of sequences whose tokens are on the host."""
        proposal = self._propose_checked(sequences, tree, batch, [s.drafting for s in sequences])
        self._prepared.put(sequences, range(len(sequences)), proposal)

    @abstractmethod
    def dummy_proposal(self, tree: AnyTree, batch: DeviceBatch, dtype: torch.dtype) -> Proposal:
        """Propose trees for a batch of padding, so that graphs of these shapes are captured.

        Their tokens are spread over the vocabulary.
        """
