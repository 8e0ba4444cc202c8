"""A request body, read: what the engine is asked, and how its answers are written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trt_eagle3.decode.request.request import Chunk, Generation, Request
from trt_eagle3.serving.config import ServingConfig
from trt_eagle3.serving.served_model import ServedModel

__all__ = ["Call", "CountReasoning", "ReadCall", "Reply", "to_event"]


class Reply(Protocol):
    """Writes the answers of one call, as one object or as server-sent events.

    Events are text, several of them or none.
    """

    def opening(self) -> str:
        """Events before the first token."""
        ...

    def piece(self, index: int, chunk: Chunk) -> str:
        """Events of a chunk of answer ``index``."""
        ...

    def closing(self, generations: Sequence[Generation]) -> str:
        """Events behind the last token."""
        ...

    def failed(self, error: Mapping[str, Any]) -> str:
        """Events that end a stream which cannot go on; ``error``: OpenAI's object."""
        ...

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The object of answers that are complete."""
        ...


@dataclass(frozen=True)
class Call:
    """One HTTP request.

    Attributes:
        requests: of the engine, one for each answer.
        ignored: paths of unknown keys.
        repaired: paths of cut arguments of past calls that are closed for the template.
        apart: each chunk is wanted by itself, as it came from the target.
    """

    requests: tuple[Request, ...]
    reply: Reply
    stream: bool = False
    ignored: tuple[str, ...] = ()
    repaired: tuple[str, ...] = ()
    apart: bool = False


CountReasoning = Callable[[Sequence[int], str], int]
"""Counts reasoning ids, given all ids of an answer and the text of its reasoning."""

ReadCall = Callable[[Any, ServedModel, ServingConfig], Call]
"""Reads a JSON body.

Raises ``UserError``; ``ModelNotFoundError`` for another model's name.
"""


def to_event(value: Mapping[str, Any], name: str | None = None) -> str:
    """A server-sent event; in ASCII, because some clients take U+2028 and its like for the end
    of a line.
    """
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(value)}\n\n"
