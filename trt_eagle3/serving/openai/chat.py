"""Read bodies of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic import Field

from trt_eagle3.decode.request.request import Request
from trt_eagle3.decode.request.request_list import repeated
from trt_eagle3.decode.sampling.sampling_params import MAX_LOGPROBS
from trt_eagle3.errors import UserError
from trt_eagle3.multimodal import Processor
from trt_eagle3.serving.config import ServingConfig
from trt_eagle3.serving.errors import FieldError, with_param
from trt_eagle3.serving.openai.call import Call
from trt_eagle3.serving.openai.chat_reply import ChatReply
from trt_eagle3.serving.openai.fields import (
    SamplingFields,
    Whole,
    check_model,
    check_prompt_logprobs,
    read_fields,
    sampling,
)
from trt_eagle3.serving.openai.ignored import IgnoredKeys
from trt_eagle3.serving.openai.known_keys import (
    check_choice_keys,
    check_format_keys,
    check_message_keys,
    check_option_keys,
    check_part_keys,
    check_tool_keys,
)
from trt_eagle3.serving.openai.messages import read_conversation, template_options
from trt_eagle3.serving.openai.reasoning_tokens import count_reasoning_tokens
from trt_eagle3.serving.openai.repairs import Repairs
from trt_eagle3.serving.openai.structured import StructuredFields, read_grammar
from trt_eagle3.serving.served_model import ServedModel

__all__ = ["ALIASES", "ChatFields", "chat_error", "read_chat"]

# Fields that many clients always send. They are accepted with these values only.
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
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
}
ALIASES = {"prompt": "messages", "text": "messages", "chat template": "messages"}
"""Request field by the engine's name for it."""


class ChatFields(SamplingFields, StructuredFields):
    """The body of ``POST /v1/chat/completions``."""

    messages: list[Any]
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Whole | None = None
    prompt_logprobs: Whole | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    mm_processor_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    verbosity: Any = None


def chat_error(error: UserError) -> UserError:
    """Attach the request field that ``error`` is about."""
    return with_param(error, ChatFields.model_fields, ALIASES)


def read_chat(raw: Any, served: ServedModel, serving: ServingConfig) -> Call:
    """Validate a body, and make the call.

    Raises:
        UserError: a bad value, an unserved field, too long a prompt, bad tools.
        RefusedError: the body names another model.
    """
    fields, ignored = read_fields(raw, ChatFields, _NEUTRAL, serving)
    name = check_model(fields.model, served)
    _check_keys(fields, ignored, served.processor)
    repairs = Repairs(text_arguments=served.processor.text_arguments)
    repairs.check_messages(fields.messages)
    messages, unknown = served.processor.with_options(
        fields.messages, fields.mm_processor_kwargs or {}
    )
    for option in unknown:
        ignored.add(f"mm_processor_kwargs.{option:.40}")
    conversation = read_conversation(
        messages,
        fields.tools,
        fields.tool_choice,
        serving,
        parallel=fields.parallel_tool_calls,
        options=template_options(fields.chat_template_kwargs, fields.reasoning_effort),
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
    )
    answer_format = served.answer_format(conversation)
    newer = fields.max_completion_tokens
    limit = fields.max_tokens if newer is None else newer
    check_prompt_logprobs(fields.prompt_logprobs, stream=fields.stream)
    chosen = sampling(fields, served, serving, limit).updated(
        grammar=read_grammar(fields),
        logprobs=_num_logprobs(fields),
        prompt_logprobs=fields.prompt_logprobs,
    )
    request = Request(
        conversation,
        sampling=conversation.constrained(chosen, answer_format),
        speculation=fields.speculation,
    )
    reply = ChatReply(
        name,
        [conversation.parser(answer_format) for _ in range(fields.n)],
        count_reasoning=partial(count_reasoning_tokens, served.processor, answer_format.reasoning),
        token_bytes=served.token_bytes,
        logprobs=fields.logprobs,
        include_usage=bool(fields.stream_options.include_usage),
        pieces=served.processor if fields.stream_options.include_acceptance else None,
    )
    return Call(
        repeated(request, fields.n),
        reply,
        fields.stream,
        ignored.paths,
        repairs.paths,
        apart=bool(fields.stream_options.include_acceptance),
    )


def _check_keys(fields: ChatFields, ignored: IgnoredKeys, processor: Processor) -> None:
    """Check the keys below the body's top level."""
    template = processor.template
    check_message_keys(fields.messages, ignored, template.reads_of_messages)
    check_part_keys(fields.messages, ignored, processor, "messages")
    check_tool_keys(fields.tools, ignored)
    check_choice_keys(fields.tool_choice, ignored)
    check_format_keys(fields.response_format, ignored, "response_format")
    check_option_keys(fields.chat_template_kwargs, ignored, template.takes_option)


def _num_logprobs(fields: ChatFields) -> int | None:
    if fields.top_logprobs and not fields.logprobs:
        raise FieldError("top_logprobs: needs logprobs: true.", "top_logprobs")
    if not 0 <= (fields.top_logprobs or 0) <= MAX_LOGPROBS:
        raise FieldError(
            f"top_logprobs: expected a whole number from 0 to {MAX_LOGPROBS}, got "
            f"{fields.top_logprobs}",
            "top_logprobs",
        )
    return (fields.top_logprobs or 0) if fields.logprobs else None
