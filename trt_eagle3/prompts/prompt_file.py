"""Prompt files: a JSON list of ``{"prompt": ..., "images": [...], "frames": [...]}``, paths
relative to the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_eagle3.errors import UserError, quote
from trt_eagle3.io.bounded_read import read_bounded
from trt_eagle3.io.json_file import MAX_JSON_BYTES, parse_json
from trt_eagle3.multimodal import ImageSource, VideoSource

__all__ = ["Question", "read_questions"]


_MISTAKEN = {"image": "images", "video": "frames", "videos": "frames"}


@dataclass(frozen=True)
class Question:
    """What ``LLM.prepare`` and ``LLM.generate`` take."""

    prompt: str
    images: Sequence[ImageSource] = ()
    videos: Sequence[VideoSource] = ()


def read_questions(file: Path) -> list[Question]:
    """Read a prompt file; keys besides the three are for others (``answer``).

    Raises:
        UserError: unreadable, not such a list, or an empty one.
    """
    try:
        entries = parse_json(read_bounded(file, MAX_JSON_BYTES), file)
    except OSError as error:
        raise UserError(f"{file}: cannot read the prompts: {error.strerror}") from error
    if not isinstance(entries, list) or not entries:
        raise UserError(
            f'{file}: expected a JSON list of {{"prompt": ..., "images": [...], "frames": [...]}}'
        )
    return [_question(entry, index, file) for index, entry in enumerate(entries)]


def _question(entry: Any, index: int, file: Path) -> Question:
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise UserError(
            f'{file}: entry {index}: expected {{"prompt": a text, ...}}, got {quote(entry, 80)}'
        )
    for wrong, right in _MISTAKEN.items():
        if wrong in entry:
            raise UserError(f"{file}: entry {index}: {wrong}: no such key; {right} is meant")
    images, frames = (
        _paths(entry.get(key, []), f"{file}: entry {index}: {key}", file)
        for key in ("images", "frames")
    )
    return Question(entry["prompt"], images, [frames] if frames else [])


def _paths(names: Any, where: str, file: Path) -> list[Path]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{where}: expected a list of file names, got {quote(names, 80)}")
    return [file.parent / name for name in names]
