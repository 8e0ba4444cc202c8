"""Preparation of images on the CPU, stage by stage: ``python -m benchmarks.preparation``.

Stages from a JPEG to the vision tower's float32 patches: decoding, resizing and cutting, the digest
for the prefix cache, and the lookup of numbers. Then decoding to cutting in this process and in a
decoder process; the difference is the cost of the process boundary. transformers' Pillow processor
runs on the decoded image for comparison. Prints best and median of the rounds; sides alternate.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from statistics import median
from typing import Any

import click
import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

from trt_eagle3.io.run_command import run_command
from trt_eagle3.multimodal.caller import NO_CALLER
from trt_eagle3.multimodal.decoder_pool import DecoderPool
from trt_eagle3.multimodal.image import load_image
from trt_eagle3.multimodal.media_job import MediaJob, MediaPart, run_here
from trt_eagle3.multimodal.patches import image_patches
from trt_eagle3.multimodal.pixel_config import PixelConfig
from trt_eagle3.multimodal.policy import LOCAL_MEDIA
from trt_eagle3.multimodal.prepared import PixelPatches, image_table, normalise

__all__ = ["main"]

# Qwen3-VL's preprocessor_config.json
_CONFIG = PixelConfig(16, 2, 2, 65536, 16777216, (0.5,) * 3, (0.5,) * 3, 1 / 255, 3)
_SIZES = ((512, 512), (1024, 1024), (2048, 2048), (4032, 3024))
_QUALITY = 90  # of the JPEGs, about the quality of phone cameras

Stages = dict[str, Callable[[], object]]


@click.command()
@click.option("--rounds", default=10, show_default=True, help="Rounds of the best and the median.")
@click.option("--max-side", default=4032, show_default=True, help="Skip larger images.")
def main(rounds: int, max_side: int) -> None:
    """Print milliseconds by stage and size."""
    sizes = [size for size in _SIZES if max(size) <= max_side]
    decoders = DecoderPool()
    try:
        found = [_measure(_stages(_jpeg(*size), decoders), rounds) for size in sizes]
    finally:
        decoders.close()
    table = Table(title="milliseconds, best / median")
    table.add_column("")
    for width, height in sizes:
        table.add_column(f"{width} x {height}", justify="right")
    for stage in found[0]:
        table.add_row(
            stage,
            *(
                f"{1e3 * min(times[stage]):.1f} / {1e3 * median(times[stage]):.1f}"
                for times in found
            ),
        )
    Console().print(table)


def _jpeg(width: int, height: int) -> bytes:
    """Encode soft shapes with grain, which cost a decoder as much as a photo."""
    generator = np.random.default_rng(0)
    shapes = generator.integers(0, 256, (height // 32, width // 32, 3), dtype=np.uint8)
    soft = np.asarray(
        Image.fromarray(shapes).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16
    )
    grain = generator.integers(-4, 5, soft.shape, dtype=np.int16)
    buffer = io.BytesIO()
    Image.fromarray((soft + grain).clip(0, 255).astype(np.uint8)).save(
        buffer, "JPEG", quality=_QUALITY
    )
    return buffer.getvalue()


def _stages(data: bytes, decoders: DecoderPool) -> Stages:
    job = MediaJob("image", "image", LOCAL_MEDIA, _CONFIG)
    image = load_image(data)
    pixels, grid = image_patches(image, _CONFIG)
    patches = PixelPatches(
        torch.from_numpy(pixels), image_table(_CONFIG), grid, _CONFIG.temporal_patch_size
    )
    return {
        "decode": lambda: load_image(data),
        "resize and cut": lambda: image_patches(image, _CONFIG),
        "digest": lambda: replace(patches).digest,
        "look up float32": lambda: normalise([patches]),
        "look up bfloat16": lambda: normalise([patches], torch.bfloat16),
        "to bytes, this process": lambda: _all_parts(run_here(job, data)),
        "to bytes, decoder process": lambda: _all_parts(decoders.run(job, data, NO_CALLER)),
        **_transformers(image),
    }


def _all_parts(running: AbstractContextManager[Iterator[MediaPart]]) -> list[MediaPart]:
    with running as parts:
        return list(parts)


def _transformers(image: Image.Image) -> Stages:
    """Return the stage from the decoded image to float32.

    Empty if transformers is too old to run it without torchvision.
    """
    import transformers

    kind: Any = getattr(transformers, "Qwen2VLImageProcessorPil", None)
    if kind is None:
        return {}
    processor = kind(
        patch_size=_CONFIG.patch_size,
        size={"shortest_edge": _CONFIG.min_pixels, "longest_edge": _CONFIG.max_pixels},
        image_mean=list(_CONFIG.mean),
        image_std=list(_CONFIG.std),
    )
    return {
        "transformers, decoded to float32": lambda: processor(images=[image], return_tensors="pt")
    }


def _measure(stages: Stages, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in stages}
    for run in stages.values():
        run()  # imports, and the start of a process
    for _ in range(rounds):
        for name, run in stages.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    run_command(main)
