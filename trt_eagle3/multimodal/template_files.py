"""Find a checkpoint's chat template, with the precedence of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_eagle3.errors import UserError, clip, quote
from trt_eagle3.io.bounded_read import read_text_bounded
from trt_eagle3.multimodal.processor_files import TEMPLATE_FOLDER, read_processor_json

__all__ = ["MAX_SOURCE_LEN", "TemplateSources", "find_templates"]

MAX_SOURCE_LEN = 1 << 20
"""Maximum characters of a template; the longest in use have 20,000."""
_PROCESSOR, _TOKENIZER = "processor_config.json", "tokenizer_config.json"
_LEGACY, _FILE = "chat_template.json", "chat_template.jinja"


@dataclass(frozen=True)
class TemplateSources:
    """The default template, and the one for requests with tools if it differs."""

    default: str
    tool_use: str | None = None


def find_templates(directory: Path, *, processor: bool) -> TemplateSources:
    """Read the template that transformers' ``AutoProcessor`` or ``AutoTokenizer`` uses.

    A processor uses the first of ``processor_config.json``, ``chat_template.json``,
    ``chat_template.jinja`` with ``additional_chat_templates/``, ``tokenizer_config.json``. A
    tokenizer uses the first of the last two. Places that transformers does not read come last.

    Args:
        processor: whether the checkpoint has a processor, that is, accepts images or videos.
    Raises:
        UserError: no place holds a template, the first place lacks a default template, or
            transformers rejects the combination.
    """
    tokenizer = _named(directory / _TOKENIZER)
    extra = {file.stem: file for file in sorted((directory / TEMPLATE_FOLDER).glob("*.jinja"))}
    path = directory / _FILE
    file = {"default": path} if path.exists() else {}
    # if there are two defaults, a tokenizer uses the folder's and a processor the file's
    if not processor and (found := file | extra or tokenizer):
        return TemplateSources(_default(found, directory), _text(found.get("tool_use")))
    legacy = _legacy(directory, extra)
    found = _named(directory / _PROCESSOR) or legacy or extra | file or tokenizer
    return TemplateSources(_default(found, directory))


Templates = Mapping[str, Path | str]
"""Name -> text, or the file that holds it."""


def _legacy(directory: Path, extra: Templates) -> Templates:
    found = _named(directory / _LEGACY)
    if found and extra:
        raise UserError(
            f"{directory}: {_LEGACY} beside {TEMPLATE_FOLDER}/: transformers rejects the two. "
            f"Keep {TEMPLATE_FOLDER}/, with the default template in {_FILE}."
        )
    return found


def _named(path: Path) -> Templates:
    """Read the templates under ``chat_template`` of a JSON file.

    The value is a text, {name: text}, or a list of {name, template}.
    """
    value: Any = read_processor_json(path).get("chat_template") if path.exists() else None
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    pairs = list(value.items()) if isinstance(value, dict) else _pairs(value)
    if not pairs or not all(isinstance(part, str) for pair in pairs for part in pair):
        raise UserError(
            f"{path}: chat_template: expected a text, or a list of {{name, template}}, got "
            f"{quote(value, 80)}. Copy the file again."
        )
    return dict(pairs)


def _pairs(value: object) -> list[tuple[Any, Any]]:
    entries = value if isinstance(value, list) else [value]
    return [
        (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        for entry in entries
    ]


def _default(found: Templates, directory: Path) -> str:
    if not found:
        raise UserError(
            f"{directory}: no chat_template.json or chat_template.jinja. Copy it from the "
            "checkpoint."
        )
    text = _text(found.get("default"))
    if text is None:
        raise UserError(
            f"{directory}: chat templates {clip(', '.join(found), 80)}, none called default. "
            f"Save the default one as {_FILE}."
        )
    return text


def _text(source: Path | str | None) -> str | None:
    if not isinstance(source, Path):
        return source
    try:
        return read_text_bounded(source, 4 * MAX_SOURCE_LEN)
    except OSError as error:
        raise UserError(
            f"{source}: cannot read it: {error.strerror}. Copy it from the checkpoint again."
        ) from error
