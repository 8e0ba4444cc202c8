"""PixelConfig: how a checkpoint wants its images or videos sized and normalised, read from its
processor files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_eagle3.errors import UserError, quote
from trt_eagle3.multimodal.processor_files import read_processor_json
from trt_eagle3.multimodal.spec import VisionGeometry

__all__ = ["PixelConfig", "read_image_config", "read_video_config"]

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)
_MOST = 2**31  # pixels, or anything else here
_FILTERS = range(6)  # Pillow's

# The class defaults of transformers' Qwen2VLImageProcessor and Qwen3VLVideoProcessor: a file may
# leave any of them out.
_IMAGE_DEFAULTS: Mapping[str, Any] = {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "patch_size": 14,
    "image_mean": _CLIP_MEAN,
    "image_std": _CLIP_STD,
}
_VIDEO_DEFAULTS: Mapping[str, Any] = {
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
    "patch_size": 16,
    "image_mean": _HALF,
    "image_std": _HALF,
    "fps": 2,
    "min_frames": 4,
    "max_frames": 768,
    "cap_pixels_per_frame": False,
    "max_video_tokens": 768,
}
_SHARED_DEFAULTS: Mapping[str, Any] = {
    "temporal_patch_size": 2,
    "merge_size": 2,
    "rescale_factor": 1 / 255,
    "resample": 3,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
}


@dataclass(frozen=True)
class PixelConfig:
    """Sizing and normalisation of images or videos.

    Attributes:
        min_pixels, max_pixels: bounds on height * width after resizing; for videos on frames *
            height * width.
        resample: Pillow's number of the filter (3 = bicubic, 2 = bilinear).
        fps, min_frames, max_frames: frame sampling; videos only.
        max_frame_tokens: with it, one frame of a video never costs more than so many tokens; None:
            no such cap.
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

    @property
    def factor(self) -> int:
        """Pixels along one side of one token: height and width are resized to multiples of it."""
        return self.patch_size * self.merge_size


def read_image_config(directory: Path, vision: VisionGeometry) -> PixelConfig:
    """From ``processor_config.json`` (nested, transformers 5) or ``preprocessor_config.json``.

    Raises:
        UserError: neither file is there, or what they say contradicts the vision tower.
    """
    path, found = _find(directory, "image_processor", ("preprocessor_config.json",))
    values = {**_SHARED_DEFAULTS, **_IMAGE_DEFAULTS, **found}
    size = _size(path, values)
    for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if values.get(old) is not None:
            size[new] = values[old]
    return _build(path, values, size, vision)


def read_video_config(directory: Path, vision: VisionGeometry) -> PixelConfig:
    """From ``processor_config.json`` (nested), ``video_preprocessor_config.json``, else the image
    file, as HF does.

    Raises:
        UserError: no such file is there, or what they say contradicts the vision tower.
    """
    names = ("video_preprocessor_config.json", "preprocessor_config.json")
    path, found = _find(directory, "video_processor", names)
    values = {**_SHARED_DEFAULTS, **_VIDEO_DEFAULTS, **found}
    return _build(path, values, _size(path, values), vision)


def _find(directory: Path, section: str, names: tuple[str, ...]) -> tuple[Path, dict[str, Any]]:
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


def _size(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    size = values["size"] or {}
    if not isinstance(size, dict):
        raise UserError(
            f"{path}: size: expected shortest_edge and longest_edge, got {quote(size, 80)}. Copy "
            "the file again."
        )
    return dict(size)


def _number(path: Path, name: str, value: Any) -> float:
    """A number above zero that pixels can be counted or scaled by."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST:
        raise UserError(
            f"{path}: {name}: expected a number above 0, got {quote(value, 80)}. Copy the file "
            "again."
        )
    return value


def _channels(path: Path, name: str, values: Any, vision: VisionGeometry) -> tuple[float, ...]:
    """One number per colour channel."""
    numbers = isinstance(values, list | tuple) and all(
        isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < _MOST for v in values
    )
    if not numbers or len(values) != vision.in_channels or (name == "image_std" and 0 in values):
        raise UserError(
            f"{path}: {name}: expected {vision.in_channels} numbers, got {quote(values, 80)}. Copy "
            "the file again."
        )
    return tuple(values)


def _build(
    path: Path, values: Mapping[str, Any], size: Mapping[str, Any], vision: VisionGeometry
) -> PixelConfig:
    for flag in ("do_resize", "do_rescale", "do_normalize"):
        if values[flag] is not True:
            raise UserError(
                f"{path}: {flag}: expected true, got {quote(values[flag], 80)}. Qwen3-VL needs it: "
                "set it to true."
            )
    for edge in ("shortest_edge", "longest_edge"):
        if not size.get(edge):
            raise UserError(
                f"{path}: size: expected shortest_edge and longest_edge, got {quote(size, 80)}. "
                f"Add {edge}."
            )
    for name, wanted in (
        ("patch_size", vision.patch_size),
        ("temporal_patch_size", vision.temporal_patch_size),
        ("merge_size", vision.spatial_merge_size),
    ):
        if values[name] != wanted:
            raise UserError(
                f"{path}: {name}: expected {wanted} as in config.json, got "
                f"{quote(values[name], 80)}. The processor files belong to another checkpoint: "
                "copy this checkpoint's own."
            )
    capped = bool(values.get("cap_pixels_per_frame"))

    def number(name: str, default: float) -> float:
        return _number(path, name, values.get(name) or default)

    if values["resample"] not in _FILTERS or isinstance(values["resample"], bool):
        raise UserError(
            f"{path}: resample: expected 0 to 5, got {quote(values['resample'], 80)}. Copy the "
            "file again."
        )
    return PixelConfig(
        patch_size=values["patch_size"],
        temporal_patch_size=values["temporal_patch_size"],
        merge_size=values["merge_size"],
        min_pixels=int(_number(path, "size.shortest_edge", size["shortest_edge"])),
        max_pixels=int(_number(path, "size.longest_edge", size["longest_edge"])),
        mean=_channels(path, "image_mean", values["image_mean"], vision),
        std=_channels(path, "image_std", values["image_std"], vision),
        rescale_factor=float(_number(path, "rescale_factor", values["rescale_factor"])),
        resample=int(values["resample"]),
        fps=float(number("fps", 2.0)),
        min_frames=int(number("min_frames", 4)),
        max_frames=int(number("max_frames", 768)),
        max_frame_tokens=int(number("max_video_tokens", 768)) if capped else None,
    )
