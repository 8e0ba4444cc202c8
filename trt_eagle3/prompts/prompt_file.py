"""Prompt files: ``{"prompt": ..., "images": [...], "frames": [...]}``, in a JSON list or one per
line, with paths relative to the file.
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
    """Input of ``LLM.prepare`` and ``LLM.generate``.

    ``answer``: a good answer, if the file has one; for calibration.
    """

    prompt: str
    images: Sequence[ImageSource] = ()
    videos: Sequence[VideoSource] = ()
    answer: str | None = None


def read_questions(file: Path) -> list[Question]:
    """Read a prompt file; keys other than the three and ``answer`` are ignored.

    Raises:
        UserError: the file is unreadable, has no prompts, or an invalid one; or an image or frame
            of it is missing.
    """
    try:
        data = read_bounded(file, MAX_JSON_BYTES)
    except OSError as error:
        raise UserError(f"{file}: cannot read the prompts: {error.strerror}") from error
    listed = data.lstrip().startswith(b"[")
    entries = parse_json(data, file) if listed else _lines(data, file)
    if not isinstance(entries, list) or not entries:
        raise UserError(
            f'{file}: expected {{"prompt": ..., "images": [...], "frames": [...]}} in a JSON list '
            "or one on each line"
        )
    return [_question(entry, index, file) for index, entry in enumerate(entries)]


def _lines(data: bytes, file: Path) -> list[Any]:
    """Parse a file with one JSON text per line; empty lines are ignored."""
    numbered = [(n, line) for n, line in enumerate(data.split(b"\n"), start=1) if line.strip()]
    return [parse_json(line, f"{file}: line {n}") for n, line in numbered]


def _question(entry: Any, index: int, file: Path) -> Question:
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise UserError(
            f'{file}: entry {index}: expected {{"prompt": a text, ...}}, got {quote(entry, 80)}'
        )
    for wrong, right in _MISTAKEN.items():
        if wrong in entry:
            raise UserError(f"{file}: entry {index}: {wrong}: no such key. Use {right}")
    images, frames = (
        _paths(entry.get(key, []), f"{file}: entry {index}: {key}", file)
        for key in ("images", "frames")
    )
    answer = entry.get("answer")
    text = answer if isinstance(answer, str) else None
    return Question(entry["prompt"], images, [frames] if frames else [], text)


def _paths(names: Any, where: str, file: Path) -> list[Path]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{where}: expected a list of file names, got {quote(names, 80)}")
    paths = [file.parent / name for name in names]
    for path in paths:
        if not path.is_file():
            raise UserError(f"{where}: {path}: no such file. Paths are relative to {file.parent}.")
    return paths
