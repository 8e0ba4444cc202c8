"""Conversations with tools and raw prompts, in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from tests.serving.openai.model import WEATHER, load_with_tools
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.request.conversation import Conversation, RawPrompt
from trt_eagle3.decode.sampling.grammar import Grammar
from trt_eagle3.decode.sampling.sampling_params import GREEDY, SamplingParams
from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.assistant_message import AnswerFormat
from trt_eagle3.multimodal.reasoning import Reasoning
from trt_eagle3.multimodal.tools import Tool

QUESTION = [{"role": "user", "content": "What is 12 plus 30?"}]
TOOLS = (Tool("f"), Tool("g", strict=True))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with load_with_tools(tmp_path_factory.mktemp("tools")) as llm:
        yield llm


def test_chat_is_generate_with_the_message_parsed(llm: LLM) -> None:
    expected = llm.generate(QUESTION)
    answer = llm.chat(QUESTION)
    assert (answer.message.content, answer.message.calls) == (expected.text, [])
    assert answer.generation.token_ids == expected.token_ids


def test_list_of_conversations_is_answered_in_order(llm: LLM) -> None:
    other = [{"role": "user", "content": "What is 2 plus 3?"}]
    expected = [llm.chat(one).message.content for one in (QUESTION, other)]
    assert [answer.message.content for answer in llm.chat([QUESTION, other])] == expected
    assert [answer.message.content for answer in llm.chat((QUESTION,))] == expected[:1]


def test_chat_takes_sampling_params_by_position_and_n(llm: LLM) -> None:
    sampled = SamplingParams(temperature=4.0, seed=7, max_tokens=12, ignore_eos=True)
    expected = [llm.chat(QUESTION, sampled, seed=seed).message.content for seed in (7, 8)]
    assert expected[0] != expected[1]
    assert [a.message.content for a in llm.chat(QUESTION, sampled, n=2)] == expected
    each = llm.chat([QUESTION, QUESTION], sampling_params=sampled, n=2)
    assert [[a.message.content for a in answers] for answers in each] == [expected] * 2


def test_continued_final_message_gets_the_rest_of_the_answer(llm: LLM) -> None:
    whole = llm.generate(QUESTION)
    begun = llm.bundle.processor.decode(whole.token_ids[:3])
    messages = [*QUESTION, {"role": "assistant", "content": begun}]
    answer = llm.chat(messages, continue_final_message=True)
    assert begun + answer.message.content == whole.text


def test_both_endings_of_a_prompt_are_refused(llm: LLM) -> None:
    with pytest.raises(UserError, match="continue_final_message: excludes add_generation_prompt"):
        llm.chat(QUESTION, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(UserError, match="continue_final_message: expected true or false, got 1"):
        llm.chat(QUESTION, continue_final_message=1)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("final", "mode"),
    [("<think>Hm", "open"), ("<think>Hm</think>So", "none"), ("So", "none"), ("", "none")],
)
def test_continued_answer_begins_in_reasoning_only_where_the_message_does(
    final: str, mode: str
) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": final}]
    asked = Conversation(messages, continue_final_message=True)
    for usual in ("open", "optional", "none"):
        assert asked.answer_format(AnswerFormat(Reasoning(usual))).reasoning.mode == mode
    usual_format = AnswerFormat(Reasoning("open"))
    assert Conversation(messages).answer_format(usual_format) == usual_format


def test_unknown_option_of_chat_is_refused_with_the_nearest_known_one(llm: LLM) -> None:
    with pytest.raises(UserError, match=r"tool_choices: unknown option\. Did you mean tool_choice"):
        llm.chat(QUESTION, tool_choices="none")  # type: ignore[call-overload]


class Colour(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Literal["red", "green"]


def test_pydantic_class_is_a_grammar(llm: LLM) -> None:
    for schema in (Colour, Grammar.json_schema(Colour)):
        answer = llm.chat(QUESTION, grammar=schema, max_tokens=230)
        assert Colour.model_validate_json(answer.message.content).name in {"red", "green"}


def test_pydantic_class_without_a_schema_is_refused() -> None:
    class Strange(BaseModel):
        call: Callable[[], int]

    with pytest.raises(UserError, match="grammar: Strange: no JSON Schema can be made of it"):
        GREEDY.updated(grammar=Strange)


def test_tools_are_in_the_prompt(llm: LLM) -> None:
    plain = llm.chat(QUESTION).generation.prompt_tokens
    assert llm.chat(QUESTION, tools=[WEATHER], max_tokens=2).generation.prompt_tokens > plain
    none = llm.chat(QUESTION, tools=[WEATHER], tool_choice="none", max_tokens=2)
    assert none.generation.prompt_tokens == plain


def test_raw_prompt_is_continued_as_it_is(llm: LLM) -> None:
    text = "<|im_start|>user\nWhat is 12 plus 30?<|im_end|>\n<|im_start|>assistant\n"
    ids = tuple(llm.bundle.processor.tokenize(text))
    expected = llm.generate(QUESTION).text
    raw, by_ids = llm.generate([RawPrompt(text), RawPrompt(ids)])
    assert raw.text == by_ids.text == expected


@pytest.mark.parametrize(
    ("choice", "expected"),
    [("f", None), ("auto", None), ("none", None), ("h", "tool_choice: expected one of auto")],
)
def test_choice_names_a_tool(choice: str, expected: str | None) -> None:
    if expected is None:
        assert Conversation(QUESTION, TOOLS, choice).tool_choice == choice
        return
    with pytest.raises(UserError, match=expected):
        Conversation(QUESTION, TOOLS, choice)


def grammar(**fields: Any) -> Grammar | None:
    return Conversation(QUESTION, TOOLS, **fields).constrained(GREEDY, AnswerFormat()).grammar


def test_grammar_follows_the_choice() -> None:
    strict = grammar()
    forced = grammar(tool_choice="f")
    assert strict is not None
    assert forced is not None
    assert grammar(tool_choice="none") is None
    assert '\\"g\\"' in strict.source
    assert '\\"g\\"' not in forced.source


def test_open_reasoning_comes_before_the_grammar() -> None:
    asked = Conversation(QUESTION, TOOLS, "required")
    found = asked.constrained(GREEDY, AnswerFormat(Reasoning("open"))).grammar
    assert found is not None
    assert found.after == "</think>"
