"""An image from wherever the user has it: a path, encoded bytes, a data URI, or a Pillow image."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.fetch import read_media
from trt_eagle3.multimodal.policy import LOCAL_MEDIA, MediaPolicy

__all__ = ["ImageSource", "check_pixels", "describe", "load_image"]

ImageSource = str | Path | bytes | Image.Image
"""A path, encoded image bytes, a ``data:image/...;base64,`` URI, an URL of an allowed host, or a Pillow image."""


def load_image(source: ImageSource, name: str | None = None, policy: MediaPolicy = LOCAL_MEDIA) -> Image.Image:
    """Decode to RGB as transformers' processors do: transparency is composited onto white.

    Files, bytes and data URIs are turned upright by their EXIF tag; a Pillow image is taken as it is (transformers
    does the same). Of an animation, the first frame.

    Args:
        name: what to call the image in errors; by default its path or size.
        policy: which sources, formats and sizes are taken.
    Returns:
        A fully decoded RGB image.
    Raises:
        UserError: a source, format or size that the policy excludes, a missing file, no image, or a truncated one.
    """
    name = name or describe(source)
    if isinstance(source, Image.Image):
        check_pixels(name, source.width, source.height, policy)
        return _decode(name, source, upright=False)
    if not isinstance(source, str | Path | bytes):
        raise UserError(f"{name}: expected a path, bytes, a data URI or a Pillow image, got {type(source).__name__}.")
    with _open(name, io.BytesIO(read_media(source, name, policy)), policy) as image:
        check_pixels(name, image.width, image.height, policy)
        return _decode(name, image, upright=True)


def describe(source: object) -> str:
    """A short name of an image source for messages."""
    if isinstance(source, Image.Image):
        return f"image ({source.width}x{source.height} pixels)"
    if isinstance(source, bytes):
        return f"image ({len(source)} bytes)"
    if not isinstance(source, str | Path):
        return "image"
    text = r"\n".join(str(source).splitlines())
    if text.startswith("data:"):
        return f"image {text[:40]}..."
    return f"image {text if len(text) <= 200 else '...' + text[-100:]}"


def check_pixels(name: str, width: int, height: int, policy: MediaPolicy = LOCAL_MEDIA) -> None:
    """Refuse a picture or frame before it is decoded into too much memory.

    Raises:
        UserError: more pixels than the policy or Pillow's MAX_IMAGE_PIXELS allows, or none.
    """
    limit = min((limit for limit in (policy.max_pixels, Image.MAX_IMAGE_PIXELS) if limit is not None), default=None)
    if limit is not None and width * height > limit:
        raise UserError(f"{name}: {width}x{height} pixels, the limit is {limit} in all. Scale it down first.")
    if width == 0 or height == 0:
        raise UserError(f"{name}: {width}x{height} pixels, so there is nothing to see. Give another one.")


def _open(name: str, data: io.BytesIO, policy: MediaPolicy) -> Image.Image:
    try:
        with warnings.catch_warnings():
            # Pillow warns over its limit and raises over twice its limit; check_pixels refuses the former
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(data, formats=policy.formats)
    except Image.DecompressionBombError as error:
        raise UserError(f"{name}: too many pixels ({error}). Scale it down first.") from error
    except UnidentifiedImageError as error:
        kinds = ", ".join(policy.formats) if policy.formats else "PNG, JPEG, WebP or similar"
        raise UserError(f"{name}: not an image that is read here. Give a {kinds}.") from error
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
