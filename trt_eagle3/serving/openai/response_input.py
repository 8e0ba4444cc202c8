"""Convert input items and tools of ``/v1/responses`` to those of a chat."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trt_eagle3.errors import quote
from trt_eagle3.serving.errors import FieldError
from trt_eagle3.serving.openai.ignored import IgnoredKeys
from trt_eagle3.serving.openai.repairs import Repairs

__all__ = ["read_input", "read_response_tools"]

_KEYS: Mapping[str, Collection[str]] = {  # by item type; answers contain all of them
    "message": ("type", "id", "role", "content", "status"),
    "function_call": ("type", "id", "call_id", "name", "arguments", "status"),
    "function_call_output": ("type", "id", "call_id", "output", "status"),
    "reasoning": ("type", "id", "summary", "content", "status"),
}


def read_input(
    raw: Any, instructions: str | None, ignored: IgnoredKeys, repairs: Repairs
) -> list[dict[str, Any]]:
    """Convert a text or a list of items to messages; ``instructions`` become the system message.

    Raises:
        FieldError: an unknown item or part, an unknown key where fields are strict.
    """
    items = [{"role": "user", "content": raw}] if isinstance(raw, str) else raw
    if not isinstance(items, list):
        raise FieldError(
            f"input: expected a text or a list of items, got {quote(raw, 80)}", "input"
        )
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    reasoning = ""
    for i, item in enumerate(items):
        where = f"input[{i}]"
        _check_item_keys(item, where, ignored)
        if isinstance(item, Mapping) and item.get("type") == "reasoning":
            reasoning += _reasoning(item, where)
            continue
        message = _message(item, where)
        if message["role"] == "assistant":
            message["reasoning_content"], reasoning = reasoning, ""
        elif reasoning:  # the answer was truncated before any text
            messages.append(_assistant(reasoning))
            reasoning = ""
        if "tool_calls" in message:
            repairs.check(item, f"{where}.arguments")
        _append(messages, message)
    if reasoning:
        messages.append(_assistant(reasoning))
    return messages


def _assistant(reasoning: str) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "reasoning_content": reasoning}


def _append(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Append a message; calls after an assistant's message are merged into it."""
    last = messages[-1] if messages else None
    if last is not None and "tool_calls" in message and last["role"] == "assistant":
        last["tool_calls"] = [*last.get("tool_calls", []), *message["tool_calls"]]
        last["reasoning_content"] += message["reasoning_content"]
    else:
        messages.append(message)


def _message(item: Any, where: str) -> dict[str, Any]:
    match item:
        case {"type": "function_call", "name": str(name), "arguments": arguments}:
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case {"type": "function_call_output", "output": output}:
            content = output if isinstance(output, str) else _parts(output, f"{where}.output")
            return {"role": "tool", "content": content, "tool_call_id": item.get("call_id")}
        case {"role": str(role), "content": str(text)}:
            return {"role": role, "content": text}
        case {"role": "assistant", **others} if others.get("content") is None:
            return {"role": "assistant", "content": ""}
        case {"role": str(role), "content": list(parts)}:
            return {"role": role, "content": _content(role, parts, f"{where}.content")}
    raise FieldError(
        f"{where}: expected a message, function_call, function_call_output or reasoning, got "
        f"{quote(item, 80)}",
        where,
    )


def _check_item_keys(item: Any, where: str, ignored: IgnoredKeys) -> None:
    """Check the keys of an item. Unknown types are refused elsewhere."""
    kind = item.get("type") or "message" if isinstance(item, Mapping) else None
    if isinstance(kind, str) and kind in _KEYS:
        ignored.check(item, _KEYS[kind], where)
        if item.get("summary"):  # from another server: this model writes no summaries
            ignored.add(f"{where}.summary")


def _content(role: str, parts: Sequence[Any], where: str) -> Any:
    """Read a message's parts, and join an assistant's texts."""
    read = _parts(parts, where)
    if role == "assistant" and all(part["type"] == "text" for part in read):
        return "".join(part["text"] for part in read)
    return read


def _parts(parts: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(parts, list):
        raise FieldError(f"{where}: expected a text or a list of parts", where)
    return [_part(part, f"{where}[{i}]") for i, part in enumerate(parts)]


def _part(part: Any, where: str) -> dict[str, Any]:
    """Convert a part to the form of chat completions."""
    match part:
        case {"type": "input_text" | "output_text" | "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": "text", "text": text}
        case {
            "type": "input_image" | "input_video" | "image_url" | "video_url" | "image" | "video"
        }:
            return dict(part)
    raise FieldError(
        f"{where}: expected input_text, output_text, or input_image with an image_url, got "
        f"{quote(part, 80)}",
        where,
    )


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    parts = item.get("content") or []
    if not isinstance(parts, list):
        raise FieldError(
            f"{where}.content: expected a list of parts, got {quote(parts, 80)}", where
        )
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return "".join(text for text in texts if isinstance(text, str))


def read_response_tools(raw: Sequence[Any]) -> list[dict[str, Any]]:
    """Convert tools to the form of chat completions, which nests the function one level deeper.

    Raises:
        FieldError: a tool type other than ``function``.
    """
    tools = []
    for i, tool in enumerate(raw):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, Mapping) else tool
            raise FieldError(
                f"tools[{i}].type: expected function, got {quote(kind, 40)}. Other types are not "
                "served here.",
                f"tools[{i}].type",
                "unsupported_value",
            )
        tools.append({"type": "function", "function": tool})
    return tools
