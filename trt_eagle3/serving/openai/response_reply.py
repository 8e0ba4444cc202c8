"""Write the answer of ``/v1/responses``, whole or as events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from trt_eagle3.decode.request.request import Chunk, Generation
from trt_eagle3.decode.sampling.logprobs import TokenLogprob
from trt_eagle3.multimodal.assistant_message import MessageDelta, MessageParser
from trt_eagle3.multimodal.tokenizer import TokenBytes
from trt_eagle3.serving.openai.call import CountReasoning, to_event
from trt_eagle3.serving.openai.logprobs import response_logprobs
from trt_eagle3.serving.openai.response_items import OutputItems
from trt_eagle3.serving.openai.usage import usage

__all__ = ["ResponseReply"]


class ResponseReply:
    """Writes one response."""

    def __init__(
        self,
        echo: Mapping[str, Any],
        parser: MessageParser,
        token_bytes: TokenBytes | None,
        *,
        count_reasoning: CountReasoning,
    ) -> None:
        """Start a reply.

        Args:
            echo: the fields repeated from the request.
            token_bytes: for log-probabilities; None: no log-probabilities.
            count_reasoning: counts the reasoning ids of the answer.
        """
        self._common = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            **echo,
        }
        self._parser = parser
        self._token_bytes = token_bytes
        self._count_reasoning = count_reasoning
        self._items = OutputItems()
        self._num_events = 0

    def opening(self) -> str:
        """Return ``response.created`` and ``response.in_progress``."""
        begun = {"response": self._response("in_progress")}
        kinds = ("response.created", "response.in_progress")
        return "".join(self._event({"type": kind, **begun}) for kind in kinds)

    def piece(self, index: int, chunk: Chunk) -> str:
        """Return the events of a chunk."""
        del index
        delta = self._parser.push(chunk.text)
        if chunk.finish_reason is not None:
            delta += self._parser.flush()
        return self._add(delta, chunk.logprobs)

    def closing(self, generations: Sequence[Generation]) -> str:
        """Return the end of the last item, and the completed or incomplete response."""
        status = self._status(generations[0].finish_reason)
        events = [self._event(event) for event in self._items.close(status)]
        response = self._response(status, self._usage(generations))
        return "".join(events) + self._event({"type": f"response.{status}", "response": response})

    def failed(self, error: Mapping[str, Any]) -> str:
        """Return ``response.failed``."""
        found = error["error"]
        code = found["code"] or "server_error"
        response = {
            **self._response("failed"),
            "error": {"code": code, "message": found["message"]},
        }
        return self._event({"type": "response.failed", "response": response})

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """Return the response of a completed answer."""
        [generation] = generations
        delta = self._parser.push(generation.text)
        delta += self._parser.flush()
        self._add(delta, generation.logprobs)
        status = self._status(generation.finish_reason)
        self._items.close(status)
        return self._response(status, self._usage(generations))

    def _usage(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """Return ``usage`` under the names of this endpoint."""
        [generation] = generations
        count = self._count_reasoning(generation.token_ids, self._parser.message.reasoning)
        counts = usage(generations, reasoning_tokens=count)
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": counts["completion_tokens_details"],
            "total_tokens": counts["total_tokens"],
            "acceptance_length": counts["acceptance_length"],
        }

    def _add(self, delta: MessageDelta, logprobs: Sequence[TokenLogprob]) -> str:
        found = response_logprobs(logprobs, self._token_bytes) if self._token_bytes else []
        return "".join(self._event(event) for event in self._items.add(delta, found))

    def _status(self, reason: str | None) -> str:
        return "incomplete" if reason == "length" else "completed"

    def _response(self, status: str, counts: Mapping[str, Any] | None = None) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._common,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "output": self._items.written,
            "usage": counts,
        }

    def _event(self, event: Mapping[str, Any]) -> str:
        self._num_events += 1
        return to_event({**event, "sequence_number": self._num_events - 1}, event["type"])
