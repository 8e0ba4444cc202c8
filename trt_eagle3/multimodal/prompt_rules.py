"""PromptRules: a family's prompt text for images and videos, and its rope positions.

Shapes: P prompt tokens, G images and videos.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor

from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.pixel_config import PixelConfigs
from trt_eagle3.spec import TargetSpec

__all__ = ["Grid", "MediaKind", "PromptRules", "RulesOf", "TextRules", "token_text"]

MediaKind = Literal["image", "video"]
Grid = tuple[int, int, int]
"""Frames, patch rows and patch columns of an image (one frame) or a video."""


class PromptRules(Protocol):
    """Prompt rules of one target."""

    @property
    def pads(self) -> Mapping[MediaKind, str]:
        """The text that the chat template writes for an image or a video.

        Kinds without a pad are rejected.
        """
        ...

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """Tokens that users cannot write, in addition to the tokenizer's special tokens."""
        ...

    @property
    def text_content(self) -> bool:
        """Whether the chat template accepts message content only as one text, without parts."""
        ...

    def pixels(self, directory: Path, /) -> PixelConfigs | None:
        """Read the sizing of images and videos from ``directory``; None if the target has none.

        Raises:
            UserError: a processor file is missing, broken, or of another checkpoint.
        """
        ...

    def num_tokens(self, grid: Grid, /) -> int:
        """Count the visual tokens of an image or video."""
        ...

    def image_text(self, grid: Grid, /) -> str:
        """Return the text that replaces the pad of an image."""
        ...

    def video_text(self, grid: Grid, times: Sequence[float], /) -> str:
        """Return the text that replaces the pad of a video; ``times`` of its patches in seconds."""
        ...

    def visual_rows(self, token_ids: Tensor) -> Tensor:
        """Return bool [P]: the rows of visual embeddings."""
        ...

    def positions(
        self, visual_rows: Tensor, grid_thw: Tensor, grid_seconds: Tensor, /
    ) -> tuple[Tensor, int]:
        """Return rope positions int32 [3, P] and the last position + 1 - P.

        The axes are time, height, width. They are equal if the family has one axis.

        Args:
            visual_rows: bool [P].
            grid_thw: int64 [G, 3], in prompt order.
            grid_seconds: float32 [G], seconds between temporal patches of a video.
        """
        ...


RulesOf = Callable[[TargetSpec, Tokenizer], PromptRules]
"""Create the rules of a target. The tokenizer must have the target's tokens."""


class TextRules:
    """Rules of a target that reads text only. Positions count up by one per token."""

    pads: Mapping[MediaKind, str] = {}
    control_tokens: tuple[str, ...] = ()
    text_content = True

    def __init__(self, _spec: TargetSpec, _tokenizer: Tokenizer) -> None:
        """Ignore both arguments."""

    def pixels(self, _directory: Path, /) -> None:
        """Return None: there are no images or videos."""

    def num_tokens(self, _grid: Grid, /) -> int:
        """Return 0: there are no visual tokens."""
        return 0

    def image_text(self, _grid: Grid, /) -> str:
        """Return an empty text."""
        return ""

    def video_text(self, _grid: Grid, _times: Sequence[float], /) -> str:
        """Return an empty text."""
        return ""

    def visual_rows(self, token_ids: Tensor) -> Tensor:
        """Return False for every row."""
        return torch.zeros_like(token_ids, dtype=torch.bool)

    def positions(
        self, visual_rows: Tensor, _grids: Tensor, _seconds: Tensor, /
    ) -> tuple[Tensor, int]:
        """Return 0, 1, 2, ... on each axis."""
        return torch.arange(len(visual_rows), dtype=torch.int32).repeat(3, 1), 0


def token_text(tokenizer: Tokenizer, token_id: int, name: str) -> str:
    """Return the text of a token that a config names.

    Raises:
        UserError: the tokenizer has no token with this id.
    """
    token = tokenizer.id_to_token(token_id)
    if token is None:
        raise UserError(
            f"tokenizer: no token for {name} = {token_id} of config.json. The tokenizer is another "
            "checkpoint's: copy this checkpoint's own."
        )
    return str(token)
