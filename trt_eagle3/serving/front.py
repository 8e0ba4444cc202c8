"""Handle the routes of ``serve``."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, TypeVar

from starlette.requests import Request as HTTPRequest
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from trt_eagle3.decode.request.answer import Answer
from trt_eagle3.decode.request.request import PromptSource, Request
from trt_eagle3.errors import OverloadedError, UserError, as_failure, clip
from trt_eagle3.multimodal.caller import Caller
from trt_eagle3.serving.body import BodyBudget, BodyLease, BodyTimeoutError
from trt_eagle3.serving.chat_page import chat_page
from trt_eagle3.serving.config import ServingConfig
from trt_eagle3.serving.delivery import events, interleaved
from trt_eagle3.serving.docs_page import docs_page
from trt_eagle3.serving.engine import Engine
from trt_eagle3.serving.errors import RefusedError
from trt_eagle3.serving.http_options import HttpOptions
from trt_eagle3.serving.json_reader import parse_request_json
from trt_eagle3.serving.metrics import exposition
from trt_eagle3.serving.openai.call import Call, ReadCall
from trt_eagle3.serving.openai.chat import chat_error, read_chat
from trt_eagle3.serving.openai.completions import completion_error, read_completion
from trt_eagle3.serving.openai.responses import read_response, response_error
from trt_eagle3.serving.openai.tokens import (
    detokenize,
    read_tokenize,
    tokenize_error,
    tokens_object,
)
from trt_eagle3.serving.openapi import openapi_document
from trt_eagle3.serving.served_model import ServedModel

__all__ = ["Front"]

_log = logging.getLogger("trt_eagle3")
_PARSING = 2  # threads that count and parse bodies
_COUNTING = 2  # threads of /tokenize, which may decode images
# stops nginx from buffering a stream
_UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

_T = TypeVar("_T")
_Explain = Callable[[UserError], UserError]


@dataclass(frozen=True)
class _Endpoint:
    """How one route reads bodies, and how its errors name the request's fields."""

    read: ReadCall
    explain: _Explain


_CHAT = _Endpoint(read_chat, chat_error)
_COMPLETION = _Endpoint(read_completion, completion_error)
_RESPONSE = _Endpoint(read_response, response_error)


