"""The checkpoint's own chat template, rendered as transformers renders it, in a process that can
be ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.assistant_message import ReasoningMode
from trt_eagle3.multimodal.processor_files import read_processor_json
from trt_eagle3.multimodal.template_files import MAX_SOURCE_LEN, find_templates
from trt_eagle3.multimodal.template_marks import Marks
from trt_eagle3.multimodal.template_process import render_template

__all__ = ["NO_OPTIONS", "ChatTemplate"]

NO_OPTIONS: Mapping[str, Any] = {}


class ChatTemplate:
    """A template; it comes from a checkpoint, so it runs in Jinja's immutable sandbox in a
    bounded process.
    """

    def __init__(
        self, source: str, variables: Mapping[str, str], with_tools: str | None = None
    ) -> None:
        """Check that ``source`` compiles.

        Args:
            variables: the tokenizer's special tokens (``eos_token`` and so on).
            with_tools: the template of requests with tools, where that is another.
        Raises:
            UserError: a template does not parse.
        """
        self._source, self._variables = source, dict(variables)
        self._with_tools = source if with_tools is None else with_tools
        for text in dict.fromkeys((source, self._with_tools)):
            if len(text) > MAX_SOURCE_LEN:
                raise UserError(
                    f"chat template: {len(text)} characters, expected at most {MAX_SOURCE_LEN}"
                )
            render_template(text, [])

    @classmethod
    def from_directory(cls, directory: Path, *, processor: bool) -> ChatTemplate:
        """Find the template where transformers finds it (see ``find_templates``).

        Args:
            processor: whether the checkpoint takes images or videos.
        Raises:
            UserError: there is none, or it cannot be read.
        """
        found = find_templates(directory, processor=processor)
        path = directory / "tokenizer_config.json"
        tokenizer = read_processor_json(path) if path.exists() else {}
        return cls(found.default, _special_tokens(tokenizer), found.tool_use)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> str:
        """The prompt's text, up to where the assistant begins.

        Templates drop what they do not know: roles, tools, or a system message that is not the
        first, as Qwen3-VL's. So it is rendered twice, once with marks for texts, tools and calls.

        Args:
            tools: OpenAI's objects of functions that may be called.
            options: further variables of the template, such as ``enable_thinking``.
        Raises:
            UserError: the template refuses these messages, leaves a part of them out, or takes too
                much time or memory.
        """
        marks = Marks()
        turns = [marks.message(i, message) for i, message in enumerate(messages)]
        marked_tools = [marks.tool(tool) for tool in tools]
        with_marks, text = render_template(
            self._with_tools if tools else self._source,
            [self._values(turns, marked_tools, options), self._values(messages, tools, options)],
        )
        marks.check(with_marks)
        return text

    @property
    def text_arguments(self) -> bool:
        """Whether arguments of past calls may be JSON text; else the template wants objects."""
        return all("arguments is string" in text for text in (self._source, self._with_tools))

    def reasoning(self, options: Mapping[str, Any] = NO_OPTIONS) -> ReasoningMode:
        """Whether answers begin with reasoning.

        ``open`` where the prompt ends with ``<think>``, as of Thinking checkpoints; ``optional``
        where the template knows of it; ``none`` where it does not, or closes it in the prompt.

        Raises:
            UserError: the template refuses ``options``.
        """
        if "</think>" not in self._source and "<think>" not in self._source:
            return "none"
        probe = [{"role": "user", "content": "x"}]
        [text] = render_template(self._source, [self._values(probe, (), options)])
        end = text.rstrip()
        if end.endswith("<think>"):
            return "open"
        return "none" if end.endswith("</think>") else "optional"

    def _values(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> dict[str, Any]:
        values = {
            "messages": list(messages),
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": True,
        }
        return {**options, **values, **self._variables}


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
