"""Render the checkpoint's chat template as transformers does, in a process that can be killed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.final_message import PromptEnding, cut_at_tag, with_tag
from trt_eagle3.multimodal.processor_files import read_processor_json
from trt_eagle3.multimodal.reasoning import NO_REASONING, Reasoning, reasoning_marks
from trt_eagle3.multimodal.template_files import MAX_SOURCE_LEN, find_templates
from trt_eagle3.multimodal.template_marks import Marks
from trt_eagle3.multimodal.template_process import render_template
from trt_eagle3.multimodal.tool_formats import ToolFormat, taught_tool_format

__all__ = ["NO_OPTIONS", "ChatTemplate"]

_MESSAGE_KEY = re.compile(  # message.key, messages[0].key, message["key"], message.get("key")
    r"""\bm\w*(?:\[[^\]'"]*\])?(?:\.(?!get\()(\w+)|(?:\[|\.get\()\s*['"](\w+)['"])"""
)
NO_OPTIONS: Mapping[str, Any] = {}
_PROBE_FUNCTION = {"name": "probe", "arguments": {"a": "b"}}
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}
_PROBE_CALL: list[Mapping[str, Any]] = [
    {"role": "user", "content": "x"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": _PROBE_FUNCTION}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "y"},
]


class ChatTemplate:
    """A chat template.

    It comes from a checkpoint, so it runs in Jinja's immutable sandbox, in a process with limits.
    """

    def __init__(
        self, source: str, variables: Mapping[str, str], with_tools: str | None = None
    ) -> None:
        """Check that ``source`` compiles.

        Args:
            variables: the tokenizer's special tokens (``eos_token`` and so on).
            with_tools: the template for requests with tools, if it differs.
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
        """Find the template as transformers does (see ``find_templates``).

        Args:
            processor: whether the checkpoint accepts images or videos.
        Raises:
            UserError: there is no template, or it cannot be read.
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
        ending: PromptEnding = "generation_prompt",
    ) -> str:
        """Render the text of the prompt.

        Templates drop unknown roles, tools, or a system message that is not the first (Qwen3-VL).
        To detect this, the template is rendered twice, once with marks in place of texts, tools and
        calls. Leading system messages are joined if the template accepts only one. A text content
        becomes a list of one part if the template accepts only parts (DeepSeek-VL).

        Args:
            tools: OpenAI function objects that may be called.
            options: further template variables, such as ``enable_thinking``.
            ending: what the prompt ends with.
        Raises:
            UserError: the template rejects these messages, omits a part of them, or exceeds its
                time or memory limit.
        """
        if self._takes_only_parts:
            messages = [_in_parts(message) for message in messages]
        num_systems = _num_leading_systems(messages)
        if num_systems > 1 and not self._takes_two_systems:
            messages = [_joined(messages[:num_systems]), *messages[num_systems:]]
        return self._render(messages, tools, options, ending)

    @cached_property
    def _takes_two_systems(self) -> bool:
        messages = [{"role": role, "content": "x"} for role in ("system", "system", "user")]
        return self._takes(map(_in_parts, messages) if self._takes_only_parts else messages)

    @cached_property
    def _takes_only_parts(self) -> bool:
        message = {"role": "user", "content": "x"}
        return not self._takes([message]) and self._takes([_in_parts(message)])

    def _takes(self, messages: Iterable[Mapping[str, Any]]) -> bool:
        try:
            self._render(list(messages), (), NO_OPTIONS)
        except UserError:
            return False
        return True

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        ending: PromptEnding = "generation_prompt",
    ) -> str:
        marks = Marks()
        turns = [marks.message(i, message) for i, message in enumerate(messages)]
        marked_tools = [marks.tool(tool) for tool in tools]
        generate = ending == "generation_prompt"
        if ending == "final_message":
            messages = [*messages[:-1], with_tag(messages[-1])]
        with_marks, text = render_template(
            self._with_tools if tools else self._source,
            [
                self._values(turns, marked_tools, options, generate=generate),
                self._values(messages, tools, options, generate=generate),
            ],
        )
        marks.check(with_marks)
        return cut_at_tag(text) if ending == "final_message" else text

    @cached_property
    def text_arguments(self) -> bool:
        """Whether arguments of past calls may be JSON text. Otherwise they must be objects."""
        return all("arguments is string" in text for text in (self._source, self._with_tools))

    def starts_with_bos(self, rendered: str) -> bool:
        """Return whether a rendered prompt begins with the tokenizer's BOS token."""
        bos = self._variables.get("bos_token")
        return bool(bos) and rendered.startswith(str(bos))

    def takes_option(self, name: str) -> bool:
        """Return whether the template reads the variable ``name`` and a request may set it."""
        return name in self._names and name not in self._values((), (), NO_OPTIONS)

    def reads_of_messages(self, key: str) -> bool:
        """Return whether the template reads ``key`` of a variable whose name begins with ``m``."""
        return key in self._message_keys

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(re.findall(r"[A-Za-z_]\w*", self._source + self._with_tools))

    @cached_property
    def _message_keys(self) -> frozenset[str]:
        found = _MESSAGE_KEY.findall(self._source) + _MESSAGE_KEY.findall(self._with_tools)
        return frozenset(name for names in found for name in names)

    @cached_property
    def tool_format(self) -> ToolFormat:
        """The format of calls that the template teaches.

        It is detected in a rendered prompt with a tool and a past call. If the template does not
        render that prompt, it is detected in the template's source.
        """
        try:
            [prompt] = render_template(
                self._with_tools, [self._values(_PROBE_CALL, [_PROBE_TOOL], NO_OPTIONS)]
            )
        except UserError:
            prompt = self._with_tools
        return taught_tool_format(prompt)

    def reasoning(
        self, options: Mapping[str, Any] = NO_OPTIONS, *, with_tools: bool = False
    ) -> Reasoning:
        """Return whether answers begin with reasoning, and the marks that enclose it.

        ``open``: the prompt ends with the opening mark, as with Thinking checkpoints. ``optional``:
        the template contains the marks. ``none``: it does not, or the prompt ends with the closing
        mark.

        Args:
            with_tools: for requests with tools; some templates then turn thinking off.

        Raises:
            UserError: the template rejects ``options``.
        """
        source = self._with_tools if with_tools else self._source
        known = reasoning_marks(source)
        if not known:
            return NO_REASONING
        probe = [{"role": "user", "content": "x"}]
        tools = [_PROBE_TOOL] if with_tools else []
        [text] = render_template(source, [self._values(probe, tools, options)])
        prompt = text.rstrip()
        for start, end in known:
            if prompt.endswith(start):
                return Reasoning("open", start, end)
            if prompt.endswith(end):
                return Reasoning("none", start, end)
        return Reasoning("optional", *known[0])

    def _values(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        *,
        generate: bool = True,
    ) -> dict[str, Any]:
        values = {
            "messages": list(messages),
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": generate,
        }
        return {**options, **values, **self._variables}


def _num_leading_systems(messages: Sequence[Mapping[str, Any]]) -> int:
    others = (i for i, message in enumerate(messages) if message.get("role") != "system")
    return next(others, len(messages))


def _joined(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the contents of ``messages`` into one message, separated by blank lines."""
    contents = [message["content"] for message in messages]
    if all(isinstance(content, str) for content in contents):
        return {**messages[0], "content": "\n\n".join(contents)}
    parts: list[Any] = []
    for content in contents:
        own = [_text_part(content)] if isinstance(content, str) else list(content)
        parts += [_text_part("\n\n"), *own] if parts else own
    return {**messages[0], "content": parts}


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a text content to a list of one part."""
    content = message.get("content")
    return {**message, "content": [_text_part(content)]} if isinstance(content, str) else message


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


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
