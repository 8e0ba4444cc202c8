"""Load an image from a path, bytes, a data URI, an allowed URL, a Pillow image or an array."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.caller import NO_CALLER, Caller
from trt_eagle3.multimodal.fetch import read_media
from trt_eagle3.multimodal.policy import LOCAL_MEDIA, MediaPolicy

__all__ = ["ImageSource", "check_pixels", "describe", "load_image", "read_image"]

_JPEG_START, _JPEG_SCAN = b"\xff\xd8", b"\xff\xda"
# stuffed bytes and markers that have no segment
_JPEG_BARE = frozenset({0x00, 0x01, *range(0xD0, 0xDA)})

_HEAD = 512  # bytes read to detect the format of a file
_BRANDS = {
    b"avif": "an AVIF image",
    b"avis": "an AVIF image",
    b"heic": "a HEIC image",
    b"heix": "a HEIC image",
    b"heif": "a HEIF image",
    b"mif1": "a HEIF image",
    b"msf1": "a HEIF image",
}
_MAGICS = {
    b"%PDF": "a PDF document",
    b"\x89PNG": "a broken PNG image",
    b"\xff\xd8": "a JPEG image",
    b"GIF8": "a GIF image",
    b"BM": "a BMP image",
    b"II*\0": "a TIFF image",
    b"MM\0*": "a TIFF image",
    b"8BPS": "a Photoshop image",
    b"\0\0\x01\0": "an ICO image",
    b"\xff\x0a": "a JPEG XL image",
    b"\0\0\0\x0cJXL ": "a JPEG XL image",
    b"\0\0\0\x0cjP  ": "a JPEG 2000 image",
    b"\x1aE\xdf\xa3": "a video (Matroska or WebM)",
    b"PK\x03\x04": "a ZIP archive or Office document",
    b"\x1f\x8b": "a gzip archive",
}

ImageSource = str | Path | bytes | Image.Image | NDArray[np.uint8]
"""A path, encoded image bytes, a ``data:image/...;base64,`` URI, a URL of an allowed host, a
Pillow image, or a NumPy array: uint8 [height, width, 3], RGB.
"""


def load_image(
    source: ImageSource, name: str | None = None, policy: MediaPolicy = LOCAL_MEDIA
) -> Image.Image:
    """Decode to RGB as transformers' processors do, with transparency composited onto white.

    Files, bytes and data URIs are rotated by their EXIF orientation. As in transformers, a Pillow
    image is not rotated. An animation yields its first frame.

    Args:
        name: name of the image in errors; by default its path or size.
        policy: the permitted sources, formats and sizes.
    Returns:
        A fully decoded RGB image.
    Raises:
        UserError: the policy excludes the source, format or size; or the file is missing, is not
            an image, or is truncated.
    """
    name = name or describe(source)
    if isinstance(source, np.ndarray):
        source = _from_array(name, source)
    if isinstance(source, Image.Image):
        check_pixels(name, source.width, source.height, policy)
        return _decode(name, source, upright=False)
    data = read_image(source, name, policy)
    _check_scans(name, data, policy)
    with _open(name, io.BytesIO(data), policy) as image:
        check_pixels(name, image.width, image.height, policy)
        return _decode(name, image, upright=True)


def _from_array(name: str, array: NDArray[np.uint8]) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise UserError(
            f"{name}: expected an array of uint8 [height, width, 3], got {array.dtype} "
            f"{list(array.shape)}. Convert it first."
        )
    if 0 in array.shape:
        raise UserError(f"{name}: no pixels, expected at least 1x1. Give another image.")
    return Image.fromarray(np.ascontiguousarray(array))


def read_image(source: object, name: str, policy: MediaPolicy, caller: Caller = NO_CALLER) -> bytes:
    """Read the encoded bytes of an image that is neither a Pillow image nor an array.

    Raises:
        UserError: the source is not one of an image, is excluded by the policy, or is unreadable.
        RequestCancelledError: ``caller`` was cancelled meanwhile.
    """
    if not isinstance(source, str | Path | bytes):
        raise UserError(
            f"{name}: expected a path, bytes, a data URI, a Pillow image or a NumPy array, "
            f"got {type(source).__name__}."
        )
    return read_media(source, name, policy, caller)


def describe(source: object) -> str:
    """Return a short name of an image source for messages."""
    if isinstance(source, Image.Image):
        return f"image ({source.width}x{source.height} pixels)"
    if isinstance(source, np.ndarray):
        return "image (array)"
    if isinstance(source, bytes):
        return f"image ({len(source)} bytes)"
    if not isinstance(source, str | Path):
        return "image"
    text = r"\n".join(str(source).splitlines())
    if text.startswith("data:"):
        return f"image {text[:40]}..."
    return f"image {text if len(text) <= 200 else '...' + text[-100:]}"


def check_pixels(name: str, width: int, height: int, policy: MediaPolicy = LOCAL_MEDIA) -> None:
    """Check the size of an image or frame before it is decoded.

    Raises:
        UserError: it has more pixels than the policy or Pillow's MAX_IMAGE_PIXELS allows, or none.
    """
    limit = min(
        (limit for limit in (policy.max_pixels, Image.MAX_IMAGE_PIXELS) if limit is not None),
        default=None,
    )
    if limit is not None and width * height > limit:
        raise UserError(
            f"{name}: {width}x{height} pixels, the limit is {limit} in all. Scale it down first."
        )
    if width == 0 or height == 0:
        raise UserError(
            f"{name}: {width}x{height} pixels, expected at least 1x1. Give another image."
        )


def _check_scans(name: str, data: bytes, policy: MediaPolicy) -> None:
    """Check the number of a JPEG's scans.

    A file of 300 KB can hold 1,500 scans, and each scan decodes every pixel.
    """
    limit = policy.max_jpeg_scans
    if limit is None or not data.startswith(_JPEG_START) or data.count(_JPEG_SCAN) <= limit:
        return
    if (count := _count_scans(data)) > limit:
        raise UserError(
            f"{name}: a JPEG of {count} scans, the limit is {limit}. Save it again as a baseline "
            "JPEG."
        )


def _count_scans(data: bytes) -> int:
    """Count scans outside of segments. Bytes of a segment such as EXIF may look like a scan."""
    count, at = 0, len(_JPEG_START)
    while 0 <= at < len(data) - 3:
        marker, size = data[at + 1], int.from_bytes(data[at + 2 : at + 4])
        if data[at] != 0xFF or marker in _JPEG_BARE or marker == 0xFF:
            at = data.find(b"\xff", at + 1)  # skip coded pixels to the next marker
            continue
        count += marker == _JPEG_SCAN[1]
        at += 2 + size
    return count


def _open(name: str, data: io.BytesIO, policy: MediaPolicy) -> Image.Image:
    try:
        with warnings.catch_warnings():
            # Pillow warns over its limit and raises over twice its limit. check_pixels checks the
            # limit itself.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(data, formats=policy.formats)
    except Image.DecompressionBombError as error:
        raise UserError(f"{name}: too many pixels ({error}). Scale it down first.") from error
    except UnidentifiedImageError as error:
        kinds = ", ".join(policy.formats) if policy.formats else "PNG, JPEG, WebP and similar"
        found = _detected(data.getvalue()[:_HEAD])
        raise UserError(f"{name}: {found}. Supported: {kinds}") from error
    except Exception as error:
        # Pillow's format readers raise many kinds of error for broken bytes
        raise _broken(name, error) from error


def _detected(head: bytes) -> str:
    """Describe the format that the first bytes of a file indicate."""
    if head[4:8] == b"ftyp":
        return _BRANDS.get(head[8:12], "a video (MP4 or similar)")
    found = next((kind for magic, kind in _MAGICS.items() if head.startswith(magic)), None)
    if found:
        return found
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<svg", b"<?xml")):
        return "an SVG or XML text"
    if text.startswith((b"<!doctype html", b"<html")):
        return "an HTML page"
    return "an empty file" if not head else "unknown image format"


def _decode(name: str, image: Image.Image, upright: bool) -> Image.Image:
    try:
        image.load()
        if upright:
            ImageOps.exif_transpose(image, in_place=True)
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            layer = image.convert("RGBA")
            white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
            return Image.alpha_composite(white, layer).convert("RGB")
        return image if image.mode == "RGB" else image.convert("RGB")
    except Exception as error:  # as in _open
        raise _broken(name, error) from error


def _broken(name: str, error: Exception) -> UserError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return UserError(f"{name}: broken image data ({reason}). Save or download the image again.")
