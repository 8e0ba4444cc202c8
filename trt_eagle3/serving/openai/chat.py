"""``/v1/chat/completions``: the body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from trt_eagle3.decode.request import Request
from trt_eagle3.decode.sampling_params import MAX_LOGPROBS
from trt_eagle3.errors import UserError
from trt_eagle3.serving.config import ServingConfig
from trt_eagle3.serving.errors import FieldError, with_param
from trt_eagle3.serving.openai.call import Call
from trt_eagle3.serving.openai.chat_reply import ChatReply
from trt_eagle3.serving.openai.fields import (
    SamplingFields,
    check_model,
    read_fields,
    repeated,
    sampling,
)
from trt_eagle3.serving.openai.messages import (
    read_conversation,
    read_part_keys,
    template_options,
    with_processor_options,
)
from trt_eagle3.serving.openai.structured import StructuredFields, read_grammar
from trt_eagle3.serving.served_model import ServedModel

__all__ = ["ALIASES", "ChatFields", "chat_error", "read_chat"]

# What many clients send whether or not it was asked for: served with these values only.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "best_of": (1,),
    "echo": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
}
ALIASES = {"prompt": "messages", "text": "messages", "chat template": "messages"}
"""What the engine calls a field of ours."""


class ChatFields(SamplingFields, StructuredFields):
    """The body of ``POST /v1/chat/completions``."""

    messages: list[Any]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    verbosity: Any = None


def chat_error(error: UserError) -> UserError:
    """``error`` with the field that it is about."""
    return with_param(error, ChatFields.model_fields, ALIASES)


def read_chat(raw: Any, served: ServedModel, serving: ServingConfig) -> Call:
    """Check a body.

    Raises:
        UserError: a bad value, an unserved field, too long a prompt, bad tools.
        RefusedError: another model is asked for.
    """
    fields, ignored = read_fields(raw, ChatFields, _NEUTRAL, serving)
    name = check_model(fields.model, served)
    ignored += read_part_keys(fields.messages, "messages", served, serving)
    messages, unknown = with_processor_options(
        fields.messages, fields.mm_processor_kwargs, served, serving
    )
    ignored += unknown
    conversation = read_conversation(
        messages,
        fields.tools,
        fields.tool_choice,
        serving,
        parallel=fields.parallel_tool_calls,
        options=template_options(fields.chat_template_kwargs, fields.reasoning_effort),
    )
    answer_format = served.answer_format(conversation.template_options)
    newer = fields.max_completion_tokens
    limit = fields.max_tokens if newer is None else newer
    chosen = sampling(fields, served, serving, limit).updated(
        grammar=read_grammar(fields), logprobs=_num_logprobs(fields)
    )
    request = Request(
        conversation,
        sampling=conversation.constrained(chosen, answer_format),
        speculation=fields.speculation,
    )
    reply = ChatReply(
        name,
        [conversation.parser(answer_format) for _ in range(fields.n)],
        count_tokens=lambda text: len(served.processor.tokenize(text)),
        token_bytes=served.token_bytes if fields.logprobs else None,
        include_usage=bool(fields.stream_options.include_usage),
        pieces=served.processor if fields.stream_options.include_acceptance else None,
    )
    apart = bool(fields.stream_options.include_acceptance)
    return Call(repeated(request, fields.n), reply, fields.stream, ignored, apart)


def _num_logprobs(fields: ChatFields) -> int | None:
    if fields.top_logprobs and not fields.logprobs:
        raise FieldError("top_logprobs: expected logprobs to be true with it.", "top_logprobs")
    if not 0 <= (fields.top_logprobs or 0) <= MAX_LOGPROBS:
        raise FieldError(
            f"top_logprobs: expected a whole number from 0 to {MAX_LOGPROBS}, got "
            f"{fields.top_logprobs}",
            "top_logprobs",
        )
    return (fields.top_logprobs or 0) if fields.logprobs else None
