"""An engine behind HTTP: OpenAI's chat completions, health and metrics, as a Starlette application."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import signal
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from trt_eagle3.decode.answer import Answer
from trt_eagle3.decode.engine import Engine, load
from trt_eagle3.decode.request import Chunk
from trt_eagle3.errors import EnvironmentMissingError, OverloadedError, TrtEagle3Error, UserError
from trt_eagle3.serving.config import ServingConfig
from trt_eagle3.serving.metrics import to_text
from trt_eagle3.serving.openai import ChatBody, Completion, read_chat, to_event
from trt_eagle3.serving.warm_up import warm_up

try:
    import uvicorn
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

__all__ = ["make_app", "serve"]

_log = logging.getLogger("trt_eagle3")
_DRAIN_S = 30
_FLUSH_S = 5  # to send what is left to say
_UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # nginx would hold a stream back
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(bundle: Path, *, serving: ServingConfig, host: str, port: int, api_key: str | None) -> None:
    """Serve ``bundle`` until SIGTERM or SIGINT; requests in flight may then take 30 s more.

    SIGTERM ends the process with status 0 then. Call it from the main thread, which is where signals arrive.

    Raises:
        UserError: no bundle, an empty API key, or no such address to listen on.
    """
    if api_key == "":
        raise UserError("--api-key: it is empty, and would let everybody in. Give a key, or leave the option out.")
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(place) for place in _bind(host, port)]
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
        _log.setLevel(logging.INFO)
        if api_key is None and host not in _LOOPBACK:
            _log.warning("listening on %s without an API key: whoever reaches this port is answered", host)
        engine = load(bundle, media=serving.media())
        stack.callback(engine.close)
        seconds = warm_up(engine)
        app = make_app(engine, serving, api_key)
        config = uvicorn.Config(app, timeout_graceful_shutdown=_DRAIN_S + _FLUSH_S, log_level="warning")
        for place in sockets:
            place.listen(config.backlog)
        name, where = engine.record.config.name, f"[{host}]" if ":" in host else host
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again once it has drained
        _log.info("%s answers on http://%s:%d/v1; warm-up took %.1f s", name, where, port, seconds)
        _Server(config, engine).run(sockets)


class _Server(uvicorn.Server):
    """Tells those whose answers are not ready in time, rather than cut them off."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(_DRAIN_S, self._engine.close)
        await super().shutdown(sockets)


def _bind(host: str, port: int) -> list[socket.socket]:
    """Take the port before a big engine is loaded; nobody is let in before the server listens."""
    bound: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            place = socket.socket(family, kind, protocol)
            bound.append(place)
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                place.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            place.bind(address)
    except OSError as error:
        for place in bound:
            place.close()
        raise UserError(f"{host}:{port}: cannot listen: {error.strerror}. Name another --host or --port.") from error
    return bound


def make_app(engine: Engine, serving: ServingConfig, api_key: str | None = None) -> Starlette:
    """The application over a loaded engine. ``api_key``: what ``/v1`` asks for as a bearer token; None: nothing."""
    front = _Front(engine, serving, api_key)
    routes = [
        Route("/v1/chat/completions", front.chat, methods=["POST"]),
        Route("/v1/models", front.models),
        Route("/health", front.health),
        Route("/metrics", front.metrics),
    ]
    kinds = (TrtEagle3Error, TimeoutError, ClientDisconnect, HTTPException, Exception)
    return Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, _refuse))


