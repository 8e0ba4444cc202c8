"""Write log-probabilities as OpenAI's objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trt_eagle3.decode.sampling.logprobs import TokenLogprob
from trt_eagle3.decode.sampling.prompt_logprobs import PromptLogprobs
from trt_eagle3.multimodal.tokenizer import TokenBytes

__all__ = [
    "chat_logprobs",
    "completion_logprobs",
    "echo_logprobs",
    "prompt_logprobs",
    "response_logprobs",
]

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


def prompt_logprobs(found: PromptLogprobs, token_bytes: TokenBytes) -> list[dict[str, Any] | None]:
    """Build ``prompt_logprobs`` as vLLM has it: one object of token ids per token of the prompt."""
    return [
        None
        if one is None
        else {
            str(token): {
                "logprob": _finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": _text(token, token_bytes),
            }
            for token, entry in one.items()
        }
        for one in found
    ]


def completion_logprobs(
    found: Sequence[TokenLogprob], token_bytes: TokenBytes, offset: int
) -> dict[str, Any]:
    """Build ``logprobs`` of a completion's choice; ``offset``: characters before the tokens."""
    tokens = [_text(one.token_id, token_bytes) for one in found]
    return _completion_logprobs(tokens, found, token_bytes, offset)


def echo_logprobs(
    prompt: PromptLogprobs, found: Sequence[TokenLogprob], token_bytes: TokenBytes
) -> dict[str, Any]:
    """Build ``logprobs`` of a completion's choice that begins with the prompt."""
    entries = [*map(prompt.token, range(len(prompt))), *found]
    ids = [*prompt.token_ids.tolist(), *(one.token_id for one in found)]
    tokens = [_text(token, token_bytes) for token in ids]
    return _completion_logprobs(tokens, entries, token_bytes, 0)


def _completion_logprobs(
    tokens: Sequence[str],
    found: Sequence[TokenLogprob | None],
    token_bytes: TokenBytes,
    offset: int,
) -> dict[str, Any]:
    """Build the lists of ``tokens``. The first token of a prompt has no log-probability."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [one and _finite(one.logprob) for one in found],
        "top_logprobs": [
            one and {_text(i, token_bytes): _finite(value) for i, value in one.top} for one in found
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
