"""Cut a rendered prompt behind its final message, as transformers' ``continue_final_message``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from trt_eagle3.errors import UserError

__all__ = ["PromptEnding", "cut_at_tag", "final_text", "with_tag"]

PromptEnding = Literal["generation_prompt", "last_turn", "final_message"]
"""What a prompt ends with: the header of a new assistant turn, the end of the last turn, or the
text of the final message, which the answer continues.
"""
# Private characters, which no template handles. The blank shows whether the template trims texts.
_TAG = "\ue002FINAL_MESSAGE\ue003 "


def final_text(message: Mapping[str, Any]) -> str:
    """Return the last text of a message.

    Raises:
        UserError: it has none.
    """
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    for part in reversed(parts):
        if "text" in part:
            return str(part["text"])
    raise UserError(
        "continue_final_message: the final message has no text to continue. Add one, or leave the "
        "option out."
    )


def with_tag(message: Mapping[str, Any]) -> dict[str, Any]:
    """Append a tag to the last text of a message.

    Raises:
        UserError: it has no text.
    """
    text = final_text(message)
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": text + _TAG}
    last = max(i for i, part in enumerate(content) if "text" in part)
    tagged = {**content[last], "text": text + _TAG}
    return {**message, "content": [*content[:last], tagged, *content[last + 1 :]]}


def cut_at_tag(rendered: str) -> str:
    """Return what is before the last tag. Blanks before it go too if the template trims texts.

    Raises:
        UserError: the template left the final message out.
    """
    at = rendered.rfind(_TAG.strip())
    if at < 0:
        raise UserError(
            "continue_final_message: the checkpoint's chat template changes or leaves out the "
            "final message, so it cannot be continued."
        )
    kept = rendered[:at]
    return kept if rendered.startswith(_TAG, at) else kept.rstrip()
