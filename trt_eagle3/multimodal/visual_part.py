"""VisualPart: an image or video in a message, in every spelling that clients use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_eagle3.multimodal.fetch import REMOTE, is_frame_list, scheme
from trt_eagle3.multimodal.media_options import PIXEL_KEYS, MediaOptions
from trt_eagle3.multimodal.prompt_rules import MediaKind
from trt_eagle3.multimodal.video import Video

__all__ = [
    "PROCESSOR_OPTIONS",
    "VisualPart",
    "ignored_keys",
    "read_visual",
    "with_processor_options",
]

_KINDS: Mapping[str, MediaKind] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
}
_SOURCES: Mapping[MediaKind, tuple[str, ...]] = {
    "image": ("image", "image_url", "url", "path", "base64"),
    "video": ("video", "video_url", "url", "path"),
}
_UNTYPED = ("image_url", "video_url", "image", "video")  # keys that name an untyped part's kind
_OF_FILES = frozenset({"fps", "nframes", "min_frames", "max_frames", "video_start", "video_end"})
_OF_LISTS = frozenset({"sample_fps", "timestamps"})
PROCESSOR_OPTIONS: Mapping[str, str] = {
    "min_pixels": "min_pixels",
    "max_pixels": "max_pixels",
    "fps": "fps",
    "num_frames": "nframes",
    "min_frames": "min_frames",
    "max_frames": "max_frames",
}
"""Supported keys of vLLM's ``mm_processor_kwargs`` -> the equivalent key of a part."""
_FULL_DETAIL = ("auto", "high", "original")
"""OpenAI's values of ``detail`` that match the default behaviour."""
_TEXT_KEYS = frozenset({"type", "text", "refusal", "annotations", "logprobs"})
"""Known keys of a text part. Answers that clients send back contain the last two."""


@dataclass(frozen=True)
class VisualPart:
    """An image or video of a message.

    Attributes:
        given: values of the supported keys.
        ignored: paths of the other keys: ``uuid``, ``image_url.uuid``.
    """

    kind: MediaKind
    source: Any
    given: Mapping[str, Any]
    ignored: tuple[str, ...]

    def options(self, where: str) -> MediaOptions:
        """Convert ``given`` to options; ``where``: the part's path in errors.

        Raises:
            UserError: as for `MediaOptions.read`.
        """
        return MediaOptions.read(self.given, where)


def read_visual(part: Mapping[Any, Any], *, tiled: bool) -> VisualPart | None:
    """Read ``part`` as an image or video; None if it is neither.

    An image's source is under ``image``, ``image_url``, ``url``, ``path`` or ``base64``, a video's
    under ``video``, ``video_url``, ``url`` or ``path``. It may be ``{"url": source}``. Other keys
    may be beside the source or inside that object.

    Args:
        tiled: the target cuts images into tiles of one size, so pixel keys have no effect.
    """
    kind = _kind(part)
    if kind is None:
        return None
    beside = {str(name): value for name, value in part.items() if value is not None}
    beside.pop("type", None)
    place = next((name for name in _SOURCES[kind] if name in beside), None)
    source = beside.pop(place) if place else None
    inside: dict[str, Any] = {}
    if isinstance(source, Mapping):
        inside = {str(name): value for name, value in source.items() if value is not None}
        source = inside.pop("url", None)
    if source is None:
        return None
    if place == "base64" and isinstance(source, str):
        source = f"data:;base64,{source}"
    values = {**beside, **inside}
    frames = source.frames if isinstance(source, Video) else source
    known = _honoured(kind, frames, values, tiled=tiled)
    ignored = [name for name in beside if name not in known]
    ignored += [f"{place}.{name}" for name in inside if name not in known]
    given = {name: values[name] for name in values.keys() & known - {"detail"}}
    return VisualPart(kind, source, given, tuple(ignored))


def ignored_keys(
    messages: Sequence[Any], *, where: str = "messages", tiled: bool
) -> tuple[str, ...]:
    """Return the paths of unsupported keys in parts, such as ``messages[0].content[1].uuid``.

    ``where``: path of the list of messages. Unknown parts are skipped.
    """
    found: list[str] = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            continue
        for field in ("content", "output"):  # items of /v1/responses have "output"
            parts = message.get(field)
            if isinstance(parts, list | tuple):
                for j, part in enumerate(parts):
                    names = _ignored(part, tiled=tiled)
                    found += [f"{where}[{i}].{field}[{j}].{name}" for name in names]
    return tuple(found)


def with_processor_options(
    messages: Sequence[Any], options: Mapping[str, Any], *, tiled: bool
) -> list[Any]:
    """Add vLLM's ``mm_processor_kwargs`` to the images and videos of ``messages``.

    Keys of a part take precedence. Names outside `PROCESSOR_OPTIONS` and nulls are skipped.
    """
    given = {
        PROCESSOR_OPTIONS[name]: value
        for name, value in options.items()
        if name in PROCESSOR_OPTIONS and value is not None
    }
    if not given:
        return list(messages)
    found = []
    for message in messages:
        parts = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(parts, list | tuple):
            changed = [_with_options(part, given, tiled=tiled) for part in parts]
            message = {**message, "content": changed}
        found.append(message)
    return found


def _with_options(part: Any, options: Mapping[str, Any], *, tiled: bool) -> Any:
    visual = read_visual(part, tiled=tiled) if isinstance(part, Mapping) else None
    if visual is None:
        return part
    names = _honoured(visual.kind, visual.source, visual.given, tiled=tiled)
    if not names >= _OF_FILES:
        names -= {"fps"}  # of a list it is the frame rate, not a sampling rate
    if visual.given.keys() & {"fps", "nframes"}:
        names -= {"fps", "nframes"}  # they conflict
    added = {name: options[name] for name in options.keys() & names - visual.given.keys()}
    return {**part, **added}


def _ignored(part: Any, *, tiled: bool) -> Sequence[str]:
    if not isinstance(part, Mapping):
        return ()
    visual = read_visual(part, tiled=tiled)
    if visual is not None:
        return visual.ignored
    if not isinstance(part.get("text", part.get("refusal")), str):
        return ()
    return [str(name) for name in part if name not in _TEXT_KEYS and part[name] is not None]


def _kind(part: Mapping[Any, Any]) -> MediaKind | None:
    named = part.get("type")
    if named is None:
        named = next((name for name in _UNTYPED if name in part), None)
    return _KINDS.get(named) if isinstance(named, str) else None


def _honoured(
    kind: MediaKind, source: Any, values: Mapping[str, Any], *, tiled: bool
) -> frozenset[str]:
    pixels = frozenset[str]() if tiled else PIXEL_KEYS
    if kind == "image":
        full = values.get("detail") in _FULL_DETAIL
        return pixels | {"detail"} if full else pixels
    if not tiled:
        pixels |= {"total_pixels"}
    if _is_file(source):
        return pixels | _OF_FILES
    if isinstance(source, str | Path) and not is_frame_list(source):
        return pixels | _OF_FILES | _OF_LISTS  # a local path: a file, or a folder of frames
    # sample_fps and timestamps take precedence over fps
    return pixels | _OF_LISTS if values.keys() & _OF_LISTS else pixels | {"fps"}


def _is_file(source: Any) -> bool:
    if not isinstance(source, str):
        return isinstance(source, bytes)
    return scheme(source) in {"data", *REMOTE} and not is_frame_list(source)
