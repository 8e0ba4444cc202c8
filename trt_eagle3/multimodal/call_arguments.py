"""The arguments of a past call of a tool, also where its answer was cut."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

__all__ = ["is_whole_object", "read_arguments"]


def is_whole_object(text: str) -> bool:
    """Whether ``text`` is a JSON object, or blank, which stands for an empty one."""
    try:
        return not text.strip() or isinstance(from_json(text), dict)
    except ValueError:
        return False


def read_arguments(text: str) -> dict[str, Any] | None:
    """The object that ``text`` is, or that its longest sound beginning makes once it is closed.

    A text that was cut in a string keeps what there is of the string; a name or a number that was
    cut is left out. ``null`` and blanks are an empty object.

    Returns:
        None where ``text`` begins no object.
    """
    text = text.strip()
    if text in ("", "null"):
        return {}
    if not text.startswith("{"):
        return None
    sound, bad = 1, len(text) + 1
    if _is_sound(text):
        sound = len(text)
    while bad - sound > 1 and sound < len(text):  # a beginning of a sound text is sound
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
