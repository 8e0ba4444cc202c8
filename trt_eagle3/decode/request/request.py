"""Request, Chunk and Generation: the input and output of an engine."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from trt_eagle3.decode.request.conversation import Conversation, RawPrompt
from trt_eagle3.decode.sampling.logprobs import TokenLogprob
from trt_eagle3.decode.sampling.prompt_logprobs import PromptLogprobs
from trt_eagle3.decode.sampling.sampling_params import GREEDY, SamplingParams
from trt_eagle3.errors import UserError, clip
from trt_eagle3.multimodal import ImageSource, Video, VideoSource

__all__ = [
    "Chunk",
    "FinishReason",
    "Generation",
    "Messages",
    "PromptInput",
    "PromptSource",
    "Request",
]

_MAX_LOGGED_LEN = 10_000  # most characters of a prompt in a log
_SINGLE = str | Path | bytes | Image.Image | np.ndarray | Video  # one image or video, no list
_ACCEPTED = {
    "images": "paths, URLs, data URIs, bytes, Pillow images or NumPy arrays",
    "videos": "paths, URLs, data URIs, bytes, Video objects or lists of images",
}
FinishReason = Literal["stop", "length", "cancelled"]
Messages = Sequence[Mapping[str, Any]]
"""A conversation, as ``multimodal.Processor.messages`` takes it."""
PromptSource = str | Messages | Conversation | RawPrompt
"""A user's text, chat messages, messages with tools, or a prompt without chat template."""
PromptInput = PromptSource | Sequence[int] | Mapping[str, Sequence[int]]
"""A prompt as ``LLM`` takes it: also token ids, as a list or as ``{"prompt_token_ids": [...]}``."""


@dataclass(frozen=True)
class Request:
    """One prompt, and the options of its answer.

    Attributes:
        prompt: a user's text, chat messages (``multimodal.Processor.messages``), or a prompt of
            ``conversation``.
        images, videos: of a text prompt: a list, or a single one. See ``multimodal.ImageSource``
            and ``VideoSource``.
        sampling: how tokens are sampled and when the answer ends; greedy by default.
        speculation: use the bundle's draft. The answer is the same (when sampled, the same
            distribution), but faster.
        client: name of the client, if known; clients share image decoding and the caches of images
            fairly.
    Raises:
        UserError: a value is of another type or outside its range; names the field.
    """

    prompt: PromptSource
    images: Sequence[ImageSource] = ()
    videos: Sequence[VideoSource] = ()
    sampling: SamplingParams = GREEDY
    speculation: bool = True
    client: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str | list | tuple | Conversation | RawPrompt):
            raise UserError(
                f"prompt: expected a text or a list of messages, got {type(self.prompt).__name__}"
            )
        for name, accepted in _ACCEPTED.items():
            given = getattr(self, name)
            if isinstance(given, _SINGLE):
                given = (given,)
            elif not isinstance(given, list | tuple | types.NoneType):
                raise UserError(
                    f"{name}: expected {accepted}, one or a list of them, got "
                    f"{type(given).__name__}"
                )
            object.__setattr__(self, name, tuple(given or ()))
        if isinstance(self.prompt, RawPrompt) and (self.images or self.videos):
            raise UserError("images and videos: a prompt without chat template takes none.")
        if not isinstance(self.prompt, str) and (self.images or self.videos):
            raise UserError(
                "images and videos: expected none beside a list of messages. Put them into the "
                "messages."
            )
        if not isinstance(self.speculation, bool):
            raise UserError(f"speculation: expected true or false, got {self.speculation!r:.40}")
        if not isinstance(self.sampling, SamplingParams):
            raise UserError(
                f"sampling: expected SamplingParams, got {type(self.sampling).__name__}"
            )

    @property
    def prompt_text(self) -> str:
        """The prompt as one bounded log line: a text unchanged, anything else as JSON."""
        match self.prompt:
            case str() as text:
                return clip(text, _MAX_LOGGED_LEN)
            case Conversation(inner) | RawPrompt(inner) | inner:
                return clip(json.dumps(inner, ensure_ascii=False), _MAX_LOGGED_LEN)

    @property
    def has_media(self) -> bool:
        """Whether the prompt has images or videos: message parts that are not text."""
        prompt = self.prompt
        if isinstance(prompt, str | RawPrompt):
            return bool(self.images or self.videos)
        messages = prompt.messages if isinstance(prompt, Conversation) else prompt
        contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
        parts = (
            part for content in contents if isinstance(content, list | tuple) for part in content
        )
        return any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)


@dataclass(frozen=True)
class Chunk:
    """The part of an answer that one target forward added.

    Attributes:
        token_ids: the emitted tokens. text: the text that is now final.
        finish_reason: None until the last chunk.
        logprobs: of each token, if requested; otherwise empty.
        accepted_lengths: as in ``Generation``; empty if the forward verified no drafts.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    accepted_lengths: tuple[int, ...] = ()

    @staticmethod
    def joined(chunks: Sequence[Chunk]) -> Chunk:
        """Join consecutive chunks."""
        return Chunk(
            tuple(token for chunk in chunks for token in chunk.token_ids),
            "".join(chunk.text for chunk in chunks),
            chunks[-1].finish_reason,
            tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
            tuple(length for chunk in chunks for length in chunk.accepted_lengths),
        )


@dataclass(frozen=True)
class Generation:
    """An answer.

    Attributes:
        token_ids: generated ids, the end token included.
        finish_reason: ``stop`` at an end token or stop text, ``length`` at a limit,
            ``cancelled``; None while it is incomplete.
        accepted_lengths: tokens emitted by each target forward that verified drafts, the bonus
            token included. The last one counts only tokens that the answer keeps.
        acceptance_length: their mean; None if no forward verified drafts.
        tokens_per_second: of the tokens after the first; None with fewer than two tokens.
        logprobs: of each token, if requested; otherwise empty.
        reused_tokens: prompt tokens that the prefix cache had.
        prompt_logprobs: of the prompt's tokens, if requested; of several answers to one prompt,
            only the first has them.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason | None
    acceptance_length: float | None
    accepted_lengths: tuple[int, ...]
    tokens_per_second: float | None
    time_to_first_token_ms: float | None
    logprobs: tuple[TokenLogprob, ...] = ()
    reused_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def num_forwards(self) -> int:
        """Target forwards after the prompt's; each without a draft emitted one token."""
        undrafted = max(len(self.token_ids) - 1, 0) - sum(self.accepted_lengths)
        return len(self.accepted_lengths) + undrafted
