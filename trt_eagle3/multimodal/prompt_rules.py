"""What a family decides about its prompts: the text that stands for images and videos, and rope
positions.

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
from trt_eagle3.multimodal.spec import ProcessorSpec

__all__ = ["Grid", "MediaKind", "PromptRules", "RulesOf", "TextRules", "token_text"]

MediaKind = Literal["image", "video"]
Grid = tuple[int, int, int]
"""Frames, patch rows and patch columns of an image (one frame) or a video."""


class PromptRules(Protocol):
    """Rules of one target."""

    @property
    def pads(self) -> Mapping[MediaKind, str]:
        """What the chat template writes where an image or a video goes; a kind that is not among
        them is refused.
        """
        ...

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """Tokens of prompts that users cannot write, beside the tokenizer's special ones."""
        ...

    @property
    def text_content(self) -> bool:
        """Whether the chat template takes the content of a message as one text, and no parts."""
        ...

    def pixels(self, directory: Path, /) -> PixelConfigs | None:
        """How the processor files in ``directory`` size images and videos; None where there are
        none.

        Raises:
            UserError: such a file is missing, broken, or another checkpoint's.
        """
        ...

    def num_tokens(self, grid: Grid, /) -> int:
        """Visual tokens of an image or video."""
        ...

    def image_text(self, grid: Grid, /) -> str:
        """What replaces the pad of an image."""
        ...

    def video_text(self, grid: Grid, times: Sequence[float], /) -> str:
        """What replaces the pad of a video whose patches stand at ``times``, in seconds."""
        ...

    def visual_rows(self, token_ids: Tensor) -> Tensor:
        """bool [P]: where visual embeddings go."""
        ...

    def positions(
        self, visual_rows: Tensor, grid_thw: Tensor, grid_seconds: Tensor, /
    ) -> tuple[Tensor, int]:
        """Rope positions int32 [3, P] (time, height, width; equal where a family has one axis), and
        the last position + 1 - P.

        Args:
            visual_rows: bool [P]. grid_thw: int64 [G, 3], in prompt order. grid_seconds: float32
                [G], from one temporal patch of a video to the next.
        """
        ...


RulesOf = Callable[[ProcessorSpec, Tokenizer], PromptRules]
"""The rules of a target, whose tokens the tokenizer must have."""


class TextRules:
    """Of a target that reads text only: every token one further than the one before."""

    pads: Mapping[MediaKind, str] = {}
    control_tokens: tuple[str, ...] = ()
    text_content = True

    def __init__(self, _spec: ProcessorSpec, _tokenizer: Tokenizer) -> None:
        """Rules need nothing of either."""

    def pixels(self, _directory: Path, /) -> None:
        """There are none."""

    def num_tokens(self, _grid: Grid, /) -> int:
        """None: there are no visual tokens."""
        return 0

    def image_text(self, _grid: Grid, /) -> str:
        """Nothing."""
        return ""

    def video_text(self, _grid: Grid, _times: Sequence[float], /) -> str:
        """Nothing."""
        return ""

    def visual_rows(self, token_ids: Tensor) -> Tensor:
        """Nowhere."""
        return torch.zeros_like(token_ids, dtype=torch.bool)

    def positions(
        self, visual_rows: Tensor, _grids: Tensor, _seconds: Tensor, /
    ) -> tuple[Tensor, int]:
        """0, 1, 2, ... on each axis."""
        return torch.arange(len(visual_rows), dtype=torch.int32).repeat(3, 1), 0


def token_text(tokenizer: Tokenizer, token_id: int, name: str) -> str:
    """The text of a token that a config names.

    Raises:
        UserError: the tokenizer has none of this id.
    """
    token = tokenizer.id_to_token(token_id)
    if token is None:
        raise UserError(
            f"tokenizer: no token for {name} = {token_id} of config.json. The tokenizer is another "
            "checkpoint's: copy this checkpoint's own."
        )
    return str(token)
