"""OpenAI's chat completions as `Request`s of the engine, and answers as OpenAI's objects.

No server in here.
"""

from __future__ import annotations

import json
import reprlib
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from trt_eagle3.decode.request import Chunk, Generation, Request
from trt_eagle3.decode.sampling_params import SamplingParams
from trt_eagle3.errors import UserError
from trt_eagle3.serving.config import ServingConfig

__all__ = ["ChatOptions", "Completion", "read_chat", "to_event"]


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None


class _ChatBody(BaseModel):
    """The body of ``POST /v1/chat/completions``: OpenAI's fields that are served, and ours below
    them.

    ``null`` is a field that is not given. Fields that change an answer in ways that are not served
    are taken with the values that change nothing (``_NEUTRAL``) and refused with others; those in
    the second block never change anything.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    messages: Annotated[list[dict[str, Any]], FailFast()]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    seed: int | None = None
    stop: Annotated[list[str], FailFast()] = Field(default_factory=list)
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    parallel_tool_calls: Any = None

    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: Annotated[list[int], FailFast()] = Field(default_factory=list)
    ignore_eos: bool = False
    speculation: bool = True


# What many clients send whether or not it was asked for.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
}
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


@dataclass(frozen=True)
class ChatOptions:
    """What of a body the engine has no use for: which model was asked for, and how to send the
    answer.
    """

    model: str | None
    stream: bool
    include_usage: bool


def read_chat(raw: Any, serving: ServingConfig, max_tokens: int) -> tuple[ChatOptions, Request]:
    """Check a body; ``max_tokens`` is what holds where it names no limit.

    Raises:
        UserError: an unknown or unserved field, a bad value, too long a prompt, too many stop
            texts.
    """
    try:
        body = _ChatBody.model_validate(_known(raw) if isinstance(raw, Mapping) else raw)
    except ValidationError as error:
        raise UserError(_problem(error.errors()[0])) from error
    serving.check_prompt(body.messages)
    serving.check_stop(body.stop, body.stop_token_ids)
    limits = (body.max_completion_tokens, body.max_tokens, max_tokens)
    sampling = SamplingParams(
        temperature=body.temperature,
        top_k=0 if body.top_k == -1 else body.top_k,  # vLLM's word for all
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        seed=body.seed,
        max_tokens=next(limit for limit in limits if limit is not None),
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
    )
    options = ChatOptions(body.model, body.stream, bool(body.stream_options.include_usage))
    return options, Request(
        prompt=[_with_known_role(message) for message in body.messages],
        sampling=sampling,
        speculation=body.speculation,
    )


def _known(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that say anything."""
    given = {
        name: value
        for name, value in raw.items()
        if value is not None and value not in _NEUTRAL.get(name, ())
    }
    for name, values in _NEUTRAL.items():
        if name in given:
            expected = " or ".join(map(repr, values))
            raise UserError(
                f"{name}: expected {expected}, got {reprlib.repr(given[name])}. Nothing else is "
                "served here."
            )
    _check_names(given, _ChatBody)
    if isinstance(given.get("stream_options"), Mapping):
        _check_names(given["stream_options"], _StreamOptions, "stream_options.")
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    return given


def _check_names(fields: Mapping[str, Any], model: type[BaseModel], where: str = "") -> None:
    """The first that is not served ends it: pydantic would list a million of them."""
    for name in fields:
        if name not in model.model_fields:
            known = ", ".join(model.model_fields)
            raise UserError(f"{where}{ascii(name[:40])[1:-1]}: not served here. Known: {known}.")


def _with_known_role(message: dict[str, Any]) -> dict[str, Any]:
    """Chat templates drop messages of roles that they do not know; OpenAI's developer is what
    was called system.
    """
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise UserError(f"messages: role: expected one of {', '.join(_ROLES)}, got {role!r:.40}.")
    return {**message, "role": _ROLES[role]}


def _problem(error: Mapping[str, Any]) -> str:
    field = ".".join(str(part) for part in error["loc"]) or "body"
    got = "" if error["type"] == "missing" else f", got {reprlib.repr(error['input'])}"
    return f"{field}: {error['msg']}{got}"


class Completion:
    """The objects of one completion; they share an id and a time."""

    def __init__(self, model: str) -> None:
        self._common = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, generation: Generation) -> dict[str, Any]:
        """``chat.completion``."""
        message = {"role": "assistant", "content": generation.text}
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": generation.finish_reason,
            "logprobs": None,
        }
        return {
            **self._common,
            "object": "chat.completion",
            "choices": [choice],
            "usage": _usage(generation),
        }

    def opening(self) -> dict[str, Any]:
        """The first ``chat.completion.chunk``: who speaks."""
        return self._chunk({"role": "assistant", "content": ""}, None)

    def piece(self, chunk: Chunk) -> dict[str, Any]:
        """``chat.completion.chunk``."""
        return self._chunk({"content": chunk.text} if chunk.text else {}, chunk.finish_reason)

    def usage(self, generation: Generation) -> dict[str, Any]:
        """The last chunk, where ``stream_options.include_usage`` asks for it."""
        return {
            **self._common,
            "object": "chat.completion.chunk",
            "choices": [],
            "usage": _usage(generation),
        }

    def _chunk(self, delta: Mapping[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return {**self._common, "object": "chat.completion.chunk", "choices": [choice]}


def _usage(generation: Generation) -> dict[str, Any]:
    prompt, completion = generation.prompt_tokens, len(generation.token_ids)
    counts = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    return {**counts, "acceptance_length": generation.acceptance_length}


def to_event(value: Mapping[str, Any]) -> str:
    """A server-sent event; in ASCII, because some clients take U+2028 and its like for the end
    of a line.
    """
    return f"data: {json.dumps(value)}\n\n"
