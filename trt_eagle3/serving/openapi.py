"""Describe the routes of ``serve`` as an OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from trt_eagle3.serving.openai.chat import ChatFields
from trt_eagle3.serving.openai.completions import CompletionFields
from trt_eagle3.serving.openai.responses import ResponseFields
from trt_eagle3.serving.openai.tokens import DetokenizeFields, TokenizeFields

__all__ = ["openapi_document"]

_SCHEMAS = "#/components/schemas/"
_JSON, _EVENTS = "application/json", "text/event-stream"
_PLAIN, _HTML = "text/plain", "text/html"
_ERROR = {
    "type": "object",
    "description": "An error, as of OpenAI's API.",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field's path."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@dataclass(frozen=True)
class _Operation:
    """One route.

    Attributes:
        body: the fields of its JSON body; None for GET.
        answers: media types of its answer. public: whether it needs no API key.
    """

    summary: str
    body: type[BaseModel] | None = None
    answers: tuple[str, ...] = (_JSON,)
    public: bool = False


_OPERATIONS: Mapping[str, _Operation] = {
    "/v1/chat/completions": _Operation(
        "Answer chat messages with text, images, videos and tools.", ChatFields, (_JSON, _EVENTS)
    ),
    "/v1/completions": _Operation(
        "Continue a prompt without chat template.", CompletionFields, (_JSON, _EVENTS)
    ),
    "/v1/responses": _Operation(
        "Answer a conversation in the form of OpenAI's Responses API. Nothing is stored.",
        ResponseFields,
        (_JSON, _EVENTS),
    ),
    "/tokenize": _Operation("Return the token ids of a prompt or of messages.", TokenizeFields),
    "/detokenize": _Operation("Return the text of token ids.", DetokenizeFields),
    "/v1/models": _Operation("List the names of the served model."),
    "/v1/models/{name}": _Operation("Describe the served model under one of its names."),
    "/version": _Operation("Return the version of trt-eagle3.", public=True),
    "/health": _Operation(
        "Return 200 if the engine answers, else 503.", answers=(_PLAIN,), public=True
    ),
    "/metrics": _Operation("Return metrics for Prometheus.", answers=(_PLAIN,), public=True),
    "/openapi.json": _Operation("Return this document.", public=True),
    "/docs": _Operation("Show this document as a page.", answers=(_HTML,), public=True),
    "/": _Operation("Show a page to chat on.", answers=(_HTML,), public=True),
}


def openapi_document(paths: Iterable[str], *, has_key: bool = False) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document of the routes at ``paths``, such as ``/v1/models/{name}``.

    Args:
        has_key: whether the routes that are not public require an API key.
    """
    served = {path: _OPERATIONS[path] for path in paths}
    components: dict[str, Any] = {"schemas": {"Error": _ERROR, **_body_schemas(served.values())}}
    if has_key:
        components["securitySchemes"] = {"apiKey": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "trt-eagle3",
            "version": version("trt-eagle3"),
            "description": "Fields that are null count as absent. Unknown fields are ignored and "
            "reported in the header X-Ignored-Fields, or refused with --strict-fields.",
        },
        "paths": {path: _path_item(path, found, has_key) for path, found in served.items()},
        "components": components,
    }


def _body_schemas(operations: Iterable[_Operation]) -> dict[str, Any]:
    """Return the schemas of all bodies, and those that they refer to, by name."""
    bodies = [operation.body for operation in operations if operation.body is not None]
    _, found = models_json_schema(
        [(body, "validation") for body in bodies], ref_template=_SCHEMAS + "{model}"
    )
    schemas: dict[str, Any] = found.get("$defs", {})
    for schema in schemas.values():
        if "stop" in schema.get("properties", {}):  # ``read_fields`` also takes a single text
            stop = schema["properties"]["stop"]
            title = stop.pop("title", "Stop")
            schema["properties"]["stop"] = {"title": title, "anyOf": [{"type": "string"}, stop]}
    return schemas


def _path_item(path: str, operation: _Operation, has_key: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {
                "description": "The answer; events with stream: true."
                if _EVENTS in operation.answers
                else "The answer.",
                "content": {kind: {"schema": _answer_schema(kind)} for kind in operation.answers},
            },
            "default": {
                "description": "An error.",
                "content": {_JSON: {"schema": {"$ref": f"{_SCHEMAS}Error"}}},
            },
        },
    }
    if "{name}" in path:
        described["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if has_key and not operation.public:
        described["security"] = [{"apiKey": []}]
    if operation.body is None:
        return {"get": described}
    schema = {"$ref": f"{_SCHEMAS}{operation.body.__name__}"}
    described["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    return {"post": described}


def _answer_schema(kind: str) -> dict[str, Any]:
    return {"type": "object" if kind == _JSON else "string"}
