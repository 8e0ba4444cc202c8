"""Define Call, a parsed request body, and Reply, which writes its answers."""

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

    Each method returns events as text: several, one or none.
    """

    def opening(self) -> str:
        """Return the events before the first token."""
        ...

    def piece(self, index: int, chunk: Chunk) -> str:
        """Return the events of a chunk of answer ``index``."""
        ...

    def closing(self, generations: Sequence[Generation]) -> str:
        """Return the events after the last token."""
        ...

    def failed(self, error: Mapping[str, Any]) -> str:
        """Return the events that end a failed stream; ``error``: OpenAI's object."""
        ...

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """Return the object of completed answers."""
        ...


@dataclass(frozen=True)
class Call:
    """One HTTP request.

    Attributes:
        requests: engine requests, one per answer.
        ignored: paths of unknown keys.
        repaired: paths of truncated call arguments in the history, closed for the template.
        apart: deliver each chunk of the target on its own, without merging.
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

Raises ``UserError``, or ``RefusedError`` for another model's name.
"""


def to_event(value: Mapping[str, Any], name: str | None = None) -> str:
    """Format a server-sent event in ASCII: some clients treat U+2028 as a line end."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(value)}\n\n"
