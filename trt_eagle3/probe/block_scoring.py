"""Predict answers with a block draft in plain PyTorch, to score its interpretations.

Shapes: n tokens, R anchors, K drafts per block, k aux states, H target hidden, Vd draft vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.drafts.block.manifest import BlockManifest
from trt_eagle3.drafts.block.reference import BlockReference
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.parity.reference.draft import KeysValues

__all__ = ["BlockScoring"]


@dataclass(frozen=True)
class BlockScoring:
    """A draft's weights in float32, which its interpretations share."""

    reference: BlockReference
    device: str

    @classmethod
    def load(cls, manifest: DraftManifest, device: str) -> BlockScoring:
        """Read the weights of ``manifest``, without its token table."""
        assert isinstance(manifest, BlockManifest), type(manifest)
        tensors = {n: ref for n, ref in manifest.tensors.items() if n != "embed_tokens.weight"}
        bare = replace(manifest, tensors=tensors)
        return cls(BlockReference.load(bare, torch.float32, device), device)

    def logits(
        self,
        manifest: DraftManifest,
        table: EmbeddingTable,
        aux: Tensor,
        token_ids: Tensor,
        anchors: Sequence[int],
        num_drafts: int,
    ) -> Tensor:
        """Return float32 [R, K, Vd], on the CPU: the logits of the K tokens after each anchor.

        Sequential heads read the true token before each draft, as if all before it were accepted.

        Args:
            manifest: an interpretation.
            aux: float32 [n - 1, k * H].
            token_ids: int64 [n].
            anchors: sequence indices.
        """
        assert isinstance(manifest, BlockManifest), type(manifest)
        draft = replace(self.reference, manifest=manifest)
        context = draft.context(aux.to(self.device))
        found = [self._block(draft, table, context, token_ids, at, num_drafts) for at in anchors]
        return torch.stack(found)

    def _block(
        self,
        draft: BlockReference,
        table: EmbeddingTable,
        context: KeysValues,
        token_ids: Tensor,
        anchor: int,
        num_drafts: int,
    ) -> Tensor:
        m, last = draft.manifest, len(token_ids) - 1
        num_masks = m.rows_of(num_drafts) - 1
        ids = torch.tensor([int(token_ids[anchor]), *[m.mask_token_id] * num_masks])
        embeds = table.lookup(ids).float().to(self.device)
        if m.mask_embedding == "own":
            embeds[1:] = draft.weights["mask_embedding"].float()
        before = [(keys[:anchor], values[:anchor]) for keys, values in context]
        rows = draft.run(embeds * m.embedding_scale, anchor, before)
        proposal = draft.propose(
            int(token_ids[anchor]),
            rows,
            lambda place, _: int(token_ids[min(anchor + 1 + place, last)]),
        )
        # a selector scores its candidates alone; other tokens keep their logits
        plain = rows.logits[len(rows.logits) - num_drafts :]
        return torch.where(proposal.scores.isinf(), plain, proposal.scores).float().cpu()
