"""Read bodies of ``/v1/responses``. Each has the whole conversation; nothing is stored."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic import Field

from trt_eagle3.decode.request.request import Request
from trt_eagle3.errors import UserError
from trt_eagle3.multimodal import Processor
from trt_eagle3.serving.config import ServingConfig
from trt_eagle3.serving.errors import FieldError, with_param
from trt_eagle3.serving.openai.call import Call
from trt_eagle3.serving.openai.fields import (
    SamplingFields,
    Whole,
    check_model,
    read_fields,
    sampling,
)
from trt_eagle3.serving.openai.ignored import IgnoredKeys
from trt_eagle3.serving.openai.known_keys import (
    check_choice_keys,
    check_format_keys,
    check_function_keys,
    check_option_keys,
    check_part_keys,
)
from trt_eagle3.serving.openai.messages import read_conversation, template_options
from trt_eagle3.serving.openai.reasoning_tokens import count_reasoning_tokens
from trt_eagle3.serving.openai.repairs import Repairs
from trt_eagle3.serving.openai.response_input import read_input, read_response_tools
from trt_eagle3.serving.openai.response_reply import ResponseReply
from trt_eagle3.serving.openai.structured import read_format
from trt_eagle3.serving.served_model import ServedModel

__all__ = ["ResponseFields", "read_response", "response_error"]

_LOGPROBS = "message.output_text.logprobs"
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "truncation": ("disabled",),
    "max_tool_calls": (),
    "n": (1,),
    "context_management": ([],),
}
_ALIASES = {
    "prompt": "input",
    "text": "input",
    "messages": "input",
    "chat template": "input",
    "max_tokens": "max_output_tokens",
}


class ResponseFields(SamplingFields):
    """The body of ``POST /v1/responses``."""

    input: Any
    instructions: str | None = None
    max_output_tokens: Whole | None = None
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    text: dict[str, Any] = Field(default_factory=dict)
    reasoning: dict[str, Any] = Field(default_factory=dict)
    top_logprobs: Whole | None = None
    include: list[str] = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] | None = None


def response_error(error: UserError) -> UserError:
    """Attach the request field that ``error`` is about."""
    fields = ResponseFields.model_fields.keys() - {"text"}
    return with_param(error, fields, _ALIASES)


def read_response(raw: Any, served: ServedModel, serving: ServingConfig) -> Call:
    """Validate a body, and make the call.

    Raises:
        UserError: a bad value, an unserved field, too long an input, bad tools.
        RefusedError: the body names another model.
    """
    fields, ignored = read_fields(raw, ResponseFields, _NEUTRAL, serving)
    name = check_model(fields.model, served)
    _check_keys(fields, ignored, served.processor)
    repairs = Repairs(text_arguments=served.processor.text_arguments)
    conversation = read_conversation(
        read_input(fields.input, fields.instructions, ignored, repairs),
        read_response_tools(fields.tools),
        fields.tool_choice,
        serving,
        parallel=fields.parallel_tool_calls,
        options=template_options(fields.chat_template_kwargs, fields.reasoning.get("effort")),
    )
    answer_format = served.answer_format(conversation)
    logprobs = _num_logprobs(fields)
    chosen = sampling(fields, served, serving, fields.max_output_tokens).updated(
        grammar=read_format(fields.text.get("format"), "text.format"), logprobs=logprobs
    )
    request = Request(
        conversation,
        sampling=conversation.constrained(chosen, answer_format),
        speculation=fields.speculation,
    )
    reply = ResponseReply(
        _echo(name, fields),
        conversation.parser(answer_format),
        served.token_bytes if logprobs is not None else None,
        count_reasoning=partial(count_reasoning_tokens, served.processor, answer_format.reasoning),
    )
    return Call((request,), reply, fields.stream, ignored.paths, repairs.paths)


def _check_keys(fields: ResponseFields, ignored: IgnoredKeys, processor: Processor) -> None:
    """Check the keys below the body's top level, except those of input items."""
    check_part_keys(fields.input, ignored, processor, "input")
    check_function_keys(fields.tools, ignored)
    check_choice_keys(fields.tool_choice, ignored)
    ignored.check(fields.text, ("format", "verbosity"), "text")
    check_format_keys(fields.text.get("format"), ignored, "text.format")
    ignored.check(fields.reasoning, ("effort",), "reasoning")
    check_option_keys(fields.chat_template_kwargs, ignored, processor.template.takes_option)
    for i, name in enumerate(fields.include):
        if name != _LOGPROBS:
            ignored.add(f"include[{i}]")


def _num_logprobs(fields: ResponseFields) -> int | None:
    if _LOGPROBS in fields.include:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise FieldError(
            f"top_logprobs: needs {_LOGPROBS} in include.",
            "top_logprobs",
        )
    return None


def _echo(model: str, fields: ResponseFields) -> dict[str, Any]:
    """Return the request's fields that the response repeats."""
    return {
        "model": model,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": fields.reasoning.get("effort"), "summary": None},
        "store": False,
        "temperature": fields.temperature,
        "text": fields.text or {"format": {"type": "text"}},
        "tool_choice": fields.tool_choice or "auto",
        "tools": fields.tools,
        "top_p": fields.top_p,
        "truncation": "disabled",
        "user": fields.user,
    }
