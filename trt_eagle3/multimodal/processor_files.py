"""Copy and read the files of a checkpoint that a processor reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trt_eagle3.atomic_io import place_file
from trt_eagle3.errors import UserError
from trt_eagle3.io.json_file import read_json_object

__all__ = ["PROCESSOR_FILES", "TEMPLATE_FOLDER", "copy_processor_files", "read_processor_json"]

TEMPLATE_FOLDER = "additional_chat_templates"
PROCESSOR_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    f"{TEMPLATE_FOLDER}/default.jinja",
    f"{TEMPLATE_FOLDER}/tool_use.jinja",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "generation_config.json",
)
"""Files of a checkpoint that a `Processor` may read, and the one with its sampling defaults."""


def copy_processor_files(source: Path, target: Path) -> list[Path]:
    """Copy the files that `Processor.from_directory` reads into a folder.

    The folder is created if missing.

    Returns:
        The files written.
    Raises:
        UserError: the checkpoint has no tokenizer.
    """
    names = [name for name in PROCESSOR_FILES if (Path(source) / name).is_file()]
    if "tokenizer.json" not in names and "vocab.json" not in names:
        raise UserError(
            f"{source}: no tokenizer.json. Copy the tokenizer files into the checkpoint."
        )
    copies = {name: Path(target) / name for name in names}
    for name, copy in copies.items():
        place_file(Path(source) / name, copy, link=False)
    return list(copies.values())


def read_processor_json(path: Path) -> dict[str, Any]:
    """Read one JSON object from a file.

    Raises:
        UserError: the file is not JSON, or not an object (see ``json_file``).
    """
    try:
        return read_json_object(path)
    except OSError as error:
        raise UserError(
            f"{path}: cannot read it: {error.strerror}. Copy it from the checkpoint again."
        ) from error
