"""Write the answers of ``/v1/chat/completions``, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trt_eagle3.decode.request.request import Chunk, Generation
from trt_eagle3.decode.sampling.logprobs import TokenLogprob
from trt_eagle3.multimodal import Processor
from trt_eagle3.multimodal.assistant_message import (
    AssistantMessage,
    CallDelta,
    MessageDelta,
    MessageParser,
)
from trt_eagle3.multimodal.tokenizer import TokenBytes
from trt_eagle3.serving.openai.acceptance import AcceptanceField
from trt_eagle3.serving.openai.call import CountReasoning, to_event
from trt_eagle3.serving.openai.logprobs import chat_logprobs, prompt_logprobs
from trt_eagle3.serving.openai.usage import usage

__all__ = ["ChatReply", "message_object"]


class ChatReply:
    """Writes the objects of one completion; they share an id and a time."""

    def __init__(
        self,
        model: str,
        parsers: Sequence[MessageParser],
        *,
        count_reasoning: CountReasoning,
        token_bytes: TokenBytes,
        logprobs: bool = False,
        include_usage: bool = False,
        pieces: Processor | None = None,
    ) -> None:
        """Start a reply.

        Args:
            parsers: one per answer.
            count_reasoning: counts the reasoning ids of an answer.
            token_bytes: for log-probabilities. logprobs: of the answers' tokens.
            pieces: for the field ``trt_eagle3`` of chunks; None: no such field.
        """
        self._common = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._parsers = parsers
        self._count_reasoning = count_reasoning
        self._token_bytes = token_bytes
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._acceptance = [AcceptanceField(pieces) for _ in parsers] if pieces else None
        self._unsent: list[list[TokenLogprob]] = [[] for _ in parsers]
        self._call_ids: dict[tuple[int, int], str] = {}

    def opening(self) -> str:
        """Return the chunks with the role, one per answer."""
        indices = range(len(self._parsers))
        return "".join(self._chunk(i, {"role": "assistant", "content": ""}, None) for i in indices)

    def piece(self, index: int, chunk: Chunk) -> str:
        """Return one ``chat.completion.chunk``, or none while the text is uncertain."""
        parser = self._parsers[index]
        delta = parser.push(chunk.text)
        if chunk.finish_reason is not None:
            delta += parser.flush()
        reason = self._reason(index, chunk.finish_reason)
        self._unsent[index] += chunk.logprobs
        ours = self._acceptance[index].push(chunk) if self._acceptance else None
        if not delta and reason is None and ours is None:
            return ""
        return self._chunk(index, self._delta(index, delta), reason, ours)

    def closing(self, generations: Sequence[Generation]) -> str:
        """Return the usage, if requested, and the end mark."""
        last = {**self._common, "object": "chat.completion.chunk", "choices": []}
        event = to_event({**last, "usage": self._usage(generations)}) if self._include_usage else ""
        return f"{event}data: [DONE]\n\n"

    def failed(self, error: Mapping[str, Any]) -> str:
        """Return the error without the end mark, which would look like success."""
        return to_event(error)

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """Return the ``chat.completion`` object."""
        choices = [self._choice(i, generation) for i, generation in enumerate(generations)]
        whole = {
            **self._common,
            "object": "chat.completion",
            "choices": choices,
            "usage": self._usage(generations),
        }
        prompt = generations[0].prompt_logprobs
        if prompt is not None:
            whole["prompt_logprobs"] = prompt_logprobs(prompt, self._token_bytes)
        return whole

    def _usage(self, generations: Sequence[Generation]) -> dict[str, Any]:
        answers = zip(generations, self._parsers, strict=True)
        reasoning = sum(
            self._count_reasoning(generation.token_ids, parser.message.reasoning)
            for generation, parser in answers
        )
        return usage(generations, reasoning_tokens=reasoning)

    def _choice(self, index: int, generation: Generation) -> dict[str, Any]:
        parser = self._parsers[index]
        parser.push(generation.text)
        parser.flush()
        found = generation.logprobs
        return {
            "index": index,
            "message": message_object(parser.message, lambda call: self._call_id(index, call)),
            "finish_reason": self._reason(index, generation.finish_reason),
            "logprobs": chat_logprobs(found, self._token_bytes) if self._logprobs else None,
        }

    def _delta(self, index: int, delta: MessageDelta) -> dict[str, Any]:
        written: dict[str, Any] = {}
        if delta.reasoning:
            written["reasoning_content"] = delta.reasoning
        if delta.content:
            written["content"] = delta.content
        if delta.calls:
            written["tool_calls"] = [self._call_delta(index, call) for call in delta.calls]
        return written

    def _call_delta(self, index: int, call: CallDelta) -> dict[str, Any]:
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        return {
            "index": call.index,
            "id": self._call_id(index, call.index),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _call_id(self, index: int, call: int) -> str:
        return self._call_ids.setdefault((index, call), _new_call_id(call))

    def _reason(self, index: int, reason: str | None) -> str | None:
        called = reason == "stop" and self._parsers[index].message.calls
        return "tool_calls" if called else reason

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        finish_reason: str | None,
        ours: Mapping[str, Any] | None = None,
    ) -> str:
        found, self._unsent[index] = self._unsent[index], []
        choice = {
            "index": index,
            "delta": delta,
            "finish_reason": finish_reason,
            "logprobs": chat_logprobs(found, self._token_bytes)
            if self._logprobs and found
            else None,
        }
        event = {**self._common, "object": "chat.completion.chunk", "choices": [choice]}
        if self._include_usage:
            event["usage"] = None  # the last chunk has the usage
        if ours is not None:
            event["trt_eagle3"] = ours
        return to_event(event)


def _new_call_id(_call: int) -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def message_object(
    message: AssistantMessage, call_id: Callable[[int], str] = _new_call_id
) -> dict[str, Any]:
    """Build OpenAI's object of a message; ``call_id`` makes the id of each call."""
    content = message.content or (None if message.calls else "")
    written: dict[str, Any] = {"role": "assistant", "content": content}
    if message.reasoning:
        written["reasoning_content"] = message.reasoning
    if message.calls:
        written["tool_calls"] = [
            {
                "id": call_id(i),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for i, (name, arguments) in enumerate(message.calls)
        ]
    return written
