"""The checkpoint's own chat template, rendered as transformers renders it, in a process that can
be ended.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trt_eagle3.errors import UserError, quote
from trt_eagle3.io.bounded_read import read_text_bounded
from trt_eagle3.multimodal.processor_files import read_processor_json
from trt_eagle3.multimodal.template_process import render_template

__all__ = ["ChatTemplate"]

_MAX_SOURCE_LEN = 1 << 20  # characters; the longest in use have 20,000

_MARK = re.compile("\ue000([0-9]+)\ue001")


class ChatTemplate:
    """A template; it comes from a checkpoint, so it runs in Jinja's immutable sandbox in a
    bounded process.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Check that ``source`` compiles; ``variables`` are the tokenizer's special tokens
        (``eos_token`` and so on).

        Raises:
            UserError: the template does not parse.
        """
        if len(source) > _MAX_SOURCE_LEN:
            raise UserError(
                f"chat template: {len(source)} characters, expected at most {_MAX_SOURCE_LEN}"
            )
        self._source, self._variables = source, dict(variables)
        render_template(source, [])

    @classmethod
    def from_directory(cls, directory: Path) -> ChatTemplate:
        """Find the template as transformers does: chat_template.json, then .jinja, then inside
        tokenizer_config.json.

        Raises:
            UserError: none of them holds one.
        """
        tokenizer_path = directory / "tokenizer_config.json"
        tokenizer = read_processor_json(tokenizer_path) if tokenizer_path.exists() else {}
        source = _find_source(directory, tokenizer)
        if source is None:
            raise UserError(
                f"{directory}: no chat_template.json or chat_template.jinja. Copy it from the "
                "checkpoint."
            )
        return cls(source, _special_tokens(tokenizer))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt's text, up to where the assistant begins.

        Templates drop what they do not know: roles, or a system message that is not the first, as
        Qwen3-VL's. So it is rendered twice, once with a mark for each text.

        Raises:
            UserError: the template refuses these messages, leaves one out, or takes too much time
                or memory.
        """
        marked = [
            _marked(message.get("content"), f"\ue000{i}\ue001")
            for i, message in enumerate(messages)
        ]
        turns = [
            {**message, "content": content}
            for message, (content, _) in zip(messages, marked, strict=True)
        ]
        with_marks, text = render_template(
            self._source, [self._values(turns), self._values(messages)]
        )
        said = Counter(map(int, _MARK.findall(with_marks)))
        for i, (_, count) in enumerate(marked):
            if said[i] < count:
                raise UserError(
                    f"messages: the checkpoint's chat template leaves out message {i + 1} (role "
                    f"{quote(messages[i].get('role'), 40)}). Move its text into a message that it "
                    "takes."
                )
        return text

    def _values(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        values = {
            "messages": list(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        return {**values, **self._variables}


def _marked(content: Any, mark: str) -> tuple[Any, int]:
    """``content`` with ``mark`` for each of its texts, and how many there are; a blank one says
    nothing.
    """
    if isinstance(content, str):
        return (mark, 1) if content.strip() else (content, 0)
    if not isinstance(content, list):
        return content, 0
    says = [part.get("text", "").strip() != "" for part in content]
    parts = [
        {**part, "text": mark} if any_text else part
        for part, any_text in zip(content, says, strict=True)
    ]
    return parts, sum(says)


def _find_source(directory: Path, tokenizer: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.json"
    if path.exists():
        return _default(read_processor_json(path).get("chat_template"), path)
    path = directory / "chat_template.jinja"
    if path.exists():
        return _read_text(path)
    path = directory / "processor_config.json"
    nested = (
        _default(read_processor_json(path).get("chat_template"), path) if path.exists() else None
    )
    return nested or _default(tokenizer.get("chat_template"), directory / "tokenizer_config.json")


def _read_text(path: Path) -> str:
    try:
        return read_text_bounded(path, 4 * _MAX_SOURCE_LEN)
    except OSError as error:
        raise UserError(
            f"{path}: cannot read it: {error.strerror}. Copy it from the checkpoint again."
        ) from error


def _default(value: object, path: Path) -> str | None:
    """A template is a string, or a list of {name, template}, or {name: template}; of several,
    the one named default.
    """
    if isinstance(value, list):
        if not all(
            isinstance(entry, Mapping) and isinstance(entry.get("name"), str) for entry in value
        ):
            raise UserError(
                f"{path}: chat_template: expected a list of {{name, template}}, got "
                f"{quote(value, 80)}"
            )
        value = {entry["name"]: entry.get("template") for entry in value}
    if isinstance(value, Mapping):
        value = value.get("default")
    if value is not None and not isinstance(value, str):
        raise UserError(
            f"{path}: chat_template: expected a text, got {quote(value, 80)}. Copy the file again."
        )
    return value


def _special_tokens(tokenizer: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in (
        "bos_token",
        "eos_token",
        "pad_token",
        "unk_token",
        "sep_token",
        "cls_token",
        "mask_token",
    ):
        value = tokenizer.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens
