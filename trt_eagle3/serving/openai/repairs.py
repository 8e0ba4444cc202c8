"""Arguments of past calls that were cut, and that the chat template takes only as objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trt_eagle3.multimodal.call_arguments import is_whole_object

__all__ = ["Repairs"]

_MAX_PATHS = 8  # that an answer's header lists


class Repairs:
    """Collects the paths of arguments that are repaired, such as
    ``messages[1].tool_calls[0].function.arguments``.
    """

    def __init__(self, *, text_arguments: bool) -> None:
        """``text_arguments``: the template takes them as text, so nothing is repaired."""
        self._as_text = text_arguments
        self._paths: list[str] = []

    @property
    def paths(self) -> tuple[str, ...]:
        """The first of them, at most eight."""
        return tuple(self._paths)

    def check_messages(self, messages: Sequence[Any]) -> None:
        """Look at the calls of chat messages."""
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping):
                continue
            calls = message.get("tool_calls")
            for j, call in enumerate(calls if isinstance(calls, list) else ()):
                function = call.get("function") if isinstance(call, Mapping) else None
                self.check(function, f"messages[{i}].tool_calls[{j}].function.arguments")
            self.check(message.get("function_call"), f"messages[{i}].function_call.arguments")

    def check(self, called: Any, path: str) -> None:
        """Look at ``called``, an object with ``arguments``, which stand at ``path``."""
        if self._as_text or len(self._paths) == _MAX_PATHS or not isinstance(called, Mapping):
            return
        arguments = called.get("arguments")
        if isinstance(arguments, str) and not is_whole_object(arguments):
            self._paths.append(path)
