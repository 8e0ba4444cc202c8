"""Text for a terminal: it fits the width, except what is pasted as a whole, and nothing is cut."""

from __future__ import annotations

__all__ = ["assert_fits"]

_COMMANDS = ("trt-eagle3 ", "pip ", "make ")


def assert_fits(text: str, width: int) -> None:
    """Assert that no line is wider, unless it is one command, path or URL, and no text is cut."""
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for line in text.splitlines():
        whole = line.strip()
        pasted = " " not in whole or whole.startswith(_COMMANDS)
        assert len(line) <= width or pasted, line
