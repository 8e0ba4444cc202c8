"""PixelConfig: sizing and normalisation of images or videos, read from the processor files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trt_eagle3.errors import UserError, quote
from trt_eagle3.multimodal.processor_files import read_processor_json
from trt_eagle3.spec import VisionSpec

__all__ = [
    "CLIP_MEAN",
    "CLIP_STD",
    "IMAGE_FILES",
    "SHARED_DEFAULTS",
    "VIDEO_FILES",
    "DetailConfig",
    "PixelConfig",
    "PixelConfigs",
    "area_bounds",
    "channel_values",
    "check_processor_values",
    "find_processor_values",
    "number_above_zero",
    "read_image_config",
    "read_video_config",
    "size_of",
]

IMAGE_FILES = ("preprocessor_config.json",)
VIDEO_FILES = ("video_preprocessor_config.json", "preprocessor_config.json")

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""Per colour channel, as in CLIP's training."""
Sampling = Literal["ends", "steps", "middles"]
Cap = Literal["max_frame_tokens", "max_video_tokens"]
_MOST = 2**31  # upper bound of every number here
_MOST_ENLARGED = 2**26  # bound on the least pixels of an image or video: 65,536 tokens or more
_FILTERS = range(6)  # Pillow's numbers

SHARED_DEFAULTS: Mapping[str, Any] = {
    "temporal_patch_size": 2,
    "merge_size": 2,
    "rescale_factor": 1 / 255,
    "resample": 3,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
}
"""Defaults that transformers' image and video processors share."""
IMAGE_DEFAULTS: Mapping[str, Any] = {
    **SHARED_DEFAULTS,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "patch_size": 14,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}
"""Defaults of transformers' ``Qwen2VLImageProcessor``."""


class DetailConfig(NamedTuple):
    """A second, larger square of an image, from which the first is resized.

    Attributes:
        side: in pixels. patch_size: pixels along a side of its patches.
        resample: Pillow's number of the filter.
        background: colour of its borders.
    """

    side: int
    patch_size: int
    resample: int
    background: tuple[int, ...]


@dataclass(frozen=True)
class PixelConfig:
    """Sizing and normalisation of images or videos.

    Attributes:
        min_pixels, max_pixels: bounds on height * width after resizing; for videos on frames *
            height * width.
        resample: Pillow's number of the filter (3 = bicubic, 2 = bilinear).
        per_frame: the bounds of a video apply to each of its frames.
        tile_side: side in pixels of the tiles that every image is resized to and cut into. Video
            frames have this size too. None: sizes depend on the bounds.
        min_tiles, max_tiles: bounds on the tiles of an image, without its thumbnail.
        background: colour of the borders that complete an image to one square tile
            (``squares.py``). None: tiles are cut from the stretched image.
        min_side: smallest side of an image within its borders.
        detail: a second, larger square of every image; None: there is none.
        fps, min_frames, max_frames: frame sampling; videos only.
        sampling: which frames are sampled. ``ends``: evenly from the first to the last. ``steps``:
            at a fixed step from the first, a whole number of temporal patches. ``middles``: the
            middle frame of equal pieces.
        num_frames: number of frames of every video, whatever its rate.
        first_s, last_s: seconds between which a video file is sampled; None: its ends.
        resized: (height, width) in place of an image's or frame's own, before bounds and rounding.
        max_frame_tokens: cap on the tokens of one frame of a video; None: no cap.
        max_video_tokens: cap on the tokens of a video with ``per_frame``; None: no cap.
        max_total_pixels: the same cap in pixels of frame pairs. It takes precedence.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float
    resample: int
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    max_frame_tokens: int | None = None
    max_video_tokens: int | None = None
    per_frame: bool = False
    tile_side: int | None = None
    min_tiles: int = 1
    max_tiles: int = 1
    background: tuple[int, ...] | None = None
    min_side: int = 1
    detail: DetailConfig | None = None
    sampling: Sampling = "ends"
    num_frames: int | None = None
    first_s: float | None = None
    last_s: float | None = None
    resized: tuple[int, int] | None = None
    max_total_pixels: int | None = None

    @property
    def factor(self) -> int:
        """Pixels per side of a token. Height and width are resized to multiples of it."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True)
class PixelConfigs:
    """The pixel configs of a checkpoint's images and videos."""

    image: PixelConfig
    video: PixelConfig


def read_image_config(directory: Path, vision: VisionSpec) -> PixelConfig:
    """Read ``processor_config.json`` (nested, transformers 5) or ``preprocessor_config.json``.

    Raises:
        UserError: neither file exists, or a value contradicts the vision tower.
    """
    path, found = find_processor_values(directory, "image_processor", IMAGE_FILES)
    values = {**IMAGE_DEFAULTS, **found}
    return _build(path, values, area_bounds(path, values), vision)


