"""An engine behind HTTP:

OpenAI's chat completions, health and metrics, as a Starlette application.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from trt_eagle3.decode.answer import Answer
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.request import Chunk, Request
from trt_eagle3.errors import (
    MAX_MESSAGE_LEN,
    EnvironmentMissingError,
    OverloadedError,
    TrtEagle3Error,
    UserError,
    clip,
)
from trt_eagle3.serving.body import BodyBudget, BodyEvictedError, BodyLease, BodyTimeoutError
from trt_eagle3.serving.config import ServingConfig
from trt_eagle3.serving.json_reader import JsonScanner, TooLargeError, parse_request_json
from trt_eagle3.serving.metrics import to_text
from trt_eagle3.serving.openai import ChatOptions, Completion, read_chat, to_event

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.requests import Request as HTTPRequest
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError as missing:
    raise EnvironmentMissingError(
        f"serve: {missing.name} is not installed. Run: pip install starlette uvicorn"
    ) from missing

__all__ = ["Front", "make_app"]

_log = logging.getLogger("trt_eagle3")
_PARSING = 2  # threads that count and parse bodies
# nginx would hold a stream back
_UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def make_app(front: Front) -> Starlette:
    """The application over a loaded engine."""
    routes = [
        Route("/v1/chat/completions", front.chat, methods=["POST"]),
        Route("/v1/models", front.models),
        Route("/health", front.health),
        Route("/metrics", front.metrics),
    ]
    kinds = (TrtEagle3Error, TimeoutError, ClientDisconnect, HTTPException, Exception)
    return Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, front.refuse))


class _RefusedError(TrtEagle3Error):
    """A refusal that HTTP or OpenAI's clients have a status and a code for."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


_STATUSES: Mapping[type[Exception], int] = {  # of a kind before that of its base
    TooLargeError: 413,
    UserError: 400,
    BodyTimeoutError: 408,
    OverloadedError: 503,
    TimeoutError: 504,
}


class Front:
    """What the routes do. Bodies are read within one budget, and parsed on threads of its own."""

    def __init__(self, engine: LLM, serving: ServingConfig, api_key: str | None = None) -> None:
        """``api_key``: what ``/v1`` asks for as a bearer token; None: nothing."""
        self._engine = engine
        self._serving = serving
        self._api_key = api_key
        self._model = engine.bundle.record.config.name
        self._pool = ThreadPoolExecutor(_PARSING, "trt-eagle3-parse")
        self._budget = BodyBudget(serving, self._pool)
        self.on_overload: Callable[[], None] = lambda: None
        """Called when the engine takes no request: whoever knows the connections may make room."""

    def stop(self) -> None:
        """Take no more requests, and wait for no body that is still coming."""
        self._budget.stop()

    async def chat(self, request: HTTPRequest) -> Response:
        """``POST /v1/chat/completions``."""
        self._check_key(request)
        # until the prompt is prepared: then nobody holds the body any more
        with self._budget.lease() as lease:
            options, answer = await self._admit(request, lease)
            chunks = _within(answer, self._serving.max_request_s)
            completion = Completion(self._model)
            gone = asyncio.create_task(_cancel_when_gone(request, answer))
            try:
                # what is wrong with a prompt comes out here, as a status
                first = await anext(chunks)
                lease.close()
                if options.stream:
                    events = _events(options, completion, answer, first, chunks)
                    return StreamingResponse(
                        events, headers=_UNBUFFERED, media_type="text/event-stream"
                    )
                async for _ in chunks:
                    pass
            finally:
                gone.cancel()
        return JSONResponse(completion.whole(answer.generation))

    async def _admit(self, request: HTTPRequest, lease: BodyLease) -> tuple[ChatOptions, Answer]:
        try:
            return await self._submit(request, lease)
        except (
            UserError,
            BodyTimeoutError,
            _RefusedError,
        ):  # whatever is wrong with a prompt, the engine counts
            self._engine.count_rejected()
            raise

    async def _submit(self, request: HTTPRequest, lease: BodyLease) -> tuple[ChatOptions, Answer]:
        data, scanner = await lease.read(request.stream())
        loop = asyncio.get_running_loop()
        options, wanted = await loop.run_in_executor(self._pool, self._read, data, scanner)
        if options.model not in {None, self._model}:
            expected = f"model: expected {self._model!r}, got {options.model!r:.80}"
            raise _RefusedError(404, expected, "model_not_found")
        if self._serving.log_prompts:
            _log.info("request: %s", json.dumps(wanted.prompt, ensure_ascii=False))
        client = request.client.host if request.client else ""
        try:
            return options, self._engine.submit(replace(wanted, client=client))
        except OverloadedError:
            self.on_overload()
            raise

    def _read(self, data: bytearray, scanner: JsonScanner) -> tuple[ChatOptions, Request]:
        raw = parse_request_json(data, "body", self._serving, scanner)
        return read_chat(raw, self._serving, self._engine.bundle.limits.max_seq_len)

    async def models(self, request: HTTPRequest) -> Response:
        """``GET /v1/models``: the one."""
        self._check_key(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "trt-eagle3"}
        # vLLM's field: prompt and answer together
        model["max_model_len"] = self._engine.bundle.limits.max_seq_len
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, _: HTTPRequest) -> Response:
        """``GET /health``: whether the engine answers."""
        return (
            PlainTextResponse("ok")
            if self._engine.ready
            else PlainTextResponse("the engine has stopped", 503)
        )

    async def metrics(self, _: HTTPRequest) -> Response:
        """``GET /metrics``, for Prometheus."""
        return PlainTextResponse(to_text(self._engine.metrics(), {"model": self._model}))

    def _check_key(self, request: HTTPRequest) -> None:
        # latin-1, as all headers
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._api_key is not None and not hmac.compare_digest(
            given.encode(), self._api_key.encode()
        ):
            raise _RefusedError(401, "expected the API key as a bearer token.", "invalid_api_key")

    async def refuse(self, _: HTTPRequest, error: Exception) -> Response:
        """The answer to a request that failed."""
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)  # to nobody
        status = _status(error)
        headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
        if status == 503:
            headers["Retry-After"] = "1"
        if isinstance(error, BodyTimeoutError | BodyEvictedError):
            headers["Connection"] = "close"  # what is left of the body would be the next request
        return JSONResponse(_error(error), status, headers)


