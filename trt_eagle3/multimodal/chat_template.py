"""The checkpoint's own chat template, rendered as transformers renders it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.pixel_config import read_json

__all__ = ["ChatTemplate"]

_MARK = re.compile("\ue000([0-9]+)\ue001")


class ChatTemplate:
    """A compiled template; it comes from a checkpoint, so it runs in Jinja's immutable sandbox."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Compile ``source``; ``variables`` are the tokenizer's special tokens (``eos_token`` and so on).

        Raises:
            UserError: the template does not parse.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        self._variables = dict(variables)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"chat template: does not parse ({error}). Copy it from the checkpoint again.") from error

    @classmethod
    def from_directory(cls, directory: Path) -> ChatTemplate:
        """Find the template as transformers does: chat_template.json, then .jinja, then inside tokenizer_config.json.

        Raises:
            UserError: none of them holds one.
        """
        tokenizer_path = directory / "tokenizer_config.json"
        tokenizer = read_json(tokenizer_path) if tokenizer_path.is_file() else {}
        source = _find_source(directory, tokenizer)
        if source is None:
            raise UserError(f"{directory}: no chat_template.json or chat_template.jinja. Copy it from the checkpoint.")
        return cls(source, _special_tokens(tokenizer))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt's text, up to where the assistant begins.

        Raises:
            UserError: the template refuses these messages, or leaves one out.
        """
        self._check_all_said(messages)
        return self._render(messages)

    def _check_all_said(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Templates drop what they do not know: roles, or a system message that is not the first, as Qwen3-VL's."""
        marked = [_marked(message.get("content"), f"\ue000{i}\ue001") for i, message in enumerate(messages)]
        turns = [{**message, "content": content} for message, (content, _) in zip(messages, marked, strict=True)]
        said = Counter(map(int, _MARK.findall(self._render(turns))))
        for i, (_, count) in enumerate(marked):
            if said[i] < count:
                raise UserError(
                    f"messages: the checkpoint's chat template leaves out message {i + 1} (role "
                    f"{messages[i].get('role')!r:.40}). Move its text into a message that it takes."
                )

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self._template.render(
                messages=list(messages), tools=None, documents=None, add_generation_prompt=True, **self._variables
            )
        except Exception as error:  # a template is a program: it may fail in any way
            raise UserError(f"messages: the checkpoint's chat template refuses them ({error}).") from error


def _marked(content: Any, mark: str) -> tuple[Any, int]:
    """``content`` with ``mark`` for each of its texts, and how many there are; a blank one says nothing."""
    if isinstance(content, str):
        return (mark, 1) if content.strip() else (content, 0)
    if not isinstance(content, list):
        return content, 0
    says = [part.get("text", "").strip() != "" for part in content]
    parts = [{**part, "text": mark} if any_text else part for part, any_text in zip(content, says, strict=True)]
    return parts, sum(says)


def _find_source(directory: Path, tokenizer: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.json"
    if path.is_file():
        return _default(read_json(path).get("chat_template"))
    path = directory / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    path = directory / "processor_config.json"
    nested = _default(read_json(path).get("chat_template")) if path.is_file() else None
    return nested or _default(tokenizer.get("chat_template"))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable as UTF-8 ({error}). Copy it from the checkpoint again.") from error


def _default(value: object) -> str | None:
    """A template is a string, or a list of {name, template}, or {name: template}; of several, the one named default."""
    if isinstance(value, list):
        value = {entry["name"]: entry["template"] for entry in value}
    if isinstance(value, Mapping):
        value = value.get("default")
    return value if isinstance(value, str) else None


def _special_tokens(tokenizer: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"):
        value = tokenizer.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what an assistant wrote, for training; when prompting it does nothing."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: object, **options: Any) -> str:
    # Jinja's own filter escapes HTML characters; transformers replaces it.
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), **options)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)
