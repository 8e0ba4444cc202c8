"""The keys inside a message part that something reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

__all__ = ["unread_keys"]

_KEYS: Mapping[str, Collection[str]] = {  # by the part's type
    "text": ("type", "text"),
    "refusal": ("type", "refusal"),
    "image": ("type", "image", "url", "path"),
    "image_url": ("type", "image_url"),
    "video": ("type", "video", "path"),
    "video_url": ("type", "video_url"),
}
_NESTED: Mapping[str, Collection[str]] = {  # keys of the object below a part's key
    "image_url": ("url",),
    "video_url": ("url",),
}
_NEUTRAL: Mapping[str, object] = {"detail": "auto"}  # values that clients send and change nothing


def unread_keys(part: Any) -> Iterator[str]:
    """Paths of the keys of a message part that nothing reads, such as ``image_url.detail``.

    Args:
        part: a part of a message's ``content``, as a client sent it. A part that is no object, or
            of an unknown type, has none: it is refused where messages are read.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in _KEYS:
        return
    for name, value in part.items():
        if name not in _KEYS[kind]:
            if _says_anything(name, value):
                yield name
        elif name in _NESTED and isinstance(value, Mapping):
            for inner, said in value.items():
                if inner not in _NESTED[name] and _says_anything(inner, said):
                    yield f"{name}.{inner}"


def _says_anything(name: str, value: Any) -> bool:
    return value is not None and not (name in _NEUTRAL and value == _NEUTRAL[name])
