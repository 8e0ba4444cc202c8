"""Check the keys of messages, tools and formats, and report unknown ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from trt_eagle3.multimodal import Processor
from trt_eagle3.serving.openai.ignored import IgnoredKeys

__all__ = [
    "check_choice_keys",
    "check_format_keys",
    "check_function_keys",
    "check_message_keys",
    "check_option_keys",
    "check_part_keys",
    "check_tool_keys",
]

_BASE = ("role", "content")
_MESSAGE: Mapping[Any, Collection[str]] = {  # by role; servers emit every assistant key
    "assistant": (
        *_BASE,
        "name",
        "tool_calls",
        "function_call",
        "reasoning_content",
        "reasoning",
        "refusal",
        "annotations",
    ),
    "tool": (*_BASE, "name", "tool_call_id"),
    "function": (*_BASE, "name"),
}
_CALL = ("id", "type", "function", "index")
_FUNCTION = ("name", "description", "parameters", "strict")
_FORMAT = ("type", "json_schema", "pattern", "grammar")
_SCHEMA = ("name", "description", "schema", "strict")


def check_message_keys(
    messages: Sequence[Any], ignored: IgnoredKeys, template_reads: Callable[[str], bool]
) -> None:
    """Check the keys of chat messages and of their calls.

    Args:
        template_reads: whether the chat template reads a key of a message.
    Raises:
        FieldError: an unknown key where fields are strict.
    """
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            continue
        where, role = f"messages[{i}]", message.get("role")
        known = _MESSAGE.get(role, _BASE) if isinstance(role, str) else _BASE
        ignored.check(message, {*known, *filter(template_reads, message)}, where)
        ignored.check(message.get("function_call"), ("name", "arguments"), f"{where}.function_call")
        calls = message.get("tool_calls")
        for j, call in enumerate(calls if isinstance(calls, list) else ()):
            ignored.check(call, _CALL, f"{where}.tool_calls[{j}]")
            if isinstance(call, Mapping):
                function = call.get("function")
                ignored.check(function, ("name", "arguments"), f"{where}.tool_calls[{j}].function")


def check_part_keys(messages: Any, ignored: IgnoredKeys, processor: Processor, where: str) -> None:
    """Check the keys of parts of messages, or of items of ``/v1/responses``.

    Args:
        where: path of the list.
    Raises:
        FieldError: an unknown key where fields are strict.
    """
    if isinstance(messages, list):
        for path in processor.ignored_keys(messages, where):
            ignored.add(path)


def check_tool_keys(tools: Sequence[Any], ignored: IgnoredKeys) -> None:
    """Check the keys of a chat's tools. Their schemas may hold any keys.

    Raises:
        FieldError: an unknown key where fields are strict.
    """
    for i, tool in enumerate(tools):
        ignored.check(tool, ("type", "function"), f"tools[{i}]")
        if isinstance(tool, Mapping):
            ignored.check(tool.get("function"), _FUNCTION, f"tools[{i}].function")


def check_function_keys(tools: Sequence[Any], ignored: IgnoredKeys) -> None:
    """Check the keys of the tools of ``/v1/responses``, which have no ``function`` object.

    Raises:
        FieldError: an unknown key where fields are strict.
    """
    for i, tool in enumerate(tools):
        ignored.check(tool, ("type", *_FUNCTION), f"tools[{i}]")


def check_choice_keys(choice: Any, ignored: IgnoredKeys) -> None:
    """Check the keys of ``tool_choice``.

    Raises:
        FieldError: an unknown key where fields are strict.
    """
    ignored.check(choice, ("type", "function", "name"), "tool_choice")
    if isinstance(choice, Mapping):
        ignored.check(choice.get("function"), ("name",), "tool_choice.function")


def check_format_keys(form: Any, ignored: IgnoredKeys, where: str) -> None:
    """Check the keys of a ``response_format``; its schema may be beside its type.

    Raises:
        FieldError: an unknown key where fields are strict.
    """
    ignored.check(form, {*_FORMAT, *_SCHEMA}, where)
    if isinstance(form, Mapping):
        ignored.check(form.get("json_schema"), _SCHEMA, f"{where}.json_schema")


def check_option_keys(
    options: Any, ignored: IgnoredKeys, template_takes: Callable[[str], bool]
) -> None:
    """Check the variables of ``chat_template_kwargs``.

    Args:
        template_takes: whether the chat template reads a variable.
    Raises:
        FieldError: an unknown variable where fields are strict.
    """
    if isinstance(options, Mapping):
        read = {name for name in options if template_takes(name)}
        ignored.check(options, read, "chat_template_kwargs")