class _RefusedError(TrtEagle3Error):
    """A refusal that HTTP or OpenAI's clients have a status and a code for."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class _Front:
    def __init__(self, engine: Engine, serving: ServingConfig, api_key: str | None) -> None:
        self._engine = engine
        self._serving = serving
        self._api_key = api_key
        self._model = engine.record.config.name

    async def chat(self, request: HTTPRequest) -> Response:
        """``POST /v1/chat/completions``."""
        self._check_key(request)
        raw = _parse(await self._read_body(request))
        body, wanted = read_chat(raw, self._serving, self._engine.limits.max_seq_len)
        if body.model not in {None, self._model}:
            raise _RefusedError(404, f"model: expected {self._model!r}, got {body.model!r:.80}", "model_not_found")
        if self._serving.log_prompts:
            _log.info("request: %s", json.dumps(wanted.prompt, ensure_ascii=False))
        client = request.client.host if request.client else ""
        answer = self._engine.submit(replace(wanted, client=client))
        chunks = _within(answer, self._serving.max_request_s)
        completion = Completion(self._model)
        gone = asyncio.create_task(_cancel_when_gone(request, answer))
        try:
            if body.stream:
                first = await anext(chunks)  # what is wrong with a prompt comes out here, as a status
                events = _events(body, completion, answer, first, chunks)
                return StreamingResponse(events, headers=_UNBUFFERED, media_type="text/event-stream")
            async for _ in chunks:
                pass
        finally:
            gone.cancel()
        return JSONResponse(completion.whole(answer.generation))

    async def models(self, request: HTTPRequest) -> Response:
        """``GET /v1/models``: the one."""
        self._check_key(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "trt-eagle3"}
        model["max_model_len"] = self._engine.limits.max_seq_len  # vLLM's field: prompt and answer together
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, _: HTTPRequest) -> Response:
        """``GET /health``: whether the engine answers."""
        return PlainTextResponse("ok") if self._engine.ready else PlainTextResponse("the engine has stopped", 503)

    async def metrics(self, _: HTTPRequest) -> Response:
        """``GET /metrics``, for Prometheus."""
        return PlainTextResponse(to_text(self._engine.metrics(), {"model": self._model}))

    async def _read_body(self, request: HTTPRequest) -> bytes:
        data, limit = bytearray(), self._serving.max_body_bytes
        async for block in request.stream():
            data += block
            if len(data) > limit:
                raise _RefusedError(413, f"body: more than {limit} bytes. Send fewer or smaller images.")
        return bytes(data)

    def _check_key(self, request: HTTPRequest) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._api_key is not None and not hmac.compare_digest(given.encode(), self._api_key.encode()):
            raise _RefusedError(401, "expected the API key as a bearer token.", "invalid_api_key")


async def _within(answer: Answer, seconds: float) -> AsyncGenerator[Chunk]:
    """An answer's chunks while there is time; leaving it early, however that comes, cancels the answer.

    Its time runs out whether or not somebody reads: a client that does not would hold its place in the batch.
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
    body: ChatBody, completion: Completion, answer: Answer, first: Chunk, chunks: AsyncGenerator[Chunk]
) -> AsyncIterator[str]:
    """Server-sent events; a client that goes away ends the generator, and with it the answer."""
    async with contextlib.aclosing(chunks):
        try:
            yield to_event(completion.opening())
            if first.text or first.finish_reason:
                yield to_event(completion.piece(first))
            async for chunk in chunks:
                if chunk.text or chunk.finish_reason:  # else half a character, or what may become a stop text
                    yield to_event(completion.piece(chunk))
            if body.stream_options and body.stream_options.include_usage:
                yield to_event(completion.usage(answer.generation))
            yield "data: [DONE]\n\n"
        except Exception as error:  # the status has been sent: what there is to say goes into the stream
            yield to_event(_error(error))


async def _refuse(_: HTTPRequest, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # to nobody
    status = _status(error)
    headers = error.headers if isinstance(error, HTTPException) else {"Retry-After": "1"} if status == 503 else None
    return JSONResponse(_error(error), status, headers)


def _status(error: Exception) -> int:
    match error:
        case _RefusedError():
            return error.status
        case HTTPException():
            return error.status_code
        case UserError():
            return 400
        case OverloadedError():
            return 503
        case TimeoutError():
            return 504
        case _:
            return 500


def _error(error: Exception) -> dict[str, Any]:
    """OpenAI's error object; of an error that is not ours, its kind only."""
    status = _status(error)
    if isinstance(error, HTTPException):
        message = f"{error.detail}. Served: POST /v1/chat/completions, GET /v1/models, /health and /metrics."
    elif status == 500:
        _log.error("a request failed: %s: %s", type(error).__name__, error)
        message = f"internal error: {type(error).__name__}"
    else:
        message = str(error)
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = error.code if isinstance(error, _RefusedError) else None
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"body: not JSON ({error}). Check it.") from error
