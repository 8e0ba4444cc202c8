"""Marks in a conversation, to detect the parts that a chat template omits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trt_eagle3.errors import UserError, quote

__all__ = ["Marks"]

_MARK = re.compile("\ue000([0-9]+)\ue001")


class Marks:
    """Replace texts by marks, and reject a rendering that lacks one."""

    def __init__(self) -> None:
        self._problems: list[str] = []  # message for a missing mark, by its number

    def message(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``message`` with a mark for each text of its content and for each call."""
        role = quote(message.get("role"), 40)
        problem = (
            f"messages: the checkpoint's chat template leaves out message {index + 1} (role "
            f"{role}). Move its text into a message that it takes."
        )
        marked = {**message, "content": self._content(message.get("content"), problem)}
        if message.get("tool_calls"):
            problem = (
                "messages: the checkpoint's chat template leaves out the tool_calls of message "
                f"{index + 1}: it is not made for tools."
            )
            marked["tool_calls"] = [self._named(call, problem) for call in message["tool_calls"]]
        return marked

    def tool(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``tool`` with a mark for its name."""
        return self._named(
            tool, "tools: the checkpoint's chat template leaves them out: it is not made for tools."
        )

    def check(self, rendered: str) -> None:
        """Check that a rendered text contains every mark.

        Raises:
            UserError: the first missing mark.
        """
        found = set(map(int, _MARK.findall(rendered)))
        for number, problem in enumerate(self._problems):
            if number not in found:
                raise UserError(problem)

    def _content(self, content: Any, problem: str) -> Any:
        """Mark the texts of ``content``. A blank text gets no mark."""
        if isinstance(content, str):
            return self._new(problem) if content.strip() else content
        if not isinstance(content, list):
            return content
        return [
            {**part, "text": self._new(problem)} if part.get("text", "").strip() else part
            for part in content
        ]

    def _named(self, value: Mapping[str, Any], problem: str) -> dict[str, Any]:
        return {**value, "function": {**value["function"], "name": self._new(problem)}}

    def _new(self, problem: str) -> str:
        self._problems.append(problem)
        return f"\ue000{len(self._problems) - 1}\ue001"
