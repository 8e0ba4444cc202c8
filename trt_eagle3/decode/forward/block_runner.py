"""BlockRunner: call the graphs of a block draft.

Shapes: B sequences, S rows of each, R rows of the head, k aux layers, H target hidden, Hd draft
hidden, Vd draft vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from trt_eagle3.decode.forward.runner import AttentionMetadata, TargetIds
from trt_eagle3.decode.memory.state import LayerStates
from trt_eagle3.drafts.block.manifest import BlockManifest
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.engine.runtime.session import Continuation, Session

__all__ = ["BlockRunner"]


class BlockRunner:
    """The context and block graphs of a draft, which share the states of its layers."""

    def __init__(
        self,
        context: Session,
        block: Session,
        states: LayerStates,
        embedding: EmbeddingTable,
        manifest: BlockManifest,
        d2t: Tensor | None,
        mask_embedding: Tensor | None,
    ) -> None:
        """Create a runner. ``mask_embedding``: [Hd]; None: that of the mask token."""
        self.states = states
        self.embedding = embedding
        self.target_ids = TargetIds(d2t)
        self._context = context
        self._block = block
        self._manifest = manifest
        self._mask_embedding = mask_embedding
        states.bind(context)
        states.bind(block)

    def capture_rows(self, most: int, table_len: int, has_room: Callable[[], bool]) -> None:
        """Capture forwards over prompts, as ``TargetRunner.capture_rows`` does."""
        self._context.capture_rows(most, table_len, has_room)

    def write(self, aux: Tensor, metadata: AttentionMetadata) -> None:
        """Write the rows of aux hidden states [B, S, k * H] to the draft's cache."""
        self._context.run({"aux_hidden_states": aux, **metadata.inputs(None)})

    def forward(
        self, tokens: Tensor, metadata: AttentionMetadata, causal: Tensor, logit_rows: Tensor
    ) -> dict[str, Tensor]:
        """Run blocks: ``tokens`` int64 [B, S], the anchor first.

        Returns ``logits`` f32 [B, R, Vd], and ``hidden`` [B, R, Hd] if a head reads it. ``causal``:
        bool [B, S, S], the lower-triangular mask.
        """
        return self._block.run(self._inputs(tokens, metadata, causal, logit_rows))

    def forward_then(
        self,
        tokens: Tensor,
        metadata: AttentionMetadata,
        causal: Tensor,
        logit_rows: Tensor,
        then: Continuation,
        further: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Run blocks and continue with ``then`` (``Session.run_then``)."""
        inputs = self._inputs(tokens, metadata, causal, logit_rows)
        return self._block.run_then(inputs, then, further)

    def _inputs(
        self, tokens: Tensor, metadata: AttentionMetadata, causal: Tensor, logit_rows: Tensor
    ) -> dict[str, Tensor]:
        embeds = self.embedding.lookup(tokens)
        if self._mask_embedding is not None:
            embeds[:, 1:] = self._mask_embedding
        inputs = {"inputs_embeds": embeds, **metadata.inputs(logit_rows)}
        if self._manifest.mixes_masks:
            inputs["causal_mask"] = causal
        return inputs
