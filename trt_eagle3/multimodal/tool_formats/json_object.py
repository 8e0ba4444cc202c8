"""Find the end of a JSON object in a text that arrives in pieces."""

from __future__ import annotations

import re

__all__ = ["JsonObjectEnd"]

_MARKS = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


class JsonObjectEnd:
    """Track brackets and strings from an opening brace. Each character is read once."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, text: str) -> int | None:
        """Return the index in ``text`` after the object's closing brace; None if it is open."""
        at = 0
        if self._escaped and text:
            at, self._escaped = 1, False
        while (found := (_IN_STRING if self._in_string else _MARKS).search(text, at)) is not None:
            at = found.end()
            if found[0] == "\\":
                self._escaped = at == len(text)
                at += 1
            elif found[0] == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth == 0:
                    return at
        return None
