"""The graphs as decoding calls them: new tokens of B sequences over the paged caches.

Shapes: B sequences, S new tokens of each, M masked tail, P pages, R rows wanted from the head, H
target hidden, Hd draft hidden, L deepstack levels, V vocab, Vd draft vocab. Rows of the S that a
sequence does not need are padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from trt_eagle3.decode.memory.state import LayerStates
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.engine.runtime.session import Reduction, Session

__all__ = [
    "DraftRunner",
    "AttentionMetadata",
    "Rows",
    "TargetRunner",
    "all_rows",
    "causal_mask",
]


@dataclass(frozen=True)
class AttentionMetadata:
    """Where new tokens stand. Slot and rope position are separate, always.

    Attributes:
        past: [B] rows of each sequence that every new token of it sees: numbers, or int32 on the
            device, where the host does not know them yet.
        counts: [B] how many of the S tokens are real; the others are padding. Likewise.
        state_inputs: the graph's inputs that say where the sequences' states lie
            (``LayerStates.inputs``), ``page_table`` int32 [B, P] among them.
        mask: bool [B, S, M]: who sees whom among the last M rows; the new tokens are the last S of
            them.
        positions: int32 [3, B, S].
        is_prompt: ``mask`` is lower-triangular, and of draft features only rows whose logits are
            wanted are read.
    """

    past: Sequence[int] | Tensor
    counts: Sequence[int] | Tensor
    state_inputs: Mapping[str, Tensor]
    mask: Tensor
    positions: Tensor
    is_prompt: bool = False

    @classmethod
    def single(cls, past: int, pages: Tensor, mask: Tensor, positions: Tensor) -> AttentionMetadata:
        """One sequence without padding:

        ``pages`` int32 [1, P], ``mask`` bool [S, M], ``positions`` int32 [3, S].
        """
        states = {"page_table": pages}
        return cls([past], [mask.shape[0]], states, mask[None], positions[:, None])

    def inputs(self, logit_rows: Tensor) -> dict[str, Tensor]:
        """The graph's context inputs; ``logit_rows`` [B, R], integers, are the tokens whose
        logits are wanted.
        """
        return {
            "position_ids": self.positions,
            "past_lengths": _int32(self.past),
            "query_lengths": _int32(self.counts),
            **self.state_inputs,
            "tree_mask": self.mask,
            "logit_rows": logit_rows.int(),
        }


def _int32(numbers: Sequence[int] | Tensor) -> Tensor:
    return numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=torch.int32)


def causal_mask(num_tokens: int) -> Tensor:
    """bool [S, S], lower-triangular: the tree of a plain run of tokens."""
    rows = torch.arange(num_tokens)
    return rows[:, None] >= rows


def all_rows(batch: int, count: int) -> Tensor:
    """int32 [B, count]: the logits of every row are wanted. Shared: only to be read."""
    return _counted(count).expand(batch, -1)


@lru_cache(maxsize=32)
def _counted(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32)


@dataclass(frozen=True)
class Rows:
    """What a forward of the target runs over.

    Attributes:
        embeds: [B, S, H]. metadata: where they stand. logit_rows: integers [B, R].
        visual_levels: [L, B, S, H], zero at rows of text; None where all are.
    """

    embeds: Tensor
    metadata: AttentionMetadata
    logit_rows: Tensor
    visual_levels: Tensor | None = None


class TargetRunner:
    """The target graph and the states of its layers."""

    def __init__(
        self,
        session: Session,
        states: LayerStates,
        embedding: EmbeddingTable,
        num_visual_levels: int,
    ) -> None:
        self.states = states
        self.embedding = embedding
        self._session = session
        self.num_visual_levels = num_visual_levels
        self._nothing: Tensor | None = None
        states.bind(session)

    @property
    def reduces(self) -> bool:
        """Whether outputs are reduced within the graph."""
        return self._session.capabilities.reduces

    @property
    def mixes(self) -> bool:
        """Whether prompts can run beside rows that decode (``forward_mixed``)."""
        return self._session.capabilities.mixes

    def capture_rows(self, most: int, table_len: int, has_room: Callable[[], bool]) -> None:
        """Capture forwards of up to ``most`` rows of prompts and others while ``has_room``;
        ``table_len``: pages in a page table.
        """
        self._session.capture_rows(most, table_len, has_room)

    def forward(
        self,
        embeds: Tensor,
        metadata: AttentionMetadata,
        logit_rows: Tensor,
        visual_levels: Tensor | None = None,
        reduce: Reduction | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run ``Rows`` of these: logits f32 [B, R, V] and aux hidden states [B, S, k * H] (None
        without a draft). ``reduce``: what to make of the logits, and return instead.
        """
        inputs = self._inputs(Rows(embeds, metadata, logit_rows, visual_levels))
        if metadata.is_prompt:
            assert reduce is None, "a prompt's logits are of few rows"
            outputs = self._session.run_prompt(inputs)
        else:
            outputs = self._session.run_reduced(inputs, {"logits": reduce} if reduce else {})
        self.states.take(outputs)
        return outputs["logits"], outputs.get("aux_hidden_states")

    def forward_mixed(
        self, prompts: Rows, steps: Rows, reduce: Reduction | None
    ) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        """Run rows of prompts and of sequences that decode in one forward, which reads the weights
        once; what ``forward`` returns of each. ``reduce``: what to make of the logits of ``steps``.
        """
        parts = [self._inputs(prompts), self._inputs(steps)]
        of_prompts, of_steps = self._session.run_mixed(parts, [None, reduce])
        return (
            (of_prompts["logits"], of_prompts.get("aux_hidden_states")),
            (of_steps["logits"], of_steps.get("aux_hidden_states")),
        )

    def _inputs(self, rows: Rows) -> dict[str, Tensor]:
        inputs = {"inputs_embeds": rows.embeds, **rows.metadata.inputs(rows.logit_rows)}
        if self.num_visual_levels:
            levels = rows.visual_levels
            if levels is None:
                if self._nothing is None:
                    self._nothing = rows.embeds.new_zeros(1)
                levels = self._nothing.expand(self.num_visual_levels, *rows.embeds.shape)
            inputs["deepstack_embeds"] = levels
        return inputs


