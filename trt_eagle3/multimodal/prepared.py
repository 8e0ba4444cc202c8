"""PixelPatches: an image or video as bytes, normalised to floats only for the vision tower.

A pixel has 256 values per channel, so a table of 256 floats normalises it exactly. The bytes take
an eighth of the memory of a still's float32 patches. So bytes are cut, hashed, cached and copied to
the GPU; `normalise` is the last step.

Shapes: N patches of one image or video, n of all, C channels, T frames kept of each patch, D = C *
temporal_patch * patch * patch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trt_eagle3.host_copy import to_device
from trt_eagle3.multimodal.pixel_config import PixelConfig

__all__ = ["PixelPatches", "image_table", "normalise", "video_table"]

_PIECE_BYTES = 2 << 20  # of pixels that one thread hashes per task, in about a millisecond
_BLOCK = 64  # patches per look-up on the CPU: their bytes and floats fit into its cache
_DEVICE_BLOCK = 16384  # patches per look-up on a GPU: 48 MiB of indices


@dataclass(frozen=True, eq=False)
class PixelPatches:
    """One image or video.

    Attributes:
        pixels: uint8 [N, C, T, patch * patch] in merge-block order. T is ``temporal_patch_size``,
            or 1 for a still, whose one frame stands for all frames of a patch.
        table: float32 [C, 256], the normalised value of each byte.
        grid: frames, rows and columns of patches: (t, h, w).
        temporal_patch_size: frames of one patch.
    """

    pixels: Tensor
    table: Tensor
    grid: tuple[int, int, int]
    temporal_patch_size: int

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of all inputs of the vision tower.

        Pieces of the pixels are hashed in parallel first, then their digests.
        """
        found = hashlib.sha256(
            np.array([*self.grid, self.temporal_patch_size], dtype=np.int64).tobytes()
        )
        found.update(self.table.numpy().tobytes())
        for piece in _piece_digests(self.pixels.contiguous().numpy().reshape(-1).data):
            found.update(piece)
        return found.digest()

    def pinned(self) -> PixelPatches:
        """Return a copy in page-locked memory, which the GPU copies asynchronously."""
        return replace(self, pixels=self.pixels.pin_memory())


def normalise(
    visuals: Sequence[PixelPatches],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Tensor:
    """Return the vision graph's patches [n, D] of images and videos in order; [0, 0] if none.

    The values equal float32 patches rounded to ``dtype``, because the table is rounded instead.
    """
    if not visuals:
        return torch.empty(0, 0, dtype=dtype, device=device)
    sizes = [len(visual.pixels) for visual in visuals]
    _, channels, _, area = visuals[0].pixels.shape
    frames = visuals[0].temporal_patch_size
    patches = torch.empty(sum(sizes), channels, frames, area, dtype=dtype, device=device)
    for visual, out in zip(visuals, patches.split(sizes), strict=True):
        if out.device.type == "cpu":
            _look_up(visual.pixels, visual.table.to(dtype), out)
        else:
            _look_up_on_device(visual.pixels, visual.table.to(dtype), out)
    return patches.flatten(1)


def image_table(config: PixelConfig) -> Tensor:
    """Return float32 [C, 256]: the values of transformers' ``Qwen2VLImageProcessorPil``."""
    values = (np.arange(256).astype(np.float64) * config.rescale_factor).astype(np.float32)
    mean, std = np.array(config.mean, dtype=np.float32), np.array(config.std, dtype=np.float32)
    return torch.from_numpy((values - mean[:, None]) / std[:, None])


def video_table(config: PixelConfig) -> Tensor:
    """Return float32 [C, 256]: the values of transformers' video processors.

    They fold the rescaling into mean and std, which the exact values depend on.
    """
    mean = (torch.tensor(config.mean) * (1.0 / config.rescale_factor))[:, None]
    std = (torch.tensor(config.std) * (1.0 / config.rescale_factor))[:, None]
    return torch.arange(256, dtype=torch.float32).sub(mean).div(std)


def _piece_digests(data: memoryview) -> list[bytes]:
    pieces = [data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)]
    if len(pieces) < 2:
        return [hashlib.sha256(piece).digest() for piece in pieces]
    num_threads = min(len(pieces), len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num_threads, "trt-eagle3-digest") as pool:  # hashlib drops the GIL
        return [found.digest() for found in pool.map(hashlib.sha256, pieces)]


def _look_up(pixels: Tensor, table: Tensor, out: Tensor) -> None:
    """Fill ``out [N, C, frames, area]`` on the CPU.

    numpy's take is the fastest look-up, and copies bits exactly.
    """
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[table.element_size()]
    values, source, target = table.view(bits).numpy(), pixels.numpy(), out.view(bits).numpy()
    for start in range(0, len(source), _BLOCK):
        rows = slice(start, start + _BLOCK)
        for channel, row in enumerate(values):
            target[rows, channel] = np.take(row, source[rows, channel], mode="clip")


def _look_up_on_device(pixels: Tensor, table: Tensor, out: Tensor) -> None:
    """Fill ``out`` on a GPU. The bytes are copied to it once.

    The single frame of a still is broadcast to all frames of a patch on the GPU.
    """
    table, pixels = to_device(table, out.device), to_device(pixels, out.device)
    for start in range(0, len(pixels), _DEVICE_BLOCK):
        rows = slice(start, start + _DEVICE_BLOCK)
        for channel, row in enumerate(table):
            part = pixels[rows, channel]
            out[rows, channel] = row.index_select(0, part.flatten().int()).view(part.shape)
