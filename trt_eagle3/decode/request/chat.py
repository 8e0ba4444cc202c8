"""Chat: the request and the parsed answer of a conversation with tools (``LLM.chat``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from trt_eagle3.decode.request.conversation import Conversation
from trt_eagle3.decode.request.request import Generation, Messages, Request
from trt_eagle3.decode.sampling.sampling_params import SamplingOptions, SamplingParams
from trt_eagle3.multimodal import Processor
from trt_eagle3.multimodal.assistant_message import AssistantMessage
from trt_eagle3.multimodal.tools import read_tools

__all__ = ["ChatAnswer", "ChatOptions", "ChatTools", "are_conversations", "chat_request"]


@dataclass(frozen=True)
class ChatTools:
    """The tools that the model may call, with fields as in OpenAI's API, and how the prompt ends.

    Attributes:
        tools: OpenAI's objects, ``{"type": "function", "function": {...}}``.
        tool_choice: ``auto``, ``none``, ``required``, or the name of a tool.
        template_options: further variables of the chat template, such as ``enable_thinking``.
        add_generation_prompt, continue_final_message: see ``Conversation``.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    template_options: Mapping[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


class ChatOptions(SamplingOptions, total=False):
    """Keywords of ``LLM.chat``: fields of ``ChatTools`` and of ``SamplingParams``."""

    tools: Sequence[Mapping[str, Any]]
    tool_choice: str
    parallel_tool_calls: bool
    template_options: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    speculation: bool
    sampling_params: SamplingParams | None


@dataclass(frozen=True)
class ChatAnswer:
    """An answer, and the message parsed from it."""

    message: AssistantMessage
    generation: Generation


def chat_request(
    messages: Messages,
    tools: ChatTools,
    sampling: SamplingParams,
    processor: Processor,
    *,
    speculation: bool = True,
) -> tuple[Request, Callable[[Generation], ChatAnswer]]:
    """Return the request of a conversation, and a function that parses its answers.

    Raises:
        UserError: the messages or the tools are invalid.
    """
    options = dict(tools.template_options or {})
    conversation = Conversation(
        messages,
        read_tools(tools.tools),
        tools.tool_choice,
        tools.parallel_tool_calls,
        options,
        tools.add_generation_prompt,
        tools.continue_final_message,
    )
    usual = processor.answer_format(options, with_tools=bool(conversation.offered))
    answer_format = conversation.answer_format(usual)
    request = Request(
        conversation,
        sampling=conversation.constrained(sampling, answer_format),
        speculation=speculation,
    )

    def parse(generation: Generation) -> ChatAnswer:
        parser = conversation.parser(answer_format)
        parser.push(generation.text)
        parser.flush()
        return ChatAnswer(parser.message, generation)

    return request, parse


def are_conversations(messages: Messages | Sequence[Messages]) -> TypeGuard[Sequence[Messages]]:
    """Return whether ``messages`` is a list of conversations, not one conversation."""
    return (
        isinstance(messages, list | tuple)
        and len(messages) > 0
        and all(isinstance(entry, list | tuple) for entry in messages)
    )
