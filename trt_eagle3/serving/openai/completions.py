"""Serve ``/v1/completions``: a prompt without chat template, and its continuation."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from trt_eagle3.decode.request.conversation import RawPrompt
from trt_eagle3.decode.request.request import Chunk, Generation, Request
from trt_eagle3.decode.request.request_list import repeated
from trt_eagle3.decode.sampling.logprobs import TokenLogprob
from trt_eagle3.errors import UserError, quote
from trt_eagle3.serving.config import ServingConfig
from trt_eagle3.serving.errors import FieldError, with_param
from trt_eagle3.serving.openai.call import Call, to_event
from trt_eagle3.serving.openai.fields import (
    SamplingFields,
    Whole,
    check_model,
    check_prompt_logprobs,
    read_fields,
    sampling,
)
from trt_eagle3.serving.openai.known_keys import check_format_keys
from trt_eagle3.serving.openai.logprobs import (
    completion_logprobs,
    echo_logprobs,
    prompt_logprobs,
)
from trt_eagle3.serving.openai.structured import StructuredFields, read_grammar
from trt_eagle3.serving.openai.usage import usage
from trt_eagle3.serving.served_model import ServedModel

__all__ = ["CompletionFields", "CompletionReply", "completion_error", "read_completion"]

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
}
_DEFAULT_MAX_TOKENS = 16  # OpenAI's default


class CompletionFields(SamplingFields, StructuredFields):
    """The body of ``POST /v1/completions``."""

    prompt: Any
    max_tokens: Whole | None = None
    echo: bool = False
    logprobs: Whole | None = None
    prompt_logprobs: Whole | None = None


def completion_error(error: UserError) -> UserError:
    """Attach the request field that ``error`` is about."""
    return with_param(error, CompletionFields.model_fields, {"prompt": "prompt", "text": "prompt"})


def read_completion(raw: Any, served: ServedModel, serving: ServingConfig) -> Call:
    """Validate a body, and make the call.

    Raises:
        UserError: a bad value, an unserved field, too many or too long prompts.
        RefusedError: the body names another model.
    """
    fields, ignored = read_fields(raw, CompletionFields, _NEUTRAL, serving)
    check_format_keys(fields.response_format, ignored, "response_format")
    name = check_model(fields.model, served)
    prompts = _read_prompts(fields.prompt)
    if len(prompts) * fields.n > serving.max_choices:
        raise FieldError(
            f"prompt: {len(prompts)} prompts with {fields.n} answers each, the limit is "
            f"{serving.max_choices} answers (max_choices). Send fewer.",
            "prompt",
        )
    for prompt in prompts:
        serving.check_prompt(prompt.content if isinstance(prompt.content, str) else ())
    limit = _DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    check_prompt_logprobs(fields.prompt_logprobs, stream=fields.stream)
    of_prompt = fields.prompt_logprobs
    if of_prompt is None and fields.echo and not fields.stream:
        of_prompt = fields.logprobs
    chosen = sampling(fields, served, serving, limit).updated(
        grammar=read_grammar(fields),
        logprobs=fields.logprobs,
        prompt_logprobs=of_prompt,
    )
    requests = [
        request
        for prompt in prompts
        for request in repeated(
            Request(prompt, sampling=chosen, speculation=fields.speculation), fields.n
        )
    ]
    echoes = [_text(prompt, served) if fields.echo else "" for prompt in prompts]
    reply = CompletionReply(
        name,
        served,
        [echo for echo in echoes for _ in range(fields.n)],
        num_prompts=len(prompts),
        include_usage=bool(fields.stream_options.include_usage),
        logprobs=fields.logprobs is not None,
        prompt_logprobs=fields.prompt_logprobs is not None,
    )
    return Call(tuple(requests), reply, fields.stream, ignored.paths)


def _read_prompts(raw: Any) -> list[RawPrompt]:
    """Read a text, token ids, or a list of either."""
    if isinstance(raw, str) or _are_ids(raw):
        return [RawPrompt(raw if isinstance(raw, str) else tuple(raw))]
    prompts = raw if isinstance(raw, list) else []
    if not prompts or not all(isinstance(prompt, str) or _are_ids(prompt) for prompt in prompts):
        raise FieldError(
            f"prompt: expected a text, token ids, or a list of these, got {quote(raw, 80)}",
            "prompt",
        )
    return [RawPrompt(prompt if isinstance(prompt, str) else tuple(prompt)) for prompt in prompts]


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(type(item) is int and 0 <= item < 2**31 for item in value)
    )


def _text(prompt: RawPrompt, served: ServedModel) -> str:
    if isinstance(prompt.content, str):
        return prompt.content
    return served.processor.decode(prompt.content)


class CompletionReply:
    """Writes the objects of one completion; they share an id and a time."""

    def __init__(
        self,
        model: str,
        served: ServedModel,
        echoes: Sequence[str],
        *,
        num_prompts: int,
        include_usage: bool,
        logprobs: bool,
        prompt_logprobs: bool = False,
    ) -> None:
        """Start a reply; ``echoes`` are the texts before each answer."""
        self._common = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._served = served
        self._echoes = list(echoes)
        self._num_prompts = num_prompts
        self._include_usage = include_usage
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs
        self._unsent: list[list[TokenLogprob]] = [[] for _ in echoes]
        self._offsets = [len(echo) for echo in echoes]

    def opening(self) -> str:
        """Return the echoed prompts, if any."""
        return "".join(self._event(i, echo, None) for i, echo in enumerate(self._echoes) if echo)

    def piece(self, index: int, chunk: Chunk) -> str:
        """Return one object, or none while the text is uncertain."""
        self._unsent[index] += chunk.logprobs
        if not chunk.text and chunk.finish_reason is None:
            return ""
        return self._event(index, chunk.text, chunk.finish_reason)

    def closing(self, generations: Sequence[Generation]) -> str:
        """Return the usage, if requested, and the end mark."""
        counts = usage(generations, prompts=self._num_prompts)
        event = to_event({**self._common, "choices": [], "usage": counts})
        return f"{event if self._include_usage else ''}data: [DONE]\n\n"

    def failed(self, error: Mapping[str, Any]) -> str:
        """Return the error as an event."""
        return to_event(error)

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """Return the ``text_completion`` object."""
        choices = [self._whole_choice(i, generations) for i in range(len(generations))]
        counts = usage(generations, prompts=self._num_prompts)
        return {**self._common, "choices": choices, "usage": counts}

    def _whole_choice(self, index: int, generations: Sequence[Generation]) -> dict[str, Any]:
        found, token_bytes = generations[index], self._served.token_bytes
        text = self._echoes[index] + found.text
        choice = self._choice(index, text, found.finish_reason, found.logprobs)
        num_answers = len(generations) // self._num_prompts
        prompt = generations[index - index % num_answers].prompt_logprobs
        if prompt is not None and self._echoes[index] and self._logprobs:
            choice["logprobs"] = echo_logprobs(prompt, found.logprobs, token_bytes)
        if prompt is not None and self._prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(prompt, token_bytes)
        return choice

    def _event(self, index: int, text: str, finish_reason: str | None) -> str:
        found, self._unsent[index] = self._unsent[index], []
        choice = self._choice(index, text, finish_reason, found)
        usage_later = {"usage": None} if self._include_usage else {}
        return to_event({**self._common, "choices": [choice], **usage_later})

    def _choice(
        self, index: int, text: str, finish_reason: str | None, found: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        logprobs = None
        if self._logprobs and found:
            token_bytes = self._served.token_bytes
            logprobs = completion_logprobs(found, token_bytes, self._offsets[index])
            self._offsets[index] += sum(map(len, logprobs["tokens"]))
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
