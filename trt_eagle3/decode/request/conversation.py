"""Prompts with tools (``Conversation``), and prompts without a chat template (``RawPrompt``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trt_eagle3.decode.sampling.grammar import Grammar, StructuralTag
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.errors import UserError, quote
from trt_eagle3.multimodal.assistant_message import AnswerFormat, MessageParser
from trt_eagle3.multimodal.final_message import PromptEnding, final_text
from trt_eagle3.multimodal.tools import Tool

__all__ = ["Conversation", "RawPrompt"]

_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True)
class RawPrompt:
    """A prompt without chat template: token ids, or a text whose control tokens are parsed."""

    content: str | tuple[int, ...]


@dataclass(frozen=True)
class Conversation:
    """Chat messages, and the tools that the model may call.

    Attributes:
        messages: as ``multimodal.Processor.messages`` takes them.
        tool_choice: ``auto`` (the model decides), ``none`` (no tool is offered), ``required`` (at
            least one call and nothing else), or the name of the tool to call once.
        parallel_tool_calls: whether a required answer may hold more than one call.
        template_options: further variables of the chat template, such as ``enable_thinking``.
        add_generation_prompt: end the prompt with the header of an assistant's turn; None: unless
            ``continue_final_message`` is set.
        continue_final_message: end the prompt with the last message's text, which the answer
            continues. Both are those of transformers' ``apply_chat_template``.
    Raises:
        UserError: ``tool_choice`` is neither a known choice nor the name of a tool; or both
            ``add_generation_prompt`` and ``continue_final_message`` are given.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.messages, list | tuple):
            raise UserError(f"messages: expected a list, got {type(self.messages).__name__}")
        self._check_ending()
        names = [tool.name for tool in self.tools]
        if self.tool_choice == "required" and not names:
            raise UserError("tool_choice: expected tools to choose from, got none.")
        if self.tool_choice not in {*_CHOICES, *names}:
            known = ", ".join([*_CHOICES, *names][:16])
            raise UserError(
                f"tool_choice: expected one of {known}, got {quote(self.tool_choice, 80)}"
            )

    def _check_ending(self) -> None:
        for name, given in (
            ("add_generation_prompt", self.add_generation_prompt),
            ("continue_final_message", self.continue_final_message),
        ):
            if not isinstance(given, bool | None):
                raise UserError(f"{name}: expected true or false, got {quote(given, 40)}")
        if self.add_generation_prompt and self.continue_final_message:
            raise UserError(
                "continue_final_message: excludes add_generation_prompt. Set that to false, or "
                "leave it out."
            )

    @property
    def ending(self) -> PromptEnding:
        """What the prompt ends with."""
        if self.continue_final_message:
            return "final_message"
        return "last_turn" if self.add_generation_prompt is False else "generation_prompt"

    def answer_format(self, usual: AnswerFormat) -> AnswerFormat:
        """Return the form of the answer; ``usual``: behind a generation prompt.

        Without that prompt, an answer begins inside reasoning only if the final message does.
        """
        if self.ending == "generation_prompt":
            return usual
        reasoning = usual.reasoning
        last: Any = self.messages[-1] if self.continue_final_message and self.messages else None
        text = final_text(last) if isinstance(last, Mapping) and last.get("content") else ""
        opened = text.rfind(reasoning.start) > text.rfind(reasoning.end)
        return replace(usual, reasoning=replace(reasoning, mode="open" if opened else "none"))

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the prompt describes."""
        return () if self.tool_choice == "none" else self.tools

    def parser(self, answer_format: AnswerFormat) -> MessageParser:
        """Make the parser of the answer."""
        return MessageParser(self.offered, answer_format)

    def constrained(self, sampling: SamplingParams, answer_format: AnswerFormat) -> SamplingParams:
        """Return ``sampling`` with the grammar that the choice of tools requires.

        If answers start with reasoning, the grammar starts after it.

        Raises:
            UserError: a tool's schema is too large, the format cannot express it, or a grammar is
                combined with a tool that must be called.
        """
        grammar, reasoning = self._grammar(sampling.grammar, answer_format), answer_format.reasoning
        if grammar is not None and reasoning.mode == "open" and not grammar.after:
            grammar = grammar.preceded_by(reasoning.end)
        return sampling.updated(grammar=grammar)

    def _grammar(self, answer: Grammar | None, answer_format: AnswerFormat) -> Grammar | None:
        forced = self.tool_choice not in {"auto", "none"}
        if answer is not None:
            if forced:
                raise UserError(
                    f"{answer.field}: has no use where tool_choice is "
                    f"{quote(self.tool_choice, 80)}. Leave one of them out."
                )
            return self._answer_or_calls(answer, answer_format)
        if forced:
            single = self.tool_choice != "required"
            tools = [tool for tool in self.tools if not single or tool.name == self.tool_choice]
            return Grammar.structural_tags(
                (_tag(tool, answer_format, strict=True) for tool in tools),
                **_triggers(answer_format),
                required=True,
                parallel=self.parallel_tool_calls and not single,
            )
        if any(tool.strict for tool in self.offered):
            return Grammar.structural_tags(
                (_tag(tool, answer_format, strict=tool.strict) for tool in self.offered),
                **_triggers(answer_format),
                parallel=self.parallel_tool_calls,
            )
        return None

    def _answer_or_calls(self, answer: Grammar, answer_format: AnswerFormat) -> Grammar:
        """Allow JSON of a schema, or tool calls in its place."""
        if not self.offered:
            return answer
        if answer.kind != "json_schema":
            raise UserError(
                f"{answer.field}: {answer.kind} has no use beside tools: no answer could call "
                "them. Set tool_choice to none."
            )
        return Grammar.structural_tags(
            (_tag(tool, answer_format, strict=tool.strict) for tool in self.offered),
            **_triggers(answer_format),
            required=True,
            parallel=self.parallel_tool_calls,
            answer=answer.source,
            field=answer.field,
        )


def _tag(tool: Tool, answer_format: AnswerFormat, *, strict: bool) -> StructuralTag:
    call = answer_format.tools.grammar(tool, strict=strict)
    return StructuralTag(call.begin, call.content, call.end)


def _triggers(answer_format: AnswerFormat) -> dict[str, Any]:
    """Return the trigger of constrained calls, and the triggers that free text must not contain."""
    first, *others = answer_format.tools.triggers
    return {"trigger": first, "never": others}
