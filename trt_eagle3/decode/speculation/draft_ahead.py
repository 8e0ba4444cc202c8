"""The draft of asynchronous cycles: it is extended by what the device accepted, and proposes the
next trees before the host knows of it.

Shapes: B sequences of a padded batch, T tree nodes, k aux layers, H target hidden, Hd draft hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.decode.forward.batch import causal_mask_of
from trt_eagle3.decode.forward.device_batch import DeviceBatch, Seats, spread_tokens
from trt_eagle3.decode.forward.runner import AttentionMetadata
from trt_eagle3.decode.memory.sequence import DraftState, SequenceState
from trt_eagle3.decode.sampling.sampler import Sampler
from trt_eagle3.decode.speculation.draft_filter import DraftFilter, filtered_states
from trt_eagle3.decode.speculation.outcome import Outcome, is_chain
from trt_eagle3.decode.speculation.propose import (
    DeviceDrafters,
    Proposal,
    Proposer,
    draft_decode_position,
    tree_proposal,
)
from trt_eagle3.decode.speculation.tree import AnyTree, Tree
from trt_eagle3.host_copy import to_device

__all__ = ["DraftAhead", "Tail"]


@dataclass(frozen=True)
class _Prepared:
    """Trees that were proposed for whoever sat in a cycle."""

    seats: Seats
    tree: AnyTree
    proposal: Proposal


@dataclass(frozen=True)
class Tail:
    """What the draft knows after a cycle, on the device.

    Attributes:
        logits: f32 [B, Vd] and features: [B, Hd] of the draft's last rows.
        prepared: the next trees; None where they would not fit.
    """

    logits: Tensor
    features: Tensor
    prepared: Proposal | None


class DraftAhead:
    """Proposes for the next cycle as soon as the device knows from where on."""

    def __init__(self, proposer: Proposer, manifest: DraftManifest) -> None:
        self._proposer = proposer
        self._manifest = manifest
        self._prepared: _Prepared | None = None

    def filters(self, samplers: Sequence[Sampler]) -> bool:
        """Whether the next trees are to be kept to grammars."""
        return DraftFilter.pays(filtered_states(samplers))

    def proposal(
        self, sequences: Sequence[SequenceState], tree: AnyTree, batch: DeviceBatch
    ) -> Proposal:
        """What was proposed ahead, where it is for these; else what is proposed now: anything for
        those that no draft follows.
        """
        ready, self._prepared = self._prepared, None
        if ready is not None and (ready.tree == tree or _begins_with(ready.tree, tree)):
            rows = ready.seats.rows_of(sequences)
            if min(rows) >= 0:
                return _selected(ready, tree, rows, batch.size)
        known = next(s.draft for s in sequences if s.draft)
        assert all(s.draft or not s.drafting for s in sequences), "it drafts, and never did"
        states = [s.draft or known for s in sequences]
        states += [known] * (batch.size - len(states))
        samplers = [s.sampler for s in sequences]
        return self._propose(tree, batch, *DraftState.gather(states), samplers)

    def extend(
        self, batch: DeviceBatch, outcome: Outcome, aux: Tensor, *, in_place: bool
    ) -> DeviceDrafters:
        """Overwrite the draft's guesses by rows with true features for what was accepted.

        Args:
            aux: [B, T, k * H] of the nodes. in_place: the accepted nodes are always the first ones.
        """
        runner = self._proposer.runner
        if not in_place:
            aux = aux.gather(1, outcome.path[..., None].expand(-1, -1, aux.shape[2]))
        size, width = outcome.path.shape
        nodes = _nodes(width, aux.device)
        first = draft_decode_position(self._manifest, batch.lengths, batch.positions)
        counts = outcome.counts.int()
        metadata = AttentionMetadata(
            past=batch.lengths,
            counts=counts,
            state_inputs=batch.pages,
            mask=causal_mask_of(width, aux.device).expand(size, -1, -1),
            positions=(first[:, None] + nodes).expand(3, -1, -1),
        )
        end = outcome.counts[:, None] - 1
        embeds = runner.embedding.lookup(outcome.tokens.clamp(min=0))
        logits, out = runner.forward(embeds, runner.fuse(aux), metadata, end)
        return DeviceDrafters(
            logits=logits[:, 0].clone(),  # the next run may overwrite a session's outputs
            features=out.gather(1, end[..., None].expand(-1, -1, out.shape[2]))[:, 0],
            lengths=batch.lengths + counts,
            roots=outcome.last.clamp(min=0),
            positions=first + counts,
            state_inputs=batch.pages,
        )

    def follow(
        self, tree: AnyTree, outcome: Outcome, aux: Tensor, batch: DeviceBatch, *, ahead: bool
    ) -> Tail:
        """Extend by ``outcome``, and propose again where the next trees are wanted (``ahead``)."""
        drafters = self.extend(batch, outcome, aux, in_place=is_chain(tree))
        prepared = self.prepare(tree, drafters) if ahead else None
        return Tail(drafters.logits, drafters.features, prepared)

    def prepare(
        self,
        tree: AnyTree,
        drafters: DeviceDrafters,
        samplers: Sequence[Sampler | None] = (),
    ) -> Proposal:
        """The next trees; ``keep`` says whose they are. ``samplers``: by row, those of whom the
        host knows what they have said.
        """
        drafters = replace(drafters, filter=self._proposer.filter_of(samplers))
        return self._proposer.propose(tree, drafters)

    def prepare_for(
        self, sequences: Sequence[SequenceState], tree: AnyTree, batch: DeviceBatch
    ) -> None:
        """Propose for sequences of which the host knows what they have said."""
        proposal = self.proposal(sequences, tree, batch)
        seats = Seats(sequences, [s.length for s in sequences], range(len(sequences)))
        self._prepared = _Prepared(seats, tree, proposal)

    def keep(
        self,
        sequences: Sequence[SequenceState],
        rows: Sequence[int],
        tree: AnyTree,
        tail: Tail,
    ) -> None:
        """Remember what the draft knows of ``sequences``, at ``rows`` of the batch, after their
        cycle, and their trees.
        """
        for s, row in zip(sequences, rows, strict=True):
            if s.drafting:
                s.draft = DraftState(s.length, tail.logits, tail.features, row)
                s.draft_length = s.length
        if tail.prepared is not None:
            seats = Seats(sequences, [s.length for s in sequences], rows)
            self._prepared = _Prepared(seats, tree, tail.prepared)

    def run_nobody(self, tree: AnyTree, batch: DeviceBatch, dtype: torch.dtype) -> Proposal:
        """Trees of padding alone, so that graphs of these shapes are captured; their tokens are of
        all the vocabulary.
        """
        m, device = self._manifest, batch.lengths.device
        logits = torch.zeros(batch.size, m.draft_vocab_size, device=device)
        features = torch.zeros(batch.size, m.hidden_size, dtype=dtype, device=device)
        proposal = self._propose(tree, batch, logits, features)
        tokens = spread_tokens(tuple(proposal.tokens.shape), m.vocab_size, device)
        return replace(proposal, tokens=tokens)

    def _propose(
        self,
        tree: AnyTree,
        batch: DeviceBatch,
        logits: Tensor,
        features: Tensor,
        samplers: Sequence[Sampler | None] = (),
    ) -> Proposal:
        drafters = DeviceDrafters(
            logits=logits,
            features=features,
            lengths=batch.lengths,
            roots=batch.roots.long(),
            positions=draft_decode_position(self._manifest, batch.lengths, batch.positions),
            state_inputs=batch.pages,
        )
        return self.prepare(tree, drafters, samplers)


@lru_cache(maxsize=32)
def _nodes(width: int, device: torch.device) -> Tensor:
    """int32 [width]: 0, 1, ...; only to be read."""
    return torch.arange(width, dtype=torch.int32, device=device)


def _begins_with(tree: AnyTree, wanted: AnyTree) -> bool:
    """Whether both are chains, and ``wanted`` is the shorter one."""
    return is_chain(tree) and is_chain(wanted) and wanted.num_nodes < tree.num_nodes


def _selected(ready: _Prepared, tree: AnyTree, rows: list[int], size: int) -> Proposal:
    """The trees at ``rows``, cut to ``tree`` and padded to ``size``."""
    proposal = ready.proposal
    whole = len(proposal.tokens) == size and rows == list(range(len(rows)))
    if whole and ready.tree == tree:
        return proposal
    tokens = proposal.tokens[:, : tree.num_nodes]
    index = to_device(torch.tensor(rows + [0] * (size - len(rows))), tokens.device)
    tokens = tokens if whole else tokens.index_select(0, index)
    if isinstance(tree, Tree):
        return tree_proposal(tree, tokens)
    others = (proposal.parents, proposal.depths, proposal.mask)
    return Proposal(tokens, *(field.index_select(0, index) for field in others))
