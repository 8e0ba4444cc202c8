"""An image from wherever the user has it: a path, encoded bytes, a data URI, or a Pillow image."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from trt_eagle3.errors import UserError

__all__ = ["ImageSource", "check_pixels", "describe", "load_image"]

ImageSource = str | Path | bytes | Image.Image
"""A path, encoded image bytes, a ``data:image/...;base64,`` URI, or a Pillow image. Never a remote URL."""


def load_image(source: ImageSource, name: str | None = None) -> Image.Image:
    """Decode to RGB as transformers does: transparency is composited onto white.

    Files, bytes and data URIs are turned upright by their EXIF tag; a Pillow image is taken as it is (transformers
    does the same). Of an animation, the first frame.

    Args:
        name: what to call the image in errors; by default its path or size.
    Returns:
        A fully decoded RGB image.
    Raises:
        UserError: a remote URL, a missing file, no image, a truncated one, or more than Pillow's MAX_IMAGE_PIXELS.
    """
    name = name or describe(source)
    if isinstance(source, Image.Image):
        check_pixels(name, source.width, source.height)
        return _decode(name, source, upright=False)
    data = _read_bytes(source, name)
    with _open(name, data) as image:
        check_pixels(name, image.width, image.height)
        return _decode(name, image, upright=True)


def describe(source: object) -> str:
    """A short name of an image source for messages."""
    if isinstance(source, Image.Image):
        return f"image ({source.width}x{source.height} pixels)"
    if isinstance(source, bytes):
        return f"image ({len(source)} bytes)"
    if not isinstance(source, str | Path):
        return "image"
    text = str(source)
    if text.startswith("data:"):
        return f"image {text[:40]}..."
    return f"image {text if len(text) <= 200 else '...' + text[-100:]}"


def _read_bytes(source: str | Path | bytes, name: str) -> io.BytesIO:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    if not isinstance(source, str | Path):
        raise UserError(f"{name}: expected a path, bytes, a data URI or a Pillow image, got {type(source).__name__}.")
    if isinstance(source, str) and source.startswith("data:"):
        return io.BytesIO(_decode_data_uri(source, name))
    if isinstance(source, str) and source.startswith(("http://", "https://", "ftp://", "s3://", "gs://")):
        raise UserError(f"{name}: remote images are not fetched. Download it and give the path.")
    path = Path(source.removeprefix("file://") if isinstance(source, str) else source)
    try:
        return io.BytesIO(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{name}: no such file. Check the path.") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{name}: not readable ({reason}). Check the path and its permissions.") from error


def _decode_data_uri(uri: str, name: str) -> bytes:
    header, comma, payload = uri.partition(",")
    if not comma or not header.endswith(";base64"):
        raise UserError(f"{name}: expected data:image/<type>;base64,<data>. Encode the image as base64.")
    try:
        return base64.b64decode("".join(payload.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"{name}: the data URI's base64 is broken ({error}). Encode the image again.") from error


def check_pixels(name: str, width: int, height: int) -> None:
    """Refuse a picture or frame before it is decoded into too much memory.

    Raises:
        UserError: more pixels than Pillow's MAX_IMAGE_PIXELS, or none.
    """
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and width * height > limit:
        raise UserError(f"{name}: {width}x{height} pixels, the limit is {limit} in all. Scale it down first.")
    if width == 0 or height == 0:
        raise UserError(f"{name}: {width}x{height} pixels, so there is nothing to see. Give another one.")


def _open(name: str, data: io.BytesIO) -> Image.Image:
    try:
        with warnings.catch_warnings():
            # Pillow warns over its limit and raises over twice its limit; check_pixels refuses the former
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(data)
    except Image.DecompressionBombError as error:
        raise UserError(f"{name}: too many pixels ({error}). Scale it down first.") from error
    except UnidentifiedImageError as error:
        raise UserError(f"{name}: not an image that Pillow can read. Give a PNG, JPEG, WebP or similar.") from error
    except Exception as error:  # Pillow's format readers raise whatever the broken bytes lead them to
        raise _broken(name, error) from error


def _decode(name: str, image: Image.Image, upright: bool) -> Image.Image:
    try:
        image.load()
        if upright:
            image = ImageOps.exif_transpose(image)
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            layer = image.convert("RGBA")
            white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
            return Image.alpha_composite(white, layer).convert("RGB")
        return image.convert("RGB")
    except Exception as error:  # as above
        raise _broken(name, error) from error


def _broken(name: str, error: Exception) -> UserError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return UserError(f"{name}: broken image data ({reason}). Save or download the image again.")
