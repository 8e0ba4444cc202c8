"""Convert past messages, as clients send them back, to the form that chat templates read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trt_eagle3.errors import UserError, quote
from trt_eagle3.multimodal.tools import template_calls

__all__ = ["past_message"]


def past_message(message: Mapping[str, Any], where: str, *, text_arguments: bool) -> dict[str, Any]:
    """Drop null keys; rename an assistant's fields to the names that templates use.

    An assistant's ``content`` may be null or absent. ``reasoning`` becomes ``reasoning_content``,
    ``refusal`` becomes text, and ``function_call`` becomes an entry of ``tool_calls``.

    Args:
        where: the message's path in errors.
        text_arguments: the template accepts the arguments of calls as JSON text.
    Raises:
        UserError: reasoning or a refusal is not text, or a call is invalid.
    """
    known = {name: value for name, value in message.items() if value is not None}
    if known.get("role") != "assistant":
        return known
    calls, called = known.pop("tool_calls", None), known.pop("function_call", None)
    if not calls and called:
        calls = [{"type": "function", "function": called}]
    if calls:
        place = f"{where}.tool_calls"
        known["tool_calls"] = template_calls(calls, place, as_text=text_arguments)
    reasoning = _text(known, "reasoning_content", where) or _text(known, "reasoning", where)
    if reasoning:
        known["reasoning_content"] = reasoning
    refusal = _text(known, "refusal", where)
    content = known.get("content")
    if content in (None, "", []):
        content = refusal
    if isinstance(content, list):
        content = [_refusal_as_text(part) for part in content]
    return {**known, "content": content}


def _text(message: Mapping[str, Any], name: str, where: str) -> str:
    value = message.get(name, "")
    if not isinstance(value, str):
        raise UserError(f"{where}.{name}: expected a text, got {quote(value, 80)}")
    return value


def _refusal_as_text(part: Any) -> Any:
    """Convert a refusal to a text part; return other parts unchanged."""
    match part:
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": "text", "text": text}
    return part
