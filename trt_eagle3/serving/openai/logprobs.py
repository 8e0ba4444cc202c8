"""Write log-probabilities as OpenAI's objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trt_eagle3.decode.sampling.logprobs import TokenLogprob
from trt_eagle3.multimodal.tokenizer import TokenBytes

__all__ = ["chat_logprobs", "completion_logprobs", "response_logprobs"]

_LEAST = -9999.0  # OpenAI's value for an impossible token; JSON has no infinity


def chat_logprobs(found: Sequence[TokenLogprob], token_bytes: TokenBytes) -> dict[str, Any]:
    """Build ``logprobs`` of a chat completion's choice."""
    return {"content": response_logprobs(found, token_bytes)}


def response_logprobs(
    found: Sequence[TokenLogprob], token_bytes: TokenBytes
) -> list[dict[str, Any]]:
    """Build one entry per token, with the most likely tokens at its position."""
    return [
        {
            **_entry(one.token_id, one.logprob, token_bytes),
            "top_logprobs": [_entry(i, value, token_bytes) for i, value in one.top],
        }
        for one in found
    ]


def completion_logprobs(
    found: Sequence[TokenLogprob], token_bytes: TokenBytes, offset: int
) -> dict[str, Any]:
    """Build ``logprobs`` of a completion's choice; ``offset``: characters before the tokens."""
    tokens = [_text(one.token_id, token_bytes) for one in found]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(one.logprob) for one in found],
        "top_logprobs": [
            {_text(i, token_bytes): _finite(value) for i, value in one.top} for one in found
        ],
        "text_offset": offsets,
    }


def _entry(token_id: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    data = token_bytes(token_id)
    text = data.decode("utf-8", "replace")
    return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}


def _text(token_id: int, token_bytes: TokenBytes) -> str:
    return token_bytes(token_id).decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
