"""Large images resized in parts equal Pillow's own resize, byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from tests.multimodal.record_goldens import pattern
from trt_eagle3.multimodal import resize

UNIT = 32
FILTERS = st.sampled_from(
    [resample for resample in Image.Resampling if resample <= Image.Resampling.HAMMING]
)


@pytest.fixture(autouse=True)
def every_image_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resize, "_LARGE", 0)
    monkeypatch.setattr(resize, "_VERY_LARGE", 0)
    monkeypatch.setattr(resize, "_num_threads", lambda: 4)


def picture(width: int, height: int) -> Image.Image:
    return Image.fromarray(pattern(width, 1, height, width)[0])


def whole(
    image: Image.Image, size: tuple[int, int], resample: Image.Resampling
) -> NDArray[np.uint8]:
    return np.asarray(image.resize(size, resample))


def in_parts(
    image: Image.Image, size: tuple[int, int], resample: Image.Resampling
) -> NDArray[np.uint8]:
    """uint8 [H, W, 3]; every pixel is given once, in parts of whole units."""
    found, times = (
        np.zeros((size[1], size[0], 3), dtype=np.uint8),
        np.zeros((size[1], size[0], 3), dtype=np.uint8),
    )

    def emit(channel: int, part: NDArray[np.uint8], top: int, left: int) -> None:
        assert not any(side % UNIT for side in (top, left, *part.shape))
        where = (slice(top, top + part.shape[0]), slice(left, left + part.shape[1]), channel)
        found[where] = part
        times[where] += 1

    resize.resize_channels(image, size, resample, UNIT, emit)
    assert (times == 1).all()
    return found


SIDES, UNITS = st.integers(1, 400), st.integers(1, 12)


@settings(max_examples=60, deadline=None)
@given(SIDES, SIDES, UNITS, UNITS, FILTERS)
def test_resize_channels_of_any_sizes_equals_the_whole_resize(
    width: int, height: int, columns: int, rows: int, resample: Image.Resampling
) -> None:
    image, size = picture(width, height), (UNIT * columns, UNIT * rows)
    assert np.array_equal(in_parts(image, size, resample), whole(image, size, resample))


@settings(max_examples=60, deadline=None)
@given(UNITS, UNITS, st.integers(-24, 24), st.integers(-24, 24), FILTERS)
def test_resize_channels_to_nearly_the_same_size_equals_the_whole_resize(
    columns: int, rows: int, wider: int, higher: int, resample: Image.Resampling
) -> None:
    """As photographs and screenshots are: sides keep their length, and either pass may be first."""
    size = UNIT * columns, UNIT * rows
    image = picture(size[0] + wider, size[1] + higher)
    assert np.array_equal(in_parts(image, size, resample), whole(image, size, resample))


@settings(max_examples=20, deadline=None)
@given(SIDES, SIDES, UNITS, UNITS)
def test_resize_channels_follows_a_pillow_that_always_begins_with_the_horizontal_pass(
    width: int, height: int, columns: int, rows: int
) -> None:
    size = UNIT * columns, UNIT * rows
    assume(width != size[0] and height != size[1])
    image = picture(width, height)
    expected = np.asarray(image.resize((size[0], height)).resize(size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resize, "_orders_passes", lambda: False)
        assert np.array_equal(in_parts(image, size, Image.Resampling.BICUBIC), expected)


@pytest.mark.parametrize(
    ("old", "new", "passes"),
    [
        ((4032, 3024), (4032, 3008), ["vertical"]),
        ((3000, 4000), (3008, 4000), ["horizontal"]),
        ((64, 96), (64, 96), ["horizontal"]),
        ((8000, 6000), (4704, 3552), ["horizontal", "vertical"]),
    ],
)
def test_passes_of_a_size_leave_out_what_does_not_change(
    old: Any, new: Any, passes: list[str]
) -> None:
    assert resize._passes(old, new) == passes


@pytest.mark.parametrize("threads", [4, 12])
@pytest.mark.parametrize("length", [1, 32, 33, 4032])
def test_spans_cover_a_side_once_in_whole_units(
    length: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resize, "_num_threads", lambda: threads)
    spans = resize._spans(length, UNIT)
    assert [pixel for start, stop in spans for pixel in range(start, stop)] == list(range(length))
    assert not any(start % UNIT for start, _ in spans)
    assert len(spans) <= max(1, threads)


FAULTS = ["neighbour's strip", "channels swapped", "band of another height"]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_of_a_part_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image, size, crop, channels = picture(300, 280), (256, 288), resize._crop, resize._channels

    def wrong(plane: Image.Image, box: tuple[int, int, int, int]) -> Image.Image:
        left, top, right, bottom = box
        if fault == "neighbour's strip" and left:
            return crop(plane, (left - UNIT, top, right - UNIT, bottom))
        if fault == "band of another height" and bottom < plane.height:
            return crop(plane, (left, top, right, bottom + 1))
        return crop(plane, box)

    expected = whole(image, size, Image.Resampling.BICUBIC)
    assert np.array_equal(in_parts(image, size, Image.Resampling.BICUBIC), expected)
    monkeypatch.setattr(resize, "_crop", wrong)
    if fault == "channels swapped":
        monkeypatch.setattr(resize, "_channels", lambda image: reversed(list(channels(image))))
    assert not np.array_equal(in_parts(image, size, Image.Resampling.BICUBIC), expected)


def test_failed_part_is_raised() -> None:
    def emit(*_: object) -> None:
        raise MemoryError("no room for a part")

    with pytest.raises(MemoryError, match="no room"):
        resize.resize_channels(picture(300, 280), (256, 288), Image.Resampling.BICUBIC, UNIT, emit)


@pytest.mark.parametrize("cores", [1, 3])
def test_resize_channels_on_few_cores_keeps_channels_whole(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resize, "_num_threads", lambda: cores)
    parts: list[tuple[int, ...]] = []

    def emit(channel: int, part: NDArray[np.uint8], top: int, left: int) -> None:
        parts.append((channel, *part.shape, top, left))

    resize.resize_channels(picture(300, 280), (256, 288), Image.Resampling.BICUBIC, UNIT, emit)
    assert sorted(parts) == [(channel, 288, 256, 0, 0) for channel in range(3)]
