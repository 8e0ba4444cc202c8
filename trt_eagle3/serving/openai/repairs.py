"""Collect the paths of truncated arguments, repaired for templates that take only objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trt_eagle3.multimodal.call_arguments import is_whole_object
from trt_eagle3.serving.openai.ignored import MAX_PATHS

__all__ = ["Repairs"]


class Repairs:
    """Collects paths such as ``messages[1].tool_calls[0].function.arguments``."""

    def __init__(self, *, text_arguments: bool) -> None:
        """Start empty; ``text_arguments``: the template takes text, so nothing is repaired."""
        self._as_text = text_arguments
        self._paths: list[str] = []

    @property
    def paths(self) -> tuple[str, ...]:
        """The first eight paths."""
        return tuple(self._paths)

    def check_messages(self, messages: Sequence[Any]) -> None:
        """Check the calls of chat messages."""
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping):
                continue
            calls = message.get("tool_calls")
            for j, call in enumerate(calls if isinstance(calls, list) else ()):
                function = call.get("function") if isinstance(call, Mapping) else None
                self.check(function, f"messages[{i}].tool_calls[{j}].function.arguments")
            self.check(message.get("function_call"), f"messages[{i}].function_call.arguments")

    def check(self, called: Any, path: str) -> None:
        """Check the ``arguments`` of the object ``called``; ``path``: of the arguments."""
        if self._as_text or len(self._paths) == MAX_PATHS or not isinstance(called, Mapping):
            return
        arguments = called.get("arguments")
        if isinstance(arguments, str) and not is_whole_object(arguments):
            self._paths.append(path)