class Front:
    """The routes of an engine. Bodies share one budget, and a thread pool parses them."""

    def __init__(
        self, engine: Engine, serving: ServingConfig, http: HttpOptions | None = None
    ) -> None:
        self.http = HttpOptions() if http is None else http
        self._engine = engine
        self._serving = serving
        self._served = ServedModel.of(engine, serving, self.http.names)
        self._pool = ThreadPoolExecutor(_PARSING, "trt-eagle3-parse")
        self._counting = ThreadPoolExecutor(_COUNTING, "trt-eagle3-count")
        self._budget = BodyBudget(serving, self._pool)
        self._stalled = False
        self.on_overload: Callable[[], None] = lambda: None
        """Called when the engine refuses a request; the owner of the connections may make room."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model that requests may use."""
        return self._served.names

    def stop(self) -> None:
        """Refuse new requests, and evict bodies that are still arriving."""
        self._budget.stop()

    async def chat(self, request: HTTPRequest) -> Response:
        """``POST /v1/chat/completions``."""
        return await self._generate(request, _CHAT)

    async def completions(self, request: HTTPRequest) -> Response:
        """``POST /v1/completions``."""
        return await self._generate(request, _COMPLETION)

    async def responses(self, request: HTTPRequest) -> Response:
        """``POST /v1/responses``."""
        return await self._generate(request, _RESPONSE)

    async def _generate(self, request: HTTPRequest, endpoint: _Endpoint) -> Response:
        self._check_key(request)
        # until the prompt is prepared; nothing holds the body after that
        with self._budget.lease() as lease:
            call, answers = await self._admit(request, lease, endpoint)
            chunks = interleaved(answers, self._serving.max_request_s, apart=call.apart)
            gone = asyncio.create_task(_call_when_gone(request, *(a.cancel for a in answers)))
            headers = _note_headers(call.ignored, call.repaired)
            try:
                # errors of a prompt are raised here, and become a status
                first = await anext(chunks)
                lease.close()
                if call.stream:
                    return _EventStream(
                        events(call.reply, answers, first, chunks),
                        chunks,
                        headers={**_UNBUFFERED, **headers},
                        media_type="text/event-stream",
                    )
                async for _ in chunks:
                    pass
            except UserError as error:
                raise endpoint.explain(error) from error
            except OverloadedError:
                if any(answer.error is not None for answer in answers):  # refused, not cancelled
                    self.on_overload()
                raise
            finally:
                gone.cancel()
        generations = [answer.generation for answer in answers]

        def write() -> Response:
            return JSONResponse(call.reply.whole(generations), headers=headers)

        if any(found.prompt_logprobs is not None for found in generations):
            # on a thread: those of a long prompt take seconds
            return await asyncio.get_running_loop().run_in_executor(self._pool, write)
        return write()

    async def _admit(
        self, request: HTTPRequest, lease: BodyLease, endpoint: _Endpoint
    ) -> tuple[Call, list[Answer]]:
        try:
            call = await self._read(request, lease, endpoint.read)
            answers = self._submit(request, call.requests)
            return replace(call, requests=()), answers  # the engine holds their images
        except UserError as error:  # the engine counts every refused prompt
            self._engine.count_rejected()
            raise endpoint.explain(error) from error
        except (BodyTimeoutError, RefusedError):
            self._engine.count_rejected()
            raise

    async def _read(self, request: HTTPRequest, lease: BodyLease, read: Callable[..., Any]) -> Any:
        """Read the body, and run ``read`` on it on a thread."""
        data, scanner = await lease.read(request.stream())

        @_failing_as_exception
        def parse() -> Any:
            raw = parse_request_json(data, "body", self._serving, scanner)
            return read(raw, self._served, self._serving)

        return await asyncio.get_running_loop().run_in_executor(self._pool, parse)

    def _submit(self, request: HTTPRequest, requests: Sequence[Request]) -> list[Answer]:
        """Submit all requests of a call, or none."""
        if self._serving.log_prompts:
            _log.info("request: %s", requests[0].prompt_text)
        client = _client_of(request)
        answers: list[Answer] = []
        try:
            for one in requests:
                answers.append(self._engine.submit(replace(one, client=client)))
        except BaseException as error:
            for answer in answers:
                answer.cancel()
            if isinstance(error, OverloadedError):
                self.on_overload()
            raise
        return answers

    async def tokenize(self, request: HTTPRequest) -> Response:
        """``POST /tokenize``."""
        self._check_key(request)
        with self._budget.lease() as lease:
            try:
                call = await self._read(request, lease, read_tokenize)
                ids = await self._token_ids(request, call.prompt)
            except UserError as error:
                raise tokenize_error(error) from error
        found = tokens_object(ids, self._served, texts=call.texts)
        return JSONResponse(found, headers=_note_headers(call.ignored, call.repaired))

    async def _token_ids(self, request: HTTPRequest, prompt: PromptSource) -> list[int]:
        """Tokenise a prompt; stop decoding its images at the deadline, or at a disconnect."""
        over = threading.Event()
        caller = Caller(_client_of(request), over.is_set)
        gone = asyncio.create_task(_call_when_gone(request, over.set))

        @_failing_as_exception
        def count() -> list[int]:
            ids: list[int] = self._engine.prepare(prompt, caller=caller).token_ids.tolist()
            return ids

        seconds = self._serving.max_request_s
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.get_running_loop().run_in_executor(self._counting, count)
        except TimeoutError as error:
            raise TimeoutError(f"it took longer than {seconds:g} s.") from error
        finally:
            over.set()
            gone.cancel()

    async def detokenize(self, request: HTTPRequest) -> Response:
        """``POST /detokenize``."""
        self._check_key(request)
        with self._budget.lease() as lease:
            found, ignored = await self._read(request, lease, detokenize)
        return JSONResponse(found, headers=_note_headers(ignored))

    async def models(self, request: HTTPRequest) -> Response:
        """``GET /v1/models``: the served model, once per name."""
        self._check_key(request)
        data = [self._describe(name) for name in self._served.names]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: HTTPRequest) -> Response:
        """``GET /v1/models/{name}``."""
        self._check_key(request)
        name = request.path_params["name"]
        if name not in self._served.names:
            message = f"model: {name!r:.80} is not served here. See GET /v1/models."
            raise RefusedError(404, message, "model_not_found", "model")
        return JSONResponse(self._describe(name))

    def _describe(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "trt-eagle3",
            # vLLM's field: prompt plus answer
            "max_model_len": self._served.max_seq_len,
        }

    async def chat_page(self, _: HTTPRequest) -> Response:
        """``GET /``: a chat page. Its policy forbids loading anything from other servers."""
        page, policy = chat_page()
        headers = {
            "Content-Security-Policy": policy,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-cache",
        }
        return HTMLResponse(page, headers=headers)

    async def openapi(self, request: HTTPRequest) -> Response:
        """``GET /openapi.json``: the routes of this server."""
        return JSONResponse(self._document(request))

    async def docs(self, request: HTTPRequest) -> Response:
        """``GET /docs``: the same as a page without scripts."""
        page, policy = docs_page(self._document(request))
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    def _document(self, request: HTTPRequest) -> dict[str, Any]:
        routes = [route for route in request.app.routes if isinstance(route, Route)]
        paths = [route.path_format for route in routes]
        return openapi_document(paths, has_key=self.http.api_key is not None)

    async def version(self, _: HTTPRequest) -> Response:
        """``GET /version``."""
        return JSONResponse({"version": version("trt-eagle3")})

    async def health(self, _: HTTPRequest) -> Response:
        """``GET /health``: 200 if the engine answers and finishes steps, else 503."""
        if not self._engine.ready:
            return PlainTextResponse("the engine has stopped", 503)
        stall = self._stall()
        return PlainTextResponse("ok") if stall is None else PlainTextResponse(stall, 503)

    def _stall(self) -> str | None:
        """Describe why the engine seems to hang, or return None; log each change."""
        limit = self._serving.max_step_s
        found = None if limit is None else self._engine.stall(limit)
        stall = None if found is None else f"{found} (max_step_s: {limit:g})"
        if stall is not None and not self._stalled:
            _log.error("/health answers 503: %s", stall)
        elif stall is None and self._stalled:
            _log.warning("/health answers 200: the engine works again")
        self._stalled = stall is not None
        return stall

    async def metrics(self, request: HTTPRequest) -> Response:
        """``GET /metrics``, for Prometheus."""
        accept = ",".join(request.headers.getlist("accept"))

        def render() -> tuple[bytes, str]:
            return exposition(self._engine.metrics(), self._served.names[0], accept)

        # on a thread: the metrics may come from another process
        content, content_type = await asyncio.to_thread(render)
        return Response(content, media_type=content_type)

    def _check_key(self, request: HTTPRequest) -> None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else ""
        key = self.http.api_key
        if key is not None and not hmac.compare_digest(given.encode("latin-1"), key.encode()):
            raise RefusedError(
                401, "Authorization: expected the API key as a bearer token.", "invalid_api_key"
            )