class DraftRunner:
    """The fuse and draft graphs and the states of the draft's layers.

    A level of a tree reads the rows of the levels above before anything is committed, so the
    draft's states are paged.
    """

    def __init__(
        self,
        fuse: Session,
        draft: Session,
        states: LayerStates,
        embedding: EmbeddingTable,
        d2t: Tensor | None,
    ) -> None:
        assert not states.has_snapshots, "a draft's states are paged"
        self.states = states
        self.embedding = embedding
        self._fuse = fuse
        self._draft = draft
        self._target_ids = None if d2t is None else d2t + torch.arange(len(d2t), device=d2t.device)
        states.bind(draft)

    def capture_rows(self, most: int, table_len: int, has_room: Callable[[], bool]) -> None:
        """As ``TargetRunner.capture_rows``, of the draft's forwards over prompts."""
        self._draft.capture_rows(most, table_len, has_room)

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """Features [..., Hd] of aux hidden states [..., k * H]."""
        features = self._fuse.run({"aux_hidden_states": aux_hidden_states.flatten(0, -2)})[
            "features"
        ]
        return features.view(*aux_hidden_states.shape[:-1], -1)

    def forward(
        self, embeds: Tensor, features: Tensor, metadata: AttentionMetadata, logit_rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run ``embeds`` and ``features [B, S, Hd]``; logits f32 [B, R, Vd] and the next
        features [B, S, Hd], of a prompt [B, R, Hd].
        """
        inputs = {"inputs_embeds": embeds, "features": features, **metadata.inputs(logit_rows)}
        run = self._draft.run_prompt if metadata.is_prompt else self._draft.run
        outputs = run(inputs)
        return outputs["logits"], outputs["features_out"]

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target token ids of draft token ids: i + d2t[i]."""
        return draft_ids if self._target_ids is None else self._target_ids[draft_ids]
