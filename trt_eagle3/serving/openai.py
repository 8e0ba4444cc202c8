"""OpenAI's chat completions as `Request`s of the engine, and answers as OpenAI's objects. No server in here."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trt_eagle3.decode.request import Chunk, Generation, Request
from trt_eagle3.decode.sampling import Sampling
from trt_eagle3.errors import UserError
from trt_eagle3.serving.config import ServingConfig

__all__ = ["ChatBody", "Completion", "read_chat"]


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class ChatBody(BaseModel):
    """The body of ``POST /v1/chat/completions``: OpenAI's fields that are served, and ours below them.

    Fields that change an answer in ways that are not served are refused, not ignored; ``user``, ``metadata`` and
    ``store`` change nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    messages: list[dict[str, Any]]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=1)
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    speculation: bool = True


def read_chat(raw: Any, serving: ServingConfig) -> tuple[ChatBody, Request]:
    """Check a body.

    Raises:
        UserError: an unknown or unserved field, a bad value, too long a prompt.
    """
    try:
        body = ChatBody.model_validate(raw)
    except ValidationError as error:
        raise UserError(_problem(error.errors()[0])) from error
    serving.check_prompt(body.messages)
    limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    sampling = Sampling(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        seed=body.seed,
    )
    request = Request(
        prompt=body.messages,
        sampling=sampling,
        stop=[body.stop] if isinstance(body.stop, str) else body.stop or (),
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        speculation=body.speculation,
    )
    return body, request if limit is None else replace(request, max_tokens=limit)


def _problem(error: Mapping[str, Any]) -> str:
    field = ".".join(str(part) for part in error["loc"]) or "body"
    if error["type"] == "extra_forbidden":
        return f"{field}: not served here. Known: {', '.join(ChatBody.model_fields)}."
    return f"{field}: {error['msg']}, got {error['input']!r:.80}"


class Completion:
    """The objects of one completion; they share an id and a time."""

    def __init__(self, model: str) -> None:
        self._common = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, generation: Generation) -> dict[str, Any]:
        """``chat.completion``."""
        message = {"role": "assistant", "content": generation.text}
        choice = {"index": 0, "message": message, "finish_reason": generation.finish_reason, "logprobs": None}
        return {**self._common, "object": "chat.completion", "choices": [choice], "usage": _usage(generation)}

    def opening(self) -> dict[str, Any]:
        """The first ``chat.completion.chunk``: who speaks."""
        return self._chunk({"role": "assistant", "content": ""}, None)

    def piece(self, chunk: Chunk) -> dict[str, Any]:
        """``chat.completion.chunk``."""
        return self._chunk({"content": chunk.text} if chunk.text else {}, chunk.finish_reason)

    def usage(self, generation: Generation) -> dict[str, Any]:
        """The last chunk, where ``stream_options.include_usage`` asks for it."""
        return {**self._common, "object": "chat.completion.chunk", "choices": [], "usage": _usage(generation)}

    def _chunk(self, delta: Mapping[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return {**self._common, "object": "chat.completion.chunk", "choices": [choice]}


def _usage(generation: Generation) -> dict[str, Any]:
    prompt, completion = generation.prompt_tokens, len(generation.token_ids)
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {**counts, "acceptance_length": generation.acceptance_length}
