"""Read messages and tools of a chat request as a ``Conversation``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trt_eagle3.decode.request.conversation import Conversation
from trt_eagle3.errors import UserError, quote
from trt_eagle3.multimodal.tools import Tool, read_tools
from trt_eagle3.serving.config import ServingConfig
from trt_eagle3.serving.errors import FieldError

__all__ = ["read_choice", "read_conversation", "template_options"]

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_MODES = ("auto", "none", "required")


def read_conversation(
    messages: Sequence[Any],
    tools: Sequence[Any],
    choice: Any,
    serving: ServingConfig,
    *,
    parallel: bool = True,
    options: Mapping[str, Any] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
) -> Conversation:
    """Check OpenAI's ``messages``, ``tools`` and ``tool_choice``.

    Raises:
        UserError: an unknown role, too long a prompt, bad tools or a bad choice of them.
    """
    serving.check_prompt(messages)
    offered: tuple[Tool, ...] = read_tools(tools)
    return Conversation(
        [_with_known_role(message) for message in messages],
        offered,
        read_choice(choice),
        parallel,
        options or {},
        add_generation_prompt,
        continue_final_message,
    )


def read_choice(raw: Any) -> str:
    """Return ``auto``, ``none``, ``required``, or the name in ``{"type": "function", ...}``."""
    if raw is None:
        return "auto"
    if isinstance(raw, str) and raw in _MODES:
        return raw
    if isinstance(raw, Mapping) and raw.get("type") == "function":
        function = raw.get("function", raw)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str) and name not in _MODES:
            return name
    raise FieldError(
        f'tool_choice: expected {", ".join(_MODES)}, or {{"type": "function", "function": '
        f'{{"name"}}}}, got {quote(raw, 80)}',
        "tool_choice",
    )


def template_options(given: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Read ``chat_template_kwargs``, which hold scalars only; ``effort`` none turns thinking off.

    Raises:
        FieldError: a list or an object among them.
    """
    options = dict(given or {})
    for name, value in options.items():
        if isinstance(value, Mapping | list):
            raise FieldError(
                f"chat_template_kwargs.{name:.40}: expected a text, a number or a boolean, got "
                f"{quote(value, 40)}",
                "chat_template_kwargs",
            )
    if effort == "none":
        options.setdefault("enable_thinking", False)
    return options


def _with_known_role(message: Any) -> Mapping[str, Any]:
    """Map a message's role to the template's, and refuse unknown roles.

    Chat templates drop messages with unknown roles. OpenAI's ``developer`` is the former
    ``system``.
    """
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise UserError(
            f"messages: role: expected one of {', '.join(_ROLES)}, got {quote(role, 40)}."
        )
    return {**message, "role": _ROLES[role]}
