"""Prompts stored in a bundle: questions like those of its future requests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from trt_eagle3.atomic_io import create_file
from trt_eagle3.prompts.bundled import bundled_questions
from trt_eagle3.prompts.prompt_file import Question, read_questions

__all__ = [
    "GENERIC_NOTE",
    "PromptsOrigin",
    "keep_questions",
    "kept_file",
    "origin_of",
    "questions_for",
]

PromptsOrigin = Literal["file", "bundle", "generic"]
"""Where prompts come from: ``--prompts``, the bundle, or this package."""
GENERIC_NOTE = (
    "note: generic prompts were used, because the bundle has none: they say little of your "
    "requests. Better: prompts like yours, with --prompts FILE or prompts: FILE in the build config"
)

_FOLDER = "prompts"
_FILE = "questions.json"


def keep_questions(file: Path, bundle: Path) -> None:
    """Copy a prompt file and its media into the folder of a bundle.

    Raises:
        UserError: the file is invalid, or its media are missing.
    """
    folder = bundle / _FOLDER
    folder.mkdir()
    entries = []
    for number, question in enumerate(read_questions(file)):
        entry: dict[str, object] = {"prompt": question.prompt}
        frames = [frame for video in question.videos for frame in _files(video)]
        for key, media in (("images", question.images), ("frames", frames)):
            if media:
                entry[key] = [
                    _keep(Path(str(source)), folder, f"{number}-{key}-{index}")
                    for index, source in enumerate(media)
                ]
        entries.append(entry)
    create_file(folder / _FILE, json.dumps(entries, indent=2, ensure_ascii=False).encode())


def kept_file(bundle: Path) -> Path | None:
    """Return the prompt file of a bundle; None if it has none."""
    file = bundle / _FOLDER / _FILE
    return file if file.is_file() else None


def origin_of(bundle: Path, file: Path | None) -> PromptsOrigin:
    """Return where ``questions_for`` takes its questions from."""
    if file is not None:
        return "file"
    return "generic" if kept_file(bundle) is None else "bundle"


def questions_for(bundle: Path, file: Path | None, *, vision: bool) -> list[Question]:
    """Return the questions of ``file``, else those stored in ``bundle``, else the bundled ones.

    Raises:
        UserError: the file is invalid.
    """
    given = file or kept_file(bundle)
    return read_questions(given) if given else bundled_questions(vision=vision)


def _files(video: object) -> Sequence[object]:
    return video if isinstance(video, Sequence) and not isinstance(video, str) else [video]


def _keep(source: Path, folder: Path, name: str) -> str:
    kept = f"{name}{source.suffix}"
    shutil.copyfile(source, folder / kept)
    return kept
