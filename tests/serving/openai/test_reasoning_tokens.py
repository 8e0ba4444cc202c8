"""``reasoning_tokens`` counts emitted ids."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.openai.model import SERVING, generation
from tests.serving.site import Site
from trt_eagle3.multimodal.assistant_message import AnswerFormat, AssistantMessage
from trt_eagle3.multimodal.reasoning import Reasoning, ReasoningMode
from trt_eagle3.serving.openai.chat import read_chat
from trt_eagle3.serving.openai.reasoning_tokens import count_reasoning_tokens
from trt_eagle3.serving.openai.responses import read_response
from trt_eagle3.serving.served_model import ServedModel

QUESTION = [{"role": "user", "content": "What is 12 plus 30?"}]
THINKING = {"chat_template_kwargs": {"thinking": True}}


def ids_of(model: ServedModel, *parts: str) -> list[list[int]]:
    """The ids of each part; together they need not be those of the parts' text as a whole."""
    return [model.processor.tokenize(part) if part else [] for part in parts]


@pytest.mark.parametrize("spelled", [False, True], ids=["tokens", "letters"])
@pytest.mark.parametrize(
    ("mode", "parts"),  # before, reasoning, behind
    [
        ("open", ("", "Why? ", "</think>\n\nI look.")),
        ("open", ("", "\nWhy? é 🙂\n", "</think>I look.")),
        ("open", ("", "Why, then", "")),
        ("open", ("", "<think>Why", "</think>")),
        ("open", ("", "", "</think>I look.")),
        ("optional", ("<think>", "\nt\n", "</think>\n\nI look.")),
        ("optional", ("\n<think>", "think", "")),
        ("optional", ("", "", "I look.")),
        ("none", ("", "", "I look. <think>Why?</think>")),
    ],
)
def test_reasoning_tokens_are_the_ids_that_wrote_it(
    model: ServedModel, mode: ReasoningMode, parts: tuple[str, str, str], spelled: bool
) -> None:
    end = model.processor.tokenizer.token_to_id("<|im_end|>")
    if spelled:  # more ids than the tokenizer would make of the text
        before, inside, behind = (
            [i for letter in part for i in model.processor.tokenize(letter)] for part in parts
        )
    else:
        before, inside, behind = ids_of(model, *parts)
    form = Reasoning(mode)
    reasoning = AssistantMessage.parse("".join(parts), (), AnswerFormat(form)).reasoning
    assert reasoning == parts[1].strip()
    ids = [*before, *inside, *behind, end]
    expected = len(inside) + (bool(reasoning) and not behind)  # it has the end token too
    assert count_reasoning_tokens(model.processor, form, ids, reasoning) == expected


def test_id_that_is_half_a_character_counts(model: ServedModel) -> None:
    ids = model.processor.tokenize("é🙂")
    assert len(ids) > 2, "the tiny tokenizer writes them byte by byte"
    text = model.processor.decode(ids[:-1])
    assert (
        count_reasoning_tokens(model.processor, Reasoning("open"), ids[:-1], text) == len(ids) - 1
    )


def test_usage_of_both_routes_counts_emitted_ids(model: ServedModel) -> None:
    inside = [i for letter in "What is it?" for i in model.processor.tokenize(letter)]
    behind = model.processor.tokenize("</think>No")
    answer = generation("What is it?</think>No", [*inside, *behind])
    expected = {"reasoning_tokens": len(inside)}
    assert len(inside) > len(model.processor.tokenize("What is it?"))
    chat = read_chat({"messages": QUESTION, "n": 2, **THINKING}, model, SERVING).reply
    cut = generation("What is it?", inside)
    usage = chat.whole([answer, cut])["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * len(inside)}
    response = read_response({"input": "a", **THINKING}, model, SERVING).reply
    assert response.whole([answer])["usage"]["output_tokens_details"] == expected


@pytest.mark.parametrize("temperature", [0.0, 4.0])
def test_reasoning_that_is_cut_is_all_of_the_answer(site: Site, temperature: float) -> None:
    body: dict[str, Any] = {"messages": QUESTION, "max_tokens": 50, "ignore_eos": True, "seed": 3}
    _, found = site.chat(**body, **THINKING, temperature=temperature)
    usage = found["usage"]
    assert found["choices"][0]["message"]["content"] == ""
    assert usage["completion_tokens"] == 50
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 50}
