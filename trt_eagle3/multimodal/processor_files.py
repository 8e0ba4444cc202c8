"""The files of a checkpoint that a processor reads."""

from __future__ import annotations

from pathlib import Path

from trt_eagle3.atomic_io import place_file
from trt_eagle3.errors import UserError

__all__ = ["PROCESSOR_FILES", "copy_processor_files"]

PROCESSOR_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Every file of a checkpoint that a `Processor` may read."""


def copy_processor_files(source: Path, target: Path) -> list[Path]:
    """Copy what `Processor.from_directory` reads from a checkpoint into a folder, which is made if
    missing.

    Returns:
        The files written.
    Raises:
        UserError: the checkpoint holds no tokenizer.
    """
    names = [name for name in PROCESSOR_FILES if (Path(source) / name).is_file()]
    if "tokenizer.json" not in names and "vocab.json" not in names:
        raise UserError(
            f"{source}: no tokenizer.json. Copy the tokenizer files into the checkpoint."
        )
    copies = [Path(target) / name for name in names]
    for copy in copies:
        place_file(Path(source) / copy.name, copy, link=False)
    return copies
