"""Read JSON inputs: conversations, tools, answer formats, biases."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trt_eagle3.decode.request.conversation import Conversation
from trt_eagle3.decode.request.request import PromptSource
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.errors import UserError
from trt_eagle3.multimodal import Processor
from trt_eagle3.multimodal.assistant_message import PLAIN, AnswerFormat, MessageParser
from trt_eagle3.serving import ServingConfig
from trt_eagle3.serving.json_reader import parse_request_json
from trt_eagle3.serving.openai.fields import read_biases
from trt_eagle3.serving.openai.ignored import IgnoredKeys
from trt_eagle3.serving.openai.known_keys import (
    check_choice_keys,
    check_message_keys,
    check_option_keys,
    check_part_keys,
    check_tool_keys,
)
from trt_eagle3.serving.openai.messages import read_conversation, template_options
from trt_eagle3.serving.openai.repairs import Repairs
from trt_eagle3.serving.openai.structured import StructuredFields, read_grammar
from trt_eagle3.serving.served_model import ServedModel

__all__ = ["Asked", "constrained", "read_asked"]

_log = logging.getLogger("trt_eagle3")
_OF_MESSAGES = ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs")


@dataclass(frozen=True)
class Asked:
    """A parsed prompt.

    Attributes:
        parser: parses the answer to messages; None: the answer is a text.
        answer_format: form of the answer.
    """

    prompt: PromptSource
    parser: MessageParser | None = None
    answer_format: AnswerFormat = PLAIN


def read_asked(single: Mapping[str, Any], serving: ServingConfig, served: ServedModel) -> Asked:
    """Read the prompt of an inference request; ``single`` has its inputs of one value.

    Raises:
        UserError: no prompt or two, or an error in messages and tools.
    """
    text, messages = single.get("text_input"), single.get("messages")
    if (text is None) == (messages is None):
        raise UserError(
            "request: expected text_input or messages, got "
            + ("neither." if text is None else "both.")
        )
    if messages is None:
        alone = next((name for name in _OF_MESSAGES if name in single), None)
        if alone is not None:
            raise UserError(f"{alone}: needs messages, got text_input.")
        serving.check_prompt(text or "")
        return Asked(text or "")
    conversation = _conversation(single, messages, serving, served.processor)
    answer_format = served.answer_format(conversation)
    return Asked(conversation, conversation.parser(answer_format), answer_format)


def _conversation(
    single: Mapping[str, Any], messages: str, serving: ServingConfig, processor: Processor
) -> Conversation:
    choice = single.get("tool_choice")
    if choice is not None and choice.lstrip().startswith("{"):
        choice = _object(choice, "tool_choice", serving)
    turns = _list(messages, "messages", serving)
    tools = _list(single.get("tools", "[]"), "tools", serving)
    options = _object(single.get("chat_template_kwargs", "{}"), "chat_template_kwargs", serving)
    ignored = IgnoredKeys(strict=serving.strict_fields)
    check_message_keys(turns, ignored, processor.template.reads_of_messages)
    check_part_keys(turns, ignored, processor, "messages")
    check_tool_keys(tools, ignored)
    check_choice_keys(choice, ignored)
    check_option_keys(options, ignored, processor.template.takes_option)
    repairs = Repairs(text_arguments=processor.text_arguments)
    repairs.check_messages(turns)
    for what, paths in (("ignored", ignored.paths), ("repaired", repairs.paths)):
        if paths:  # Triton has no response header for it
            _log.warning("keys of a request are %s: %s", what, ", ".join(paths))
    return read_conversation(
        turns,
        tools,
        choice,
        serving,
        parallel=single.get("parallel_tool_calls", True),
        options=template_options(options, None),
    )


def constrained(
    sampling: SamplingParams, asked: Asked, single: Mapping[str, Any], serving: ServingConfig
) -> SamplingParams:
    """Add the biases and the grammar in ``single`` to ``sampling``.

    Raises:
        UserError: not JSON, or an error in the values.
    """
    given: dict[str, Any] = {
        name: _object(single[name], name, serving)
        for name in ("response_format", "structured_outputs")
        if name in single
    }
    biases = _object(single.get("logit_bias", "{}"), "logit_bias", serving)
    sampling = sampling.updated(
        grammar=read_grammar(StructuredFields(**given)), logit_bias=read_biases(biases)
    )
    if isinstance(asked.prompt, Conversation):
        return asked.prompt.constrained(sampling, asked.answer_format)
    return sampling


def _list(text: str, name: str, serving: ServingConfig) -> list[Any]:
    value = parse_request_json(text.encode(), name, serving)
    if not isinstance(value, list):
        raise UserError(f"{name}: expected a JSON list of {name}, got {type(value).__name__}.")
    return value


def _object(text: str, name: str, serving: ServingConfig) -> dict[str, Any]:
    value = parse_request_json(text.encode(), name, serving)
    if not isinstance(value, dict):
        raise UserError(f"{name}: expected a JSON object, got {type(value).__name__}.")
    return value
