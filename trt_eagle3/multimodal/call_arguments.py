"""Read the arguments of a past tool call, complete or truncated."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

__all__ = ["is_whole_object", "read_arguments"]


def is_whole_object(text: str) -> bool:
    """Return whether ``text`` is a complete JSON object. Blank text is an empty object."""
    try:
        return not text.strip() or isinstance(from_json(text), dict)
    except ValueError:
        return False


def read_arguments(text: str) -> dict[str, Any] | None:
    """Read ``text`` as a JSON object. If it is truncated or broken, close its longest valid prefix.

    A truncated string keeps its text. A truncated name or number is dropped. ``null`` and blank
    text are an empty object.

    Returns:
        None if ``text`` does not begin an object.
    """
    text = text.strip()
    if text in ("", "null"):
        return {}
    if not text.startswith("{"):
        return None
    sound, bad = 1, len(text) + 1
    if _is_sound(text):
        sound = len(text)
    while bad - sound > 1 and sound < len(text):  # bisect: every prefix of a valid prefix is valid
        middle = (sound + bad) // 2
        if _is_sound(text[:middle]):
            sound = middle
        else:
            bad = middle
    found: dict[str, Any] = from_json(text[:sound], allow_partial="trailing-strings")
    return found


def _is_sound(text: str) -> bool:
    try:
        from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return False
    return True
