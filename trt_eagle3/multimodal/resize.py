"""Resize an RGB image channel by channel on all cores, to the bytes that Pillow's ``resize`` gives.

Pillow resamples in two passes with bytes between them. It skips the pass of a side that keeps its
length. A horizontal pass reads no other row, a vertical pass no other column. So each channel of a
large image is resized in bands of rows, then in strips of columns. Each part is emitted as soon as
it is done. Pillow releases the GIL while it crops and resamples. On up to three cores, a thread
resizes a whole channel, because parts would take a tenth longer there.

Decoder processes import this module, so it does not import torch.
"""

# Shapes: H and W pixels of a part

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

__all__ = ["Emit", "resize_channels"]

_LARGE = 1 << 20  # pixels above which threads are faster
_VERY_LARGE = 6 << 20  # pixels above which more than one thread per channel is faster
_MAX_THREADS = 12  # copying a channel or a part's bytes holds the GIL, so more threads wait
_TASKS_PER_THREAD = 2  # balances a thread that starts late

Emit = Callable[[int, NDArray[np.uint8], int, int], None]
"""Receive a channel's number, a part uint8 [H, W] of it, and the part's top and left in pixels.

Several threads call it concurrently.
"""

_Pass = Literal["horizontal", "vertical"]


def resize_channels(
    image: Image.Image, size: tuple[int, int], resample: Image.Resampling, unit: int, emit: Emit
) -> None:
    """Pass each channel of ``image.resize(size, resample)`` to ``emit``, in disjoint parts.

    Args:
        image: RGB, decoded.
        size: (width, height), multiples of ``unit``.
        unit: parts begin and end at multiples of this many pixels.
    """

    def whole(channel: int) -> None:
        emit(channel, np.asarray(image.getchannel(channel).resize(size, resample)), 0, 0)

    pixels = max(image.width * image.height, size[0] * size[1])
    if pixels < _LARGE:
        for channel in range(3):
            whole(channel)
        return
    threads = _num_threads() if pixels >= _VERY_LARGE else 3
    with ThreadPoolExecutor(max(3, threads), "trt-eagle3-resize") as pool:
        if threads <= 3 or resample is Image.Resampling.NEAREST:
            list(pool.map(whole, range(3)))
        else:
            _resize_parts(pool, image, size, resample, unit, emit)


def _resize_parts(
    pool: ThreadPoolExecutor,
    image: Image.Image,
    size: tuple[int, int],
    resample: Image.Resampling,
    unit: int,
    emit: Emit,
) -> None:
    *first, last = _passes(image.size, size)
    source = _channels(image)
    for kind in first:
        between = (size[0], image.height) if kind == "horizontal" else (image.width, size[1])
        source = _between(pool, source, kind, between, resample, unit)
    _run(pool, source, last, size, resample, unit, emit)


def _channels(image: Image.Image) -> Iterator[Image.Image]:
    """Yield channels lazily: threads resize the first while the second is copied."""
    return (image.getchannel(channel) for channel in range(3))


def _passes(old: tuple[int, int], new: tuple[int, int]) -> list[_Pass]:
    """Return passes in Pillow's order, at least one; ``old`` and ``new``: (width, height)."""
    shrinks = old[0] - new[0], old[1] - new[1]
    if not shrinks[1]:
        return ["horizontal"]
    if not shrinks[0]:
        return ["vertical"]
    if shrinks[1] > max(0, 2 * shrinks[0]) and _orders_passes():
        return ["vertical", "horizontal"]
    return ["horizontal", "vertical"]


@cache
def _orders_passes() -> bool:
    """Detect whether Pillow begins with the vertical pass if the height shrinks over twice as much.

    Version 13 does; 10.3 and 12.0 always begin with the horizontal pass. Rounding between the
    passes reveals the order.
    """
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 16), dtype=np.uint8))
    horizontal_first = image.resize((15, 64)).resize((15, 8))
    return image.resize((15, 8)).tobytes() != horizontal_first.tobytes()


def _between(
    pool: ThreadPoolExecutor,
    source: Iterable[Image.Image],
    kind: _Pass,
    size: tuple[int, int],
    resample: Image.Resampling,
    unit: int,
) -> Iterator[Image.Image]:
    """Return the three channels after the first of two passes; ``size``: after that pass."""
    planes = np.empty((3, size[1], size[0]), dtype=np.uint8)

    def store(channel: int, part: NDArray[np.uint8], top: int, left: int) -> None:
        planes[channel, top : top + part.shape[0], left : left + part.shape[1]] = part

    _run(pool, source, kind, size, resample, unit, store)
    return (Image.fromarray(plane) for plane in planes)


def _run(
    pool: ThreadPoolExecutor,
    source: Iterable[Image.Image],
    kind: _Pass,
    size: tuple[int, int],
    resample: Image.Resampling,
    unit: int,
    emit: Emit,
) -> None:
    """Run one pass over all parts of the three channels; ``size``: after that pass."""

    def resize(channel: int, plane: Image.Image, start: int, stop: int) -> None:
        if kind == "horizontal":
            box, part_size = (0, start, plane.width, stop), (size[0], stop - start)
        else:
            box, part_size = (start, 0, stop, plane.height), (stop - start, size[1])
        emit(channel, np.asarray(_crop(plane, box).resize(part_size, resample)), box[1], box[0])

    spans = _spans(size[1] if kind == "horizontal" else size[0], unit)
    tasks = [
        pool.submit(resize, channel, plane, *span)
        for channel, plane in enumerate(source)
        for span in spans
    ]
    for task in tasks:
        task.result()


def _crop(plane: Image.Image, box: tuple[int, int, int, int]) -> Image.Image:
    return plane if box == (0, 0, *plane.size) else plane.crop(box)


def _spans(length: int, unit: int) -> list[tuple[int, int]]:
    """Split ``length`` pixels into similar parts. Only the last may end within a unit."""
    units = -(-length // unit)
    count = min(units, -(-_TASKS_PER_THREAD * _num_threads() // 3))  # per channel
    ends = [min(length, unit * (units * index // count)) for index in range(count + 1)]
    return list(pairwise(ends))


def _num_threads() -> int:
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))
