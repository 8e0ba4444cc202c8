"""Numbers as clients send them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.openai.model import SERVING
from trt_eagle3.errors import UserError
from trt_eagle3.serving.openai.chat import read_chat
from trt_eagle3.serving.openai.completions import read_completion
from trt_eagle3.serving.openai.responses import read_response
from trt_eagle3.serving.served_model import ServedModel

QUESTION = [{"role": "user", "content": "hi"}]
WHOLE = ("seed", "top_k", "min_tokens", "max_tokens")
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty")


def sampled(model: ServedModel, **body: Any) -> Any:
    return read_chat({"messages": QUESTION, **body}, model, SERVING).requests[0].sampling


@pytest.mark.parametrize("field", WHOLE)
@pytest.mark.parametrize("sent", [5, 5.0, "5", "5.0", " 5 "])
def test_whole_number_is_taken_in_every_form(model: ServedModel, field: str, sent: Any) -> None:
    value = getattr(sampled(model, **{field: sent}), field)
    assert (type(value), value) == (int, 5)


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("sent", [0.5, "0.5", "5e-1", " 0.50"])
def test_number_is_taken_as_text_too(model: ServedModel, field: str, sent: Any) -> None:
    assert getattr(sampled(model, **{field: sent}), field) == 0.5


def test_numbers_of_other_fields_and_routes_are_taken_alike(model: ServedModel) -> None:
    options = sampled(
        model,
        logit_bias={"5": "1", "6": 2},
        stop_token_ids=[7.0, "8"],
        max_completion_tokens="9.0",
        logprobs=True,
        top_logprobs="2",
        seed="18446744073709551615",
    )
    assert options.logit_bias == {5: 1.0, 6: 2.0}
    assert (options.stop_token_ids, options.max_tokens) == ((7, 8), 9)
    assert (options.logprobs, options.seed) == (2, 2**64 - 1)
    asked = {"prompt": "a", "max_tokens": 3.0, "logprobs": "1", "n": "2"}
    requests = read_completion(asked, model, SERVING).requests
    assert [(r.sampling.max_tokens, r.sampling.logprobs) for r in requests] == [(3, 1)] * 2
    asked = {"input": "a", "max_output_tokens": 4.0, "top_p": 1}
    [request] = read_response(asked, model, SERVING).requests
    assert request.sampling.max_tokens == 4


def test_zero_is_the_likeliest_token(model: ServedModel) -> None:
    assert sampled(model, temperature=0, top_p=0).greedy
    options = sampled(model, temperature=1, top_p=0)
    assert 0 < options.top_p <= 1e-6


@pytest.mark.parametrize(
    ("field", "sent"),
    [
        ("max_tokens", "nine"),
        ("max_tokens", 5.5),
        ("max_tokens", "5.5"),
        ("max_tokens", True),
        ("max_tokens", ""),
        ("n", "1e1"),
        ("temperature", "hot"),
        ("temperature", "nan"),
        ("temperature", "inf"),
        ("temperature", "1e999"),
        ("temperature", True),
        ("temperature", "5" * 1000),
        ("top_p", -0.1),
    ],
)
def test_other_values_are_refused_by_name(model: ServedModel, field: str, sent: Any) -> None:
    with pytest.raises(UserError, match=f"^{field}: "):
        sampled(model, **{field: sent})
