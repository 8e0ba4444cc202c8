"""Runners: call the graphs on new tokens of B sequences over the paged caches.

Shapes: B sequences, S new tokens of each, M masked tail, P pages, R rows of logits, H
target hidden, Hd draft hidden, L deepstack levels, V vocab, Vd draft vocab. A sequence with fewer
than S new tokens is padded.
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
    "TargetIds",
    "TargetInputs",
    "TargetRunner",
    "all_rows",
    "causal_mask",
]


@dataclass(frozen=True)
class AttentionMetadata:
    """Slots, positions and mask of new tokens. Slot and rope position are always separate.

    Attributes:
        past: [B] rows that every new token of a sequence attends to: numbers, or int32 on the
            device if the host does not have them yet.
        counts: [B] how many of the S tokens are real, not padding: numbers or int32, as ``past``.
        state_inputs: the graph inputs that locate the sequences' states
            (``LayerStates.inputs``), ``page_table`` int32 [B, P] included.
        mask: bool [B, S, M]: attention to the last M rows; the new tokens are the last S of them.
        positions: int32 [3, B, S].
        is_prompt: ``mask`` is lower-triangular, and draft features are read only at rows whose
            logits are returned.
    """

    past: Sequence[int] | Tensor
    counts: Sequence[int] | Tensor
    state_inputs: Mapping[str, Tensor]
    mask: Tensor
    positions: Tensor
    is_prompt: bool = False

    @classmethod
    def single(cls, past: int, pages: Tensor, mask: Tensor, positions: Tensor) -> AttentionMetadata:
        """Describe one sequence without padding.

        ``pages`` int32 [1, P], ``mask`` bool [S, M], ``positions`` int32 [3, S].
        """
        states = {"page_table": pages}
        return cls([past], [mask.shape[0]], states, mask[None], positions[:, None])

    def inputs(self, logit_rows: Tensor | None) -> dict[str, Tensor]:
        """Return the graph's context inputs.

        ``logit_rows`` integers [B, R]: the tokens whose logits are returned; None for a graph
        without a head.
        """
        found = {
            "position_ids": self.positions,
            "past_lengths": _int32(self.past),
            "query_lengths": _int32(self.counts),
            **self.state_inputs,
            "tree_mask": self.mask,
        }
        return found if logit_rows is None else {**found, "logit_rows": logit_rows.int()}


def _int32(numbers: Sequence[int] | Tensor) -> Tensor:
    return numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=torch.int32)


def causal_mask(num_tokens: int) -> Tensor:
    """Return the lower-triangular mask of consecutive tokens, bool [S, S]."""
    rows = torch.arange(num_tokens)
    return rows[:, None] >= rows


def all_rows(batch: int, count: int) -> Tensor:
    """Return ``logit_rows`` int32 [B, count] that select every row. Shared: read-only."""
    return _counted(count).expand(batch, -1)


@lru_cache(maxsize=32)
def _counted(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32)


@dataclass(frozen=True)
class TargetInputs:
    """The inputs of a target forward.

    Attributes:
        embeds: [B, S, H]. metadata: of these rows. logit_rows: integers [B, R].
        visual_levels: [L, B, S, H], zero at text rows; None if all rows are text.
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
        """Whether prompts can be batched with decoding rows (``forward_mixed``)."""
        return self._session.capabilities.mixes

    def capture_rows(self, most: int, table_len: int, has_room: Callable[[], bool]) -> None:
        """Capture forwards of up to ``most`` rows, prompts included, while ``has_room``.

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
        """Run one forward.

        Returns logits f32 [B, R, V] and aux hidden states [B, S, k * H] (None without a draft).
        ``reduce``: a reduction of the logits, returned in their place.
        """
        inputs = self._inputs(TargetInputs(embeds, metadata, logit_rows, visual_levels))
        if metadata.is_prompt:
            assert reduce is None, "a prompt's logits are of few rows"
            outputs = self._session.run_prompt(inputs)
        else:
            outputs = self._session.run_reduced(inputs, {"logits": reduce} if reduce else {})
        self.states.take(outputs)
        return outputs["logits"], outputs.get("aux_hidden_states")

    def forward_mixed(
        self, prompts: TargetInputs, steps: TargetInputs, reduce: Reduction | None
    ) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        """Run prompt rows and decoding rows in one forward, which reads the weights once.

        Returns what ``forward`` returns, for ``prompts`` and for ``steps``. ``reduce``: a reduction
        of the logits of ``steps``.
        """
        parts = [self._inputs(prompts), self._inputs(steps)]
        of_prompts, of_steps = self._session.run_mixed(parts, [None, reduce])
        return (
            (of_prompts["logits"], of_prompts.get("aux_hidden_states")),
            (of_steps["logits"], of_steps.get("aux_hidden_states")),
        )

    def _inputs(self, rows: TargetInputs) -> dict[str, Tensor]:
        inputs = {"inputs_embeds": rows.embeds, **rows.metadata.inputs(rows.logit_rows)}
        if self.num_visual_levels:
            levels = rows.visual_levels
            if levels is None:
                if self._nothing is None:
                    self._nothing = rows.embeds.new_zeros(1)
                levels = self._nothing.expand(self.num_visual_levels, *rows.embeds.shape)
            inputs["deepstack_embeds"] = levels
        return inputs


class TargetIds:
    """Maps draft token ids to target token ids: i + d2t[i]."""

    def __init__(self, d2t: Tensor | None) -> None:
        """Create the map. ``d2t``: int64 [Vd] on the device; None: the ids are equal."""
        self._ids = None if d2t is None else d2t + torch.arange(len(d2t), device=d2t.device)

    def __call__(self, draft_ids: Tensor) -> Tensor:
        """Map ``draft_ids``, integers of any shape."""
        return draft_ids if self._ids is None else self._ids[draft_ids]


class DraftRunner:
    """The fuse and draft graphs and the states of the draft's layers.

    A level of a tree reads the uncommitted rows of the levels above, so the draft's states are
    paged.
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
        self.target_ids = TargetIds(d2t)
        states.bind(draft)

    def capture_rows(self, most: int, table_len: int, has_room: Callable[[], bool]) -> None:
        """Capture draft forwards over prompts, as ``TargetRunner.capture_rows`` does."""
        self._draft.capture_rows(most, table_len, has_room)

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """Fuse aux hidden states [..., k * H] to features [..., Hd]."""
        features = self._fuse.run({"aux_hidden_states": aux_hidden_states.flatten(0, -2)})[
            "features"
        ]
        return features.view(*aux_hidden_states.shape[:-1], -1)

    def forward(
        self, embeds: Tensor, features: Tensor, metadata: AttentionMetadata, logit_rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the draft over ``embeds`` and ``features`` [B, S, Hd].

        Returns logits f32 [B, R, Vd] and the next features [B, S, Hd], for a prompt [B, R, Hd].
        """
        inputs = {"inputs_embeds": embeds, "features": features, **metadata.inputs(logit_rows)}
        run = self._draft.run_prompt if metadata.is_prompt else self._draft.run
        outputs = run(inputs)
        return outputs["logits"], outputs["features_out"]
