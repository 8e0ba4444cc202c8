"""Send an answer's chunks as responses of a request's sender."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from trt_eagle3.decode.request.answer import Answer
from trt_eagle3.decode.sampling.logprobs import TokenLogprob
from trt_eagle3.errors import MAX_MESSAGE_LEN, OverloadedError, UserError, clip
from trt_eagle3.serving import ServingConfig
from trt_eagle3.serving.openai.chat_reply import message_object
from trt_eagle3.serving.openai.logprobs import response_logprobs
from trt_eagle3.serving.served_model import ServedModel
from trt_eagle3.triton.request import ParsedRequest

__all__ = ["ResponseStream", "refuse"]

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class ResponseStream:
    """One request in progress. All methods run in one event loop."""

    def __init__(
        self,
        sender: Any,
        parsed: ParsedRequest,
        answer: Answer,
        serving: ServingConfig,
        served: ServedModel,
    ) -> None:
        self._sender = sender
        self._order = parsed
        self._answer = answer
        self._serving = serving
        self._served = served
        self._start = time.monotonic()
        self._sent = 0.0
        self._late = self._over = False
        # received but not sent yet
        self._text = parsed.echo
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    async def run(self) -> None:
        """Send chunks as they arrive, or all of them at the end."""
        try:
            async for chunk in self._answer:
                if chunk.finish_reason == "cancelled":
                    self._end(TimeoutError() if self._late else None)
                    return
                self._text += chunk.text
                self._token_ids += chunk.token_ids
                self._logprobs += chunk.logprobs
                if chunk.finish_reason:
                    self._send(chunk.finish_reason)
                else:
                    self._send_due()
        except Exception as error:
            self._answer.cancel()
            self._end(error)

    def look_after(self) -> None:
        """Send due chunks, and cancel a request that was cancelled or has exceeded its time.

        The model calls this periodically.
        """
        if self._over:
            return
        self._send_due()
        self._late = time.monotonic() - self._start > self._serving.max_request_s
        if self._late or self._sender.is_cancelled():
            self._answer.cancel()

    def _send_due(self) -> None:
        new = self._text or (self._order.return_token_ids and self._token_ids)
        if (
            self._order.stream
            and new
            and time.monotonic() - self._sent >= self._serving.stream_interval_s
        ):
            self._send(None)

    def _send(self, finish_reason: str | None) -> None:
        outputs = [_strings("text_output", self._text)]
        if self._order.return_token_ids:
            outputs.append(pb_utils.Tensor("token_ids", np.array(self._token_ids, dtype=np.int32)))
        if self._order.request.sampling.logprobs is not None:
            found = response_logprobs(self._logprobs, self._served.token_bytes)
            outputs.append(_strings("logprobs", json.dumps(found, ensure_ascii=False)))
        if finish_reason:  # every tensor costs time, so these are sent once
            outputs += [_strings("finish_reason", finish_reason), *self._summary()]
        self._text, self._token_ids, self._logprobs = "", [], []
        self._sent = time.monotonic()
        self._over = finish_reason is not None
        self._sender.send(pb_utils.InferenceResponse(outputs), flags=_FINAL if finish_reason else 0)

    def _summary(self) -> list[Any]:
        generation = self._answer.generation
        numbers = {
            "num_input_tokens": generation.prompt_tokens,
            "num_output_tokens": len(generation.token_ids),
        }
        outputs = [
            pb_utils.Tensor(name, np.array([value], dtype=np.int32))
            for name, value in numbers.items()
        ]
        if self._order.parser is not None:
            outputs.append(_strings("message", self._message(generation.text)))
        if generation.acceptance_length is not None:
            value = np.array([generation.acceptance_length], dtype=np.float32)
            outputs.append(pb_utils.Tensor("acceptance_length", value))
        return outputs

    def _message(self, text: str) -> str:
        """Return the answer as OpenAI's message."""
        parser = self._order.parser
        assert parser is not None
        parser.push(text)
        parser.flush()
        return json.dumps(message_object(parser.message), ensure_ascii=False)

    def _end(self, error: BaseException | None) -> None:
        if not self._over:
            self._over = True
            refuse(self._sender, error)


def _strings(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode("utf-8", "replace")], dtype=np.object_))


def refuse(sender: Any, error: BaseException | None) -> None:
    """End a request with an error: invalid, overloaded, cancelled (None), or internal."""
    codes = pb_utils.TritonError
    match error:
        case None:
            code, message = codes.CANCELLED, "cancelled"
        case TimeoutError():
            code, message = codes.CANCELLED, "cancelled: it took longer than max_request_s"
        case OverloadedError():
            code, message = codes.UNAVAILABLE, str(error)
        case UserError():
            code, message = codes.INVALID_ARG, str(error)
        case _:
            code, message = codes.INTERNAL, f"internal error: {type(error).__name__}."
            pb_utils.Logger.log_error(
                f"trt_eagle3: a request failed: {type(error).__name__}: {clip(error)}"
            )
    for text in (
        clip(message, MAX_MESSAGE_LEN),
        "refused",
    ):  # a client without a response waits for ever, and blocks SIGTERM
        try:
            sender.send(
                pb_utils.InferenceResponse(error=pb_utils.TritonError(text, code)), flags=_FINAL
            )
        except Exception as failure:  # the client may be gone
            pb_utils.Logger.log_verbose(f"trt_eagle3: a refusal could not be sent: {clip(failure)}")
        else:
            return
