"""Build the Starlette application of ``serve``: its routes and its error responses."""

from __future__ import annotations

from collections.abc import Sequence

from trt_eagle3.errors import EnvironmentMissingError, TrtEagle3Error

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware.cors import CORSMiddleware
    from starlette.requests import ClientDisconnect
    from starlette.requests import Request as HTTPRequest
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp
except ImportError as missing:
    raise EnvironmentMissingError(
        f"serve: {missing.name} is not installed. Run: pip install starlette uvicorn"
    ) from missing

from trt_eagle3.serving.access_log import RequestLog
from trt_eagle3.serving.body import BodyEvictedError, BodyTimeoutError
from trt_eagle3.serving.errors import describe, error_object, status_of
from trt_eagle3.serving.front import Front
from trt_eagle3.serving.request_guard import RequestGuard

__all__ = ["Front", "make_app"]


def make_app(front: Front, hosts: frozenset[str] | None = None) -> RequestLog:
    """Build the application of a loaded engine; ``hosts`` as for ``RequestGuard``."""
    kinds = (TrtEagle3Error, TimeoutError, ClientDisconnect, HTTPException, Exception)
    app = Starlette(
        routes=_routes(front),
        exception_handlers=dict.fromkeys(kinds, _refuse),
    )
    guarded = RequestGuard(_cors(app, front.http.cors_origins), hosts)
    return RequestLog(guarded, enabled=front.http.access_log)


def _routes(front: Front) -> list[Route]:
    posts = {
        "/v1/chat/completions": front.chat,
        "/v1/completions": front.completions,
        "/v1/responses": front.responses,
        "/tokenize": front.tokenize,
        "/detokenize": front.detokenize,
    }
    gets = {
        "/v1/models": front.models,
        "/v1/models/{name:path}": front.model,
        "/version": front.version,
        "/health": front.health,
        "/metrics": front.metrics,
        "/openapi.json": front.openapi,
        "/docs": front.docs,
    }
    if front.http.chat_page:
        gets["/"] = front.chat_page
    return [
        *(Route(path, run, methods=["POST"]) for path, run in posts.items()),
        *(Route(path, run) for path, run in gets.items()),
    ]


def _cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Wrap ``app`` in CORS headers, so that pages of ``origins`` can also read its errors."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "X-Ignored-Fields", "X-Repaired-Fields", "Retry-After"],
    )


async def _refuse(request: HTTPRequest, error: Exception) -> Response:
    """Build the response to a failed request."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # the client has disconnected
    if isinstance(error, HTTPException):
        return _refuse_route(request, error)
    status = status_of(error)
    headers = {"Retry-After": "1"} if status == 503 else {}
    if isinstance(error, BodyTimeoutError | BodyEvictedError):
        headers["Connection"] = "close"  # else the rest of the body is parsed as a request
    return JSONResponse(error_object(error), status, headers)


def _refuse_route(request: HTTPRequest, error: HTTPException) -> Response:
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    served = ", ".join(f"{min(route.methods or {'GET'})} {route.path_format}" for route in routes)
    found = describe(f"{error.detail}. Served: {served}.", error.status_code)
    return JSONResponse(found, error.status_code, dict(error.headers or {}))
