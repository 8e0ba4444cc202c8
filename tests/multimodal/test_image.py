"""Images from every source, and every way in which a source can be bad."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image as hf_load_image

from tests.multimodal.record_goldens import pattern
from trt_eagle3.errors import UserError
from trt_eagle3.multimodal import load_image

UPSIDE_DOWN = 3
ORIENTATION_TAG = 0x0112


def picture(height: int = 30, width: int = 40) -> Image.Image:
    return Image.fromarray(pattern(1, 1, height, width)[0])


def encode(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_every_source_of_one_image_gives_the_same_pixels(tmp_path: Path) -> None:
    data = encode(picture())
    path = tmp_path / "a picture.png"
    path.write_bytes(data)
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    for source in (path, str(path), f"file://{path}", data, uri, picture()):
        np.testing.assert_array_equal(np.asarray(load_image(source)), np.asarray(picture()))


def image_of_mode(mode: str) -> Image.Image:
    if mode == "P with transparency":
        image = picture().quantize(16)
        image.info["transparency"] = 3
        return image
    if mode == "RGBA":
        alpha = Image.fromarray(pattern(2, 1, 30, 40)[0, :, :, 0])
        image = picture()
        image.putalpha(alpha)
        return image
    return picture().convert(mode)


@pytest.mark.parametrize(
    "mode", ["RGB", "L", "1", "P", "P with transparency", "LA", "RGBA", "CMYK", "YCbCr", "I;16"]
)
def test_mode_converts_as_hf_converts_it(mode: str) -> None:
    image = image_of_mode(mode)
    expected = convert_to_rgb(image, return_numpy=True)
    np.testing.assert_array_equal(np.asarray(load_image(image)), expected)


def test_exif_orientation_of_a_file_is_applied_as_hf_applies_it(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = UPSIDE_DOWN
    path = tmp_path / "phone.png"
    picture().save(path, exif=exif)
    loaded = np.asarray(load_image(path))
    np.testing.assert_array_equal(loaded, np.asarray(hf_load_image(str(path))))
    np.testing.assert_array_equal(loaded, np.asarray(picture())[::-1, ::-1])


def test_first_frame_of_an_animation_is_taken() -> None:
    frames = [Image.fromarray(frame) for frame in pattern(3, 3, 20, 20)]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    expected = Image.open(io.BytesIO(data)).convert("RGB")
    np.testing.assert_array_equal(np.asarray(load_image(data)), np.asarray(expected))


def refusal(source: object) -> str:
    with pytest.raises(UserError) as caught:
        load_image(source)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    message = refusal(tmp_path / "absent.png")
    assert "absent.png" in message
    assert "no such file" in message


def test_text_file_is_refused_as_no_image(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a picture")
    assert "notes.txt: unknown image format. Supported: " in refusal(path)


def test_folder_is_refused_as_unreadable(tmp_path: Path) -> None:
    assert "not readable" in refusal(tmp_path)


def test_truncated_file_is_refused_as_broken(tmp_path: Path) -> None:
    path = tmp_path / "half.png"
    data = encode(picture(200, 200))
    path.write_bytes(data[: len(data) // 2])
    assert "half.png: broken image data" in refusal(path)


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "ICO"]), st.data())
def test_corrupted_file_is_read_or_refused_and_never_crashes(
    kind: str, data: st.DataObject
) -> None:
    broken = bytearray(encode(picture(), kind))
    for _ in range(data.draw(st.integers(1, 6))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    del broken[data.draw(st.integers(1, len(broken))) :]
    message = ""
    try:
        assert load_image(bytes(broken)).mode == "RGB"
    except UserError as error:
        message = str(error)
    assert "\n" not in message


def test_empty_bytes_are_refused_as_no_image() -> None:
    assert "0 bytes" in refusal(b"")


def test_remote_url_is_refused_and_not_fetched() -> None:
    assert "remote images and videos are not fetched" in refusal("https://example.com/cat.png")


def test_data_uri_of_no_image_is_refused() -> None:
    assert "expected data:image" in refusal("data:image/png;base64")
    assert "unknown image format" in refusal("data:image/png,abc")
    assert "base64 is broken" in refusal("data:image/png;base64,a*b")


def test_number_is_refused_as_a_source() -> None:
    assert "got int" in refusal(7)


@pytest.mark.parametrize("limit", [100, 700])
def test_image_beyond_pillows_pixel_limit_is_refused(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 1200 pixels: Pillow itself raises over twice its limit and warns over once its limit; both are
    # refused
    data = encode(picture())
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    assert "Scale it down" in refusal(data)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"%PDF-1.7", "a PDF document"),
        (b"\0\0\0\x1cftypheic\0\0\0\0", "a HEIC image"),
        (b"\0\0\0\x20ftypisom\0\0\0\0", "a video (MP4 or similar)"),
        (b'<?xml version="1.0"?><svg/>', "an SVG or XML text"),
        (b"<!DOCTYPE html><html>", "an HTML page"),
        (b"", "an empty file"),
        (b"hello", "unknown image format"),
    ],
)
def test_what_is_no_image_is_called_by_its_format(data: bytes, kind: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"{kind}. Supported: ")):
        load_image(data)
