"""Fill the field ``trt_eagle3`` of chunks: proposed draft tokens and accepted ones."""

from __future__ import annotations

from typing import Any

from trt_eagle3.decode.request.request import Chunk
from trt_eagle3.multimodal import Processor

__all__ = ["AcceptanceField"]


class AcceptanceField:
    """Describes the chunks of one answer."""

    def __init__(self, processor: Processor) -> None:
        self._decoder = processor.stream_decoder()

    def push(self, chunk: Chunk) -> dict[str, Any] | None:
        """Return ``{"accepted", "pieces"}`` of a target forward; None if it emitted no token.

        ``pieces`` has the text of each token: ``accepted`` draft tokens, then the target's own
        token. ``accepted`` is None if the forward verified no drafts. A token that ends inside a
        character adds its text to a later one.
        """
        if not chunk.token_ids:
            return None
        pieces = [self._decoder.push(token) for token in chunk.token_ids]
        if chunk.finish_reason is not None:
            pieces[-1] += self._decoder.flush()
        accepted = len(pieces) - 1 if chunk.accepted_lengths else None
        return {"accepted": accepted, "pieces": pieces}
