"""Convert messages to the form of a chat template, and collect their images and videos."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.media_options import NO_MEDIA_OPTIONS, MediaOptions
from trt_eagle3.multimodal.past_message import past_message
from trt_eagle3.multimodal.prompt_rules import MediaKind, PromptRules
from trt_eagle3.multimodal.visual_part import VisualPart, read_visual

__all__ = ["MediaSlot", "MessageReader"]

_NEVER = r"(?!)"
"""A pattern without a match."""


@dataclass(frozen=True)
class MediaSlot:
    """An image or video at its place in a conversation."""

    kind: MediaKind
    source: Any
    options: MediaOptions = NO_MEDIA_OPTIONS


class MessageReader:
    """Read messages by the prompt rules of one target.

    Attributes:
        pads: matches the text that the chat template writes for an image or video.
    """

    def __init__(
        self, rules: PromptRules, *, text_arguments: bool, refuse_pads: bool, tiled: bool = False
    ) -> None:
        """Set the rules for arguments, pads and tiles.

        Args:
            text_arguments: the template accepts arguments of calls as JSON text.
            refuse_pads: reject pads in texts, which would be taken for an image.
            tiled: as for `read_visual`.
        """
        self._tiled = tiled
        self.pads = re.compile("|".join(map(re.escape, rules.pads.values())) or _NEVER)
        self._rules = rules
        self._text_arguments = text_arguments
        self._refuse_pads = refuse_pads

    def read(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[MediaSlot]]:
        """Return the turns for the template, and the images and videos in order.

        A turn holds only the kind of an image or video.

        Raises:
            UserError: a message is not a mapping, has an unknown part, a bad value of a supported
                key, or a text that is not Unicode.
        """
        turns: list[dict[str, Any]] = []
        slots: list[MediaSlot] = []
        for i, message in enumerate(messages):
            turn, found = self._turn(message, f"messages[{i}]")
            turns.append(turn)
            slots += found
        return turns, slots

    def _turn(self, message: Any, where: str) -> tuple[dict[str, Any], list[MediaSlot]]:
        if not isinstance(message, Mapping) or "role" not in message:
            raise UserError(
                f"messages: expected mappings with role and content, got {message!r:.80}."
            )
        message = past_message(message, where, text_arguments=self._text_arguments)
        content = message.get("content")
        slots: list[MediaSlot] = []
        if isinstance(content, str):
            self._check_text(content)
        else:
            content, slots = self._parts(content, f"{where}.content")
            if self._rules.text_content:
                content = "\n".join(part["text"] for part in content)
        return {**message, "content": content}, slots

    def _parts(self, content: object, where: str) -> tuple[list[dict[str, str]], list[MediaSlot]]:
        if not isinstance(content, Sequence):
            raise UserError(
                "messages: content: expected a string or a list of parts, got "
                f"{type(content).__name__}."
            )
        parts: list[dict[str, str]] = []
        slots: list[MediaSlot] = []
        for i, part in enumerate(content):
            visual = read_visual(part, tiled=self._tiled) if isinstance(part, Mapping) else None
            if visual is not None:
                slots.append(self._slot(visual, f"{where}[{i}]"))
                parts.append({"type": visual.kind})
                continue
            match part:
                case str() as text:
                    self._check_text(text)
                    parts.append({"type": "text", "text": text})
                case {"type": "text", "text": str(text)}:
                    self._check_text(text)
                    parts.append({"type": "text", "text": text})
                case {"type": "audio" | "input_audio" | "audio_url"}:
                    raise UserError(
                        "messages: unknown part audio: no supported target takes audio; for "
                        "Qwen3-Omni, the thinker reads text, images and videos. Send text."
                    )
                case _:
                    known = (
                        '{"type": "text"}, {"type": "image"} or {"type": "video"} with their value'
                    )
                    raise UserError(f"messages: unknown part {part!r:.80}. Use {known}.")
        return parts, slots

    def _slot(self, visual: VisualPart, where: str) -> MediaSlot:
        if visual.kind not in self._rules.pads:
            reads = "text and images" if self._rules.pads else "text only"
            raise UserError(
                f"prompt: this target reads {reads}, it takes no {visual.kind}s. Leave them out."
            )
        return MediaSlot(visual.kind, visual.source, visual.options(where))

    def _check_text(self, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"text: not Unicode text at character {error.start}. Pass it as UTF-8."
            ) from error
        if self._refuse_pads and (found := self.pads.search(text)):
            raise UserError(
                f"text: holds {found.group()}, which marks where an image or video goes. Remove it."
            )
