"""Resize an image into a square with borders, and cut it into the patches of its visual tokens.

Pixels match ``DeepseekVLImageProcessorPil`` and ``DeepseekVLHybridImageProcessorPil``. The latter
makes two squares: one with details, and a smaller one that is resized from it. A visual token's
patch is one of the smaller square. Beside its channels it holds an equal share of the larger one:

    channels   3 of the smaller patch, then for each colour K pieces of the larger square
    piece      patch * patch pixels, as many as a smaller patch has

The pieces of a colour, token by token, are the larger square's patches row by row, and zeros up to
the last token.

Decoder processes import this module, so it does not import torch.
"""

# Shapes: N patches of the smaller square, p their side, K pieces of a colour per patch

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trt_eagle3.multimodal.pixel_config import DetailConfig, PixelConfig
from trt_eagle3.multimodal.tiles import Allocate

__all__ = ["detail_pieces", "num_pieces", "square_patches"]

_CHANNELS = 3


def square_patches(
    image: Image.Image,
    config: PixelConfig,
    side: int,
    background: Sequence[int],
    allocate: Allocate | None = None,
) -> tuple[NDArray[np.uint8], tuple[int, int, int]]:
    """Resize one RGB image into a square of ``side`` pixels and cut it row by row.

    Returns:
        (pixels uint8 [N, 3 + 3 * K, 1, p * p], (1, h, w)); K is 0 without ``config.detail``.
    """
    patch, rows = config.patch_size, side // config.patch_size
    detail = None if config.detail is None else DetailConfig(*config.detail)  # a list after JSON
    pieces = 0 if detail is None else num_pieces(side, detail.side)
    shape = (rows**2, _CHANNELS * (1 + pieces), 1, patch**2)
    pixels = np.empty(shape, dtype=np.uint8) if allocate is None else allocate(shape)
    if detail is not None:
        image = _squared(image, detail.side, config.min_side, detail.resample, detail.background)
        planes = _patches(image, detail.patch_size)
        pixels[:, _CHANNELS:, 0] = detail_pieces(planes, rows**2, pieces, patch**2)
    image = _squared(image, side, config.min_side, config.resample, background)
    pixels[:, :_CHANNELS, 0] = _patches(image, patch)
    return pixels, (1, rows, rows)


def num_pieces(side: int, detail_side: int) -> int:
    """Return K: the pieces of a colour of the larger square that a smaller patch holds."""
    return -(-(detail_side**2) // side**2)


def detail_pieces(patches: NDArray[Any], tokens: int, pieces: int, size: int) -> NDArray[Any]:
    """Divide the patches of the larger square among the visual tokens.

    Args:
        patches: [n, 3, area].
        tokens: N. pieces: K. size: values of a piece.
    Returns:
        [N, 3 * K, size]; unused values at the end are 0.
    """
    colours = patches.transpose(1, 0, 2).reshape(_CHANNELS, -1)
    unused = tokens * pieces * size - colours.shape[1]
    padded = np.pad(colours, ((0, 0), (0, unused)))
    by_token = padded.reshape(_CHANNELS, tokens, pieces, size).transpose(1, 0, 2, 3)
    return by_token.reshape(tokens, _CHANNELS * pieces, size)


def _squared(
    image: Image.Image, side: int, least: int, resample: int, background: Sequence[int]
) -> Image.Image:
    """Resize the longer side of ``image`` to ``side``, and center it on a square."""
    scale = side / max(image.size)
    width, height = (max(round(length * scale), least) for length in image.size)
    resized = image.resize((width, height), Image.Resampling(resample))
    if width == height:
        return resized
    square = Image.new("RGB", (max(width, height),) * 2, tuple(background))
    square.paste(resized, ((square.width - width) // 2, (square.height - height) // 2))
    return square


def _patches(image: Image.Image, patch: int) -> NDArray[np.uint8]:
    """Cut a square image row by row into patches [n, 3, patch * patch]."""
    rows = image.width // patch
    cut = np.asarray(image).reshape(rows, patch, rows, patch, _CHANNELS)
    return cut.transpose(0, 2, 4, 1, 3).reshape(rows**2, _CHANNELS, patch**2)