async def _within(answer: Answer, seconds: float) -> AsyncGenerator[Chunk]:
    """An answer's chunks while there is time; leaving it early, however that comes, cancels the
    answer.

    Its time runs out whether or not somebody reads: a client that does not would hold its place in
    the batch.
    """
    loop = asyncio.get_running_loop()
    end = loop.call_later(seconds, answer.cancel)
    try:
        async for chunk in answer:
            if chunk.finish_reason == "cancelled":
                if loop.time() >= end.when():
                    raise TimeoutError(f"it took longer than {seconds:g} s.")
                raise OverloadedError("cancelled: the client hung up, or the server is stopping.")
            yield chunk
    finally:
        end.cancel()
        if not answer.over:
            answer.cancel()


async def _cancel_when_gone(request: HTTPRequest, answer: Answer) -> None:
    """Once the body is read, the only news that a client can send is that it hangs up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    answer.cancel()


async def _events(
    options: ChatOptions,
    completion: Completion,
    answer: Answer,
    first: Chunk,
    chunks: AsyncGenerator[Chunk],
) -> AsyncIterator[str]:
    """Server-sent events; a client that goes away ends the generator, and with it the answer."""
    async with contextlib.aclosing(chunks):
        try:
            yield to_event(completion.opening())
            if first.text or first.finish_reason:
                yield to_event(completion.piece(first))
            async for chunk in chunks:
                # else half a character, or what may become a stop text
                if chunk.text or chunk.finish_reason:
                    yield to_event(completion.piece(chunk))
            if options.include_usage:
                yield to_event(completion.usage(answer.generation))
            yield "data: [DONE]\n\n"
        except Exception as error:
            # the status has been sent: what there is to say goes into the stream
            yield to_event(_error(error))


def _status(error: Exception) -> int:
    if isinstance(error, _RefusedError):
        return error.status
    if isinstance(error, HTTPException):
        return error.status_code
    return next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), 500)


def _error(error: Exception) -> dict[str, Any]:
    """OpenAI's error object; of an error that is not ours, its kind only."""
    status = _status(error)
    if isinstance(error, HTTPException):
        message = (
            f"{error.detail}. Served: POST /v1/chat/completions, GET /v1/models, /health and "
            "/metrics."
        )
    elif status == 500:
        _log.error("a request failed: %s: %s", type(error).__name__, clip(error))
        message = f"internal error: {type(error).__name__}"
    else:
        message = str(error)
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = error.code if isinstance(error, _RefusedError) else None
    return {
        "error": {
            "message": clip(message, MAX_MESSAGE_LEN),
            "type": kind,
            "param": None,
            "code": code,
        }
    }
