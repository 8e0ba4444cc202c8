"""The field ``trt_eagle3`` of chunks: which tokens the draft proposed and the target accepted."""

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
        """``{"accepted", "pieces"}`` of a target forward; None where it emitted nothing.

        ``pieces`` is the text of each token: ``accepted`` of the draft's (None where the forward
        verified no drafts), and behind them the target's own. A token that ends inside a character
        adds its text to a later one.
        """
        if not chunk.token_ids:
            return None
        pieces = [self._decoder.push(token) for token in chunk.token_ids]
        if chunk.finish_reason is not None:
            pieces[-1] += self._decoder.flush()
        accepted = len(pieces) - 1 if chunk.accepted_lengths else None
        return {"accepted": accepted, "pieces": pieces}
