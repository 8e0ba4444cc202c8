"""The graphs as the decode loop calls them: one row of new tokens over the paged caches.

Shapes: S new tokens, M masked tail, P pages, H target hidden, Hd draft hidden, V vocab, Vd draft vocab.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from trt_eagle3.decode.kv_cache import KVCache
from trt_eagle3.engine.embedding import EmbeddingTable
from trt_eagle3.engine.session import Session

__all__ = ["DraftRunner", "Place", "TargetRunner", "VisionRunner", "causal_mask"]


@dataclass(frozen=True)
class Place:
    """Where new tokens stand. Slot and rope position are separate, always.

    Attributes:
        past: rows of the sequence that every new token sees.
        pages: int32 [1, P].
        mask: bool [S, M]: who sees whom among the last M rows; the new tokens are the last S of them.
        positions: int32 [3, S].
    """

    past: int
    pages: Tensor
    mask: Tensor
    positions: Tensor

    def inputs(self, logit_rows: Tensor) -> dict[str, Tensor]:
        """The graph's context inputs; ``logit_rows`` int64 [R] are the tokens whose logits are wanted."""
        return {
            "position_ids": self.positions[:, None],
            "past_lengths": torch.tensor([self.past], dtype=torch.int32),
            "query_lengths": torch.tensor([self.mask.shape[0]], dtype=torch.int32),
            "page_table": self.pages,
            "tree_mask": self.mask[None],
            "logit_rows": logit_rows.int()[None],
        }


@lru_cache(maxsize=256)
def causal_mask(num_tokens: int) -> Tensor:
    """bool [S, S], lower-triangular: the tree of a plain run of tokens. Shared: do not write into it."""
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()


class TargetRunner:
    """The target graph and its cache."""

    def __init__(self, session: Session, cache: KVCache, embedding: EmbeddingTable, num_deepstack: int) -> None:
        self.cache = cache
        self.embedding = embedding
        self._session = session
        self._num_deepstack = num_deepstack
        for name, buffer in cache.bindings():
            session.bind(name, buffer)

    def forward(
        self, embeds: Tensor, place: Place, logit_rows: Tensor, deepstack: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run ``embeds [S, H]`` and return logits f32 [R, V] and aux hidden states [S, k * H] (None without a draft).

        ``deepstack`` is [L, S, H], zero at text rows; decode rows have none.
        """
        if deepstack is None:
            deepstack = embeds.new_zeros(self._num_deepstack, *embeds.shape)
        outputs = self._session.run(
            {"inputs_embeds": embeds[None], "deepstack_embeds": deepstack[:, None], **place.inputs(logit_rows)}
        )
        aux = outputs.get("aux_hidden_states")
        return outputs["logits"][0], None if aux is None else aux[0]


class DraftRunner:
    """The fuse and draft graphs and the draft's cache."""

    def __init__(
        self, fuse: Session, draft: Session, cache: KVCache, embedding: EmbeddingTable, d2t: Tensor | None
    ) -> None:
        self.cache = cache
        self.embedding = embedding
        self._fuse = fuse
        self._draft = draft
        self._d2t = d2t
        for name, buffer in cache.bindings():
            draft.bind(name, buffer)

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """Features [n, Hd] of aux hidden states [n, k * H]."""
        return self._fuse.run({"aux_hidden_states": aux_hidden_states})["features"]

    def forward(self, embeds: Tensor, features: Tensor, place: Place, logit_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Run ``embeds [S, Hd]`` and ``features [S, Hd]``; logits f32 [R, Vd] and the next features [S, Hd]."""
        outputs = self._draft.run(
            {"inputs_embeds": embeds[None], "features": features[None], **place.inputs(logit_rows)}
        )
        return outputs["logits"][0], outputs["features_out"][0]

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target token ids of draft token ids: i + d2t[i]."""
        return draft_ids if self._d2t is None else draft_ids + self._d2t[draft_ids]


class VisionRunner:
    """The vision graph."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def forward(self, patches: Tensor, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Visual embeddings [N, H] and deepstack levels [L, N, H] of ``patches [n, patch_dim]``."""
        outputs = self._session.run({"patches": patches, **rows})
        return outputs["visual_embeds"], outputs.get("deepstack")
