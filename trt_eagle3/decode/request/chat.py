"""Chat: the request and the parsed answer of a conversation with tools (``LLM.chat``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trt_eagle3.decode.request.conversation import Conversation
from trt_eagle3.decode.request.request import Generation, Messages, Request
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.multimodal import Processor
from trt_eagle3.multimodal.assistant_message import AssistantMessage, MessageParser
from trt_eagle3.multimodal.tools import read_tools

__all__ = ["ChatAnswer", "ChatTools", "chat_request"]


@dataclass(frozen=True)
class ChatTools:
    """The tools that the model may call. Fields as in OpenAI's API.

    Attributes:
        tools: OpenAI's objects, ``{"type": "function", "function": {...}}``.
        tool_choice: ``auto``, ``none``, ``required``, or the name of a tool.
        template_options: further variables of the chat template, such as ``enable_thinking``.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    template_options: Mapping[str, Any] | None = None


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
) -> tuple[Request, MessageParser]:
    """Make the request of a conversation, and the parser of its answer.

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
    )
    answer_format = processor.answer_format(options, with_tools=bool(conversation.offered))
    request = Request(
        conversation,
        sampling=conversation.constrained(sampling, answer_format),
        speculation=speculation,
    )
    return request, conversation.parser(answer_format)