def read_video_config(
    directory: Path,
    vision: VisionSpec,
    defaults: Mapping[str, Any],
    cap: Cap,
) -> PixelConfig:
    """Read the video config from the same file as transformers.

    The files are ``processor_config.json`` (nested), ``video_preprocessor_config.json``, and last
    the image file.

    Args:
        defaults: values of keys that the file lacks.
        cap: what ``max_video_tokens`` bounds. ``max_frame_tokens``: one frame of a video whose
            ``size`` bounds the whole video. ``max_video_tokens``: a whole video whose ``size`` (or
            ``min_pixels`` and ``max_pixels``) bounds each frame.
    Raises:
        UserError: no such file exists, or a value contradicts the vision tower.
    """
    path, found = find_processor_values(directory, "video_processor", VIDEO_FILES)
    values = {**defaults, **found}
    of_frames = cap == "max_video_tokens"
    bounds = area_bounds(path, values) if of_frames else size_of(path, values)
    return _build(path, values, bounds, vision, cap)


def area_bounds(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``size``, updated with the keys that older files have in its place."""
    size = size_of(path, values)
    for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if values.get(old) is not None:
            size[new] = values[old]
    return size


def find_processor_values(
    directory: Path, section: str, names: tuple[str, ...]
) -> tuple[Path, dict[str, Any]]:
    """Find a checkpoint's values for images or videos, and the file that holds them.

    Raises:
        UserError: no such file exists.
    """
    nested = directory / "processor_config.json"
    if nested.exists():
        value = read_processor_json(nested).get(section)
        if isinstance(value, dict):
            return nested, value
    for name in names:
        if (directory / name).exists():
            return directory / name, read_processor_json(directory / name)
    raise UserError(
        f"{directory}: no {names[0]} and no processor_config.json with {section!r}. Copy them from "
        "the checkpoint."
    )


def size_of(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``size`` after checking that it is an object."""
    size = values["size"] or {}
    if not isinstance(size, dict):
        raise UserError(
            f"{path}: size: expected shortest_edge and longest_edge, got {quote(size, 80)}. Copy "
            "the file again."
        )
    return dict(size)


def number_above_zero(path: Path, name: str, value: Any) -> float:
    """Check that ``value`` is a number above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST:
        raise UserError(
            f"{path}: {name}: expected a number above 0, got {quote(value, 80)}. Copy the file "
            "again."
        )
    return value


def channel_values(path: Path, name: str, values: Any, channels: int) -> tuple[float, ...]:
    """Check that ``values`` holds one number per colour channel."""
    numbers = isinstance(values, list | tuple) and all(
        isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < _MOST for v in values
    )
    if not numbers or len(values) != channels or (name == "image_std" and 0 in values):
        raise UserError(
            f"{path}: {name}: expected {channels} numbers, got {quote(values, 80)}. Copy "
            "the file again."
        )
    return tuple(values)


def check_processor_values(
    path: Path, values: Mapping[str, Any], geometry: Mapping[str, int]
) -> None:
    """Check that the file matches the processing that the tower needs.

    Args:
        geometry: keys that must have the values of config.json.
    Raises:
        UserError: a key has another value, or Pillow lacks the filter.
    """
    for flag in ("do_resize", "do_rescale", "do_normalize"):
        if values[flag] is not True:
            raise UserError(
                f"{path}: {flag}: expected true, got {quote(values[flag], 80)}. The vision tower "
                "needs it: set it to true."
            )
    for name, wanted in geometry.items():
        if values[name] != wanted:
            raise UserError(
                f"{path}: {name}: expected {wanted} as in config.json, got "
                f"{quote(values[name], 80)}. The processor files belong to another checkpoint: "
                "copy this checkpoint's own."
            )
    if values["resample"] not in _FILTERS or isinstance(values["resample"], bool):
        raise UserError(
            f"{path}: resample: expected 0 to 5, got {quote(values['resample'], 80)}. Copy the "
            "file again."
        )


def _build(
    path: Path,
    values: Mapping[str, Any],
    size: Mapping[str, Any],
    vision: VisionSpec,
    cap: Cap = "max_frame_tokens",
) -> PixelConfig:
    for edge in ("shortest_edge", "longest_edge"):
        if not size.get(edge):
            raise UserError(
                f"{path}: size: expected shortest_edge and longest_edge, got {quote(size, 80)}. "
                f"Add {edge}."
            )
    geometry = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }
    check_processor_values(path, values, geometry)

    def number(name: str, default: float) -> float:
        return number_above_zero(path, name, values.get(name) or default)

    least = int(number_above_zero(path, "size.shortest_edge", size["shortest_edge"]))
    if least > _MOST_ENLARGED:
        raise UserError(
            f"{path}: size.shortest_edge: expected at most {_MOST_ENLARGED} pixels, got {least}: "
            "every image would be enlarged to them. Copy the file again."
        )
    per_frame = cap == "max_video_tokens"
    capped = int(number("max_video_tokens", 768)) if values.get("cap_pixels_per_frame") else None
    return PixelConfig(
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
        min_pixels=least,
        max_pixels=int(number_above_zero(path, "size.longest_edge", size["longest_edge"])),
        mean=channel_values(path, "image_mean", values["image_mean"], vision.in_channels),
        std=channel_values(path, "image_std", values["image_std"], vision.in_channels),
        rescale_factor=float(number_above_zero(path, "rescale_factor", values["rescale_factor"])),
        resample=int(values["resample"]),
        fps=float(number("fps", 2.0)),
        min_frames=int(number("min_frames", 4)),
        max_frames=int(number("max_frames", 768)),
        max_frame_tokens=None if per_frame else capped,
        max_video_tokens=capped if per_frame else None,
        per_frame=per_frame,
    )
