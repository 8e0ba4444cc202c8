"""Build the output items of a response: reasoning, messages, function calls."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from trt_eagle3.multimodal.assistant_message import CallDelta, MessageDelta

__all__ = ["OutputItems"]

_Kind = Literal["reasoning", "message"]
_PARTS = {"reasoning": "reasoning_text", "message": "output_text"}


class OutputItems:
    """Output items in the order of generation, and the events of their growth."""

    def __init__(self) -> None:
        self._items: list[dict[str, Any]] = []
        self._open = False
        self._logprobs: list[dict[str, Any]] = []

    @property
    def written(self) -> list[dict[str, Any]]:
        """The items so far."""
        return copy.deepcopy(self._items)

    def add(
        self, delta: MessageDelta, logprobs: Sequence[dict[str, Any]] = ()
    ) -> list[dict[str, Any]]:
        """Return the events of a delta; ``logprobs`` go with the next text."""
        self._logprobs += logprobs
        events: list[dict[str, Any]] = []
        if delta.reasoning:
            events += self._text("reasoning", delta.reasoning)
        # a model writes its text before its calls, or between two of them
        if delta.content:
            events += self._text("message", delta.content)
        for call in delta.calls:
            events += self._call(call)
        return events

    def close(self, status: str = "completed") -> list[dict[str, Any]]:
        """Return the events that end the last item."""
        if not self._open:
            return []
        self._open = False
        item, index = self._items[-1], len(self._items) - 1
        item["status"] = status
        ends = self._call_ends(item, index) if "arguments" in item else self._ends(item, index)
        done = {"type": "response.output_item.done", "output_index": index}
        return [*ends, {**done, "item": copy.deepcopy(item)}]

    def _text(self, kind: _Kind, text: str) -> Iterator[dict[str, Any]]:
        if not self._open or self._items[-1]["type"] != kind:
            yield from self.close()
            yield from self._begin(_new_item(kind))
            part = _new_part(kind)
            self._items[-1]["content"].append(part)
            yield {
                "type": "response.content_part.added",
                **self._where(),
                "content_index": 0,
                "part": dict(part),
            }
        part = self._items[-1]["content"][0]
        part["text"] += text
        event = {
            "type": f"response.{_PARTS[kind]}.delta",
            **self._where(),
            "content_index": 0,
            "delta": text,
        }
        if kind == "message":
            found, self._logprobs = self._logprobs, []
            part["logprobs"] += found
            event["logprobs"] = found
        yield event

    def _ends(self, item: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
        part = item["content"][0]
        where = {"item_id": item["id"], "output_index": index, "content_index": 0}
        kind = _PARTS[item["type"]]
        more = {"logprobs": list(part["logprobs"])} if "logprobs" in part else {}
        yield {"type": f"response.{kind}.done", **where, "text": part["text"], **more}
        yield {"type": "response.content_part.done", **where, "part": copy.deepcopy(part)}

    def _call(self, call: CallDelta) -> Iterator[dict[str, Any]]:
        if call.name is not None:
            yield from self.close()
            yield from self._begin(
                {
                    "type": "function_call",
                    "id": f"fc_{uuid.uuid4().hex}",
                    "call_id": f"call_{uuid.uuid4().hex[:24]}",
                    "name": call.name,
                    "arguments": "",
                    "status": "in_progress",
                }
            )
        self._items[-1]["arguments"] += call.arguments
        if call.arguments:
            yield {
                "type": "response.function_call_arguments.delta",
                **self._where(),
                "delta": call.arguments,
            }

    def _call_ends(self, item: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
        yield {
            "type": "response.function_call_arguments.done",
            "item_id": item["id"],
            "output_index": index,
            "name": item["name"],
            "arguments": item["arguments"],
        }

    def _begin(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._items.append(item)
        self._open = True
        yield {
            "type": "response.output_item.added",
            "output_index": len(self._items) - 1,
            "item": copy.deepcopy(item),
        }

    def _where(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}


def _new_item(kind: _Kind) -> dict[str, Any]:
    if kind == "reasoning":
        item: dict[str, Any] = {"type": kind, "id": f"rs_{uuid.uuid4().hex}", "summary": []}
    else:
        item = {"type": kind, "id": f"msg_{uuid.uuid4().hex}", "role": "assistant"}
    return {**item, "status": "in_progress", "content": []}


def _new_part(kind: _Kind) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PARTS[kind], "text": ""}
    return part if kind == "reasoning" else {**part, "annotations": [], "logprobs": []}