def _client_of(request: HTTPRequest) -> str:
    """Return the client's address, clipped: a proxy may forward any text."""
    return clip(request.client.host, 64) if request.client else ""


class _EventStream(StreamingResponse):
    """Server-sent events that close ``chunks`` and their answers whenever the response ends.

    This holds even if the response ends before it starts.
    """

    def __init__(self, content: AsyncIterator[str], chunks: AsyncGenerator[Any], **kw: Any) -> None:
        super().__init__(content, **kw)
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._chunks):
            await super().__call__(scope, receive, send)


def _failing_as_exception(job: Callable[[], _T]) -> Callable[[], _T]:
    """Wrap ``job`` so that a panic becomes an exception, which request handlers catch."""

    def run() -> _T:
        try:
            return job()
        except Exception:
            raise
        except BaseException as error:
            raise as_failure(error) from error

    return run


async def _call_when_gone(request: HTTPRequest, *calls: Callable[[], None]) -> None:
    """Run ``calls`` when the client disconnects.

    Once the body is read, a disconnect is the only message that a client can send.
    """
    while (await request.receive())["type"] != "http.disconnect":
        pass
    for call in calls:
        call()


def _note_headers(ignored: Sequence[str], repaired: Sequence[str] = ()) -> dict[str, str]:
    """Make the headers that list ignored and repaired keys of a request."""
    headers = {}
    if ignored:
        headers["X-Ignored-Fields"] = ", ".join(ignored)
        _log.warning("keys of a request are ignored: %s", headers["X-Ignored-Fields"])
    if repaired:
        headers["X-Repaired-Fields"] = ", ".join(repaired)
    return headers
