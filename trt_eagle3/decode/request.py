"""What is asked of an engine, and what comes back."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trt_eagle3.decode.sampling import GREEDY, Sampling
from trt_eagle3.errors import UserError
from trt_eagle3.multimodal import ImageSource, VideoSource

__all__ = ["Chunk", "FinishReason", "Generation", "Request"]

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Request:
    """One prompt and how to answer it.

    Attributes:
        prompt: a user's text, or chat messages (``multimodal.Processor.messages``).
        images, videos: of a text prompt; see ``multimodal.ImageSource`` and ``VideoSource``.
        max_tokens: at most this many new tokens.
        sampling: how tokens are chosen; greedy unless told otherwise.
        stop: texts that end the answer; they are not part of it.
        stop_token_ids: tokens that end the answer besides the model's own; they are its last
            tokens.
        ignore_eos: go on past the model's end tokens.
        speculation: draft with the bundle's draft: the same answer (when sampled, the same
            distribution), only faster.
        client: who asks, if known: what decodes images is shared among clients.
    Raises:
        UserError: a value of another type or outside its range, by name.
    """

    prompt: str | Sequence[Mapping[str, Any]]
    images: Sequence[ImageSource] = ()
    videos: Sequence[VideoSource] = ()
    max_tokens: int = 256
    sampling: Sampling = GREEDY
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    speculation: bool = True
    client: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str | list | tuple):
            raise UserError(
                f"prompt: expected a text or a list of messages, got {type(self.prompt).__name__}"
            )
        if (
            not isinstance(self.max_tokens, int)
            or isinstance(self.max_tokens, bool)
            or self.max_tokens < 1
        ):
            raise UserError(
                f"max_tokens: expected a whole number of at least 1, got {self.max_tokens!r:.40}"
            )
        for name in ("images", "videos", "stop", "stop_token_ids"):
            value = getattr(self, name)
            if not isinstance(value, list | tuple | types.NoneType):
                raise UserError(
                    f"{name}: expected a list, got {type(value).__name__}. Put it in a list."
                )
            object.__setattr__(self, name, tuple(value or ()))
        if not isinstance(self.prompt, str) and (self.images or self.videos):
            raise UserError(
                "images and videos: of a list of messages they stand in the messages. Put them "
                "there."
            )
        if not all(isinstance(text, str) and text for text in self.stop):
            raise UserError(
                f"stop: expected a list of texts that are not empty, got {list(self.stop)!r:.80}"
            )
        if not all(
            isinstance(token, int) and not isinstance(token, bool) for token in self.stop_token_ids
        ):
            raise UserError(
                "stop_token_ids: expected a list of token ids, got "
                f"{list(self.stop_token_ids)!r:.80}"
            )
        for name in ("ignore_eos", "speculation"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}: expected true or false, got {getattr(self, name)!r:.40}")
        if not isinstance(self.sampling, Sampling):
            raise UserError(f"sampling: expected a Sampling, got {type(self.sampling).__name__}")

    @property
    def has_media(self) -> bool:
        """Whether the prompt has images or videos: parts of messages that are no texts."""
        if isinstance(self.prompt, str):
            return bool(self.images or self.videos)
        contents = [
            message.get("content") for message in self.prompt if isinstance(message, Mapping)
        ]
        parts = (
            part for content in contents if isinstance(content, list | tuple) for part in content
        )
        return any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)


@dataclass(frozen=True)
class Chunk:
    """What one target pass added.

    Attributes:
        token_ids: the tokens that it emitted. text: what of the text is now certain.
        finish_reason: None until the last chunk.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Generation:
    """An answer.

    Attributes:
        token_ids: generated ids, the end token included.
        finish_reason: ``stop`` at an end token or stop text, ``length`` at a limit; None while it
            is in the making.
        accepted_lengths: tokens emitted by each verify pass, the bonus token included (1 without
            speculation).
        acceptance_length: their mean; None where no verify pass ran.
        tokens_per_second: of the tokens after the first; None where there is one token.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason | None
    acceptance_length: float | None
    accepted_lengths: tuple[int, ...]
    tokens_per_second: float | None
    time_to_first_token_ms: float | None
