"""``/v1/completions``: prompts without chat template."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving.openai.model import SERVING, generation, served, sse
from tests.serving.site import Site
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.request.conversation import RawPrompt
from trt_eagle3.decode.request.request import Chunk
from trt_eagle3.decode.sampling.logprobs import TokenLogprob
from trt_eagle3.errors import UserError
from trt_eagle3.serving.openai.completions import read_completion
from trt_eagle3.serving.served_model import ServedModel

PROMPT = "<|im_start|>user\nWhat is 12 plus 30?<|im_end|>\n<|im_start|>assistant\n"


def complete(site: Site, **body: Any) -> tuple[int, Any]:
    status, text, _ = site.request("POST", "/v1/completions", body)
    return status, json.loads(text)


def test_control_tokens_of_a_raw_prompt_are_tokens(site: Site, engine: LLM) -> None:
    expected = engine.generate([{"role": "user", "content": "What is 12 plus 30?"}])
    status, found = complete(site, prompt=PROMPT, max_tokens=64)
    assert status == 200, found
    [choice] = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, "stop")
    assert found["usage"]["prompt_tokens"] == expected.prompt_tokens
    assert found["object"] == "text_completion"


def test_token_ids_are_a_prompt(site: Site, engine: LLM) -> None:
    ids = engine.bundle.processor.tokenize(PROMPT)
    _, text = complete(site, prompt=PROMPT, max_tokens=8)
    _, found = complete(site, prompt=ids, max_tokens=8)
    assert found["choices"] == text["choices"]
    assert engine.generate(RawPrompt(tuple(ids)), max_tokens=8).text == text["choices"][0]["text"]


def test_several_prompts_are_answered_in_their_order(site: Site, engine: LLM) -> None:
    prompts = [PROMPT, PROMPT.replace("12", "7")]
    expected = [engine.generate(RawPrompt(prompt), max_tokens=9) for prompt in prompts]
    _, found = complete(site, prompt=prompts, max_tokens=9, n=2, echo=True)
    texts = [prompt + one.text for prompt, one in zip(prompts, expected, strict=True)]
    assert [choice["text"] for choice in found["choices"]] == [
        texts[0],
        texts[0],
        texts[1],
        texts[1],
    ]
    assert found["usage"]["prompt_tokens"] == sum(one.prompt_tokens for one in expected)
    assert found["usage"]["completion_tokens"] == 2 * sum(len(one.token_ids) for one in expected)


def test_stream_is_the_whole_text(site: Site) -> None:
    body = {"prompt": PROMPT, "max_tokens": 9, "echo": True}
    _, whole = complete(site, **body)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    status, text, _ = site.request("POST", "/v1/completions", {**body, **options})
    assert status == 200
    *events, usage, done = sse(text)
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    assert usage["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert all("usage" in event and event["usage"] is None for event in events)
    assert done == "[DONE]"


def test_logprobs_stand_at_the_offsets_of_their_tokens(model: ServedModel) -> None:
    a, b = (model.processor.tokenizer.encode(text).ids[0] for text in ("a", "b"))
    found = (TokenLogprob(a, -0.5, ((a, -0.5), (b, -1.0))), TokenLogprob(b, -0.25))
    reply = read_completion({"prompt": "ab", "echo": True, "logprobs": 2}, model, SERVING).reply
    whole = reply.whole([generation("ab", logprobs=found)])
    assert whole["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [{"a": -0.5, "b": -1.0}, {}],
        "text_offset": [2, 3],
    }
    reply = read_completion({"prompt": "ab", "logprobs": 2}, model, SERVING).reply
    [event] = sse(reply.piece(0, Chunk((a, b), "ab", None, found)))
    assert event["choices"][0]["logprobs"]["text_offset"] == [0, 1]


def test_prompt_logprobs_are_vllms_objects_in_every_choice(site: Site, engine: LLM) -> None:
    prompts = [PROMPT, PROMPT.replace("12", "7")]
    _, found = complete(site, prompt=prompts, prompt_logprobs=2, max_tokens=2, n=2)
    for i, choice in enumerate(found["choices"]):
        prompt = RawPrompt(prompts[i // 2])
        expected = engine.generate(prompt, prompt_logprobs=2, max_tokens=1).prompt_logprobs
        assert expected is not None
        assert choice["prompt_logprobs"][0] is None
        assert choice["logprobs"] is None
        for written, entry in zip(choice["prompt_logprobs"][1:], expected[1:], strict=True):
            assert entry is not None
            assert [int(token) for token in written] == list(entry)
            assert [one["rank"] for one in written.values()] == [e.rank for e in entry.values()]
            logprobs = [one["logprob"] for one in written.values()]
            assert logprobs == pytest.approx([e.logprob for e in entry.values()], abs=1e-3)
            texts = [
                served(engine).token_bytes(token).decode("utf-8", "replace") for token in entry
            ]
            assert [one["decoded_token"] for one in written.values()] == texts
    _, without = complete(site, prompt=prompts, max_tokens=2)
    assert all("prompt_logprobs" not in choice for choice in without["choices"])


def test_echo_with_logprobs_has_those_of_the_prompt(site: Site) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 3, "logprobs": 2}
    _, answer = complete(site, **asked)
    _, found = complete(site, **asked, echo=True)
    [own], [choice] = answer["choices"], found["choices"]
    whole = choice["logprobs"]
    count = found["usage"]["prompt_tokens"]
    assert "".join(whole["tokens"]) == choice["text"] == PROMPT + own["text"]
    assert (whole["token_logprobs"][0], whole["top_logprobs"][0]) == (None, None)
    assert all(value <= 0 for value in whole["token_logprobs"][1:])
    assert all(len(top) == 2 for top in whole["top_logprobs"][1:])
    assert whole["tokens"][count:] == own["logprobs"]["tokens"]
    ours = own["logprobs"]["token_logprobs"]
    assert whole["token_logprobs"][count:] == pytest.approx(ours, abs=1e-3)
    assert whole["text_offset"][:2] == [0, len(whole["tokens"][0])]
    assert whole["text_offset"][count] == len(PROMPT)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [99_999]}, "prompt"),
        ({"prompt": "<|vision_start|><|image_pad|><|vision_end|>"}, "prompt"),
        ({"prompt": "a " * 2000}, "prompt"),
    ],
)
def test_bad_body_is_a_400_that_names_the_field(
    site: Site, body: dict[str, Any], param: str
) -> None:
    status, found = complete(site, **body)
    assert (status, found["error"]["param"]) == (400, param), found


def test_prompt_over_the_context_has_openais_code(site: Site) -> None:
    _, found = complete(site, prompt="a " * 2000)
    assert found["error"]["code"] == "context_length_exceeded"


def test_unknown_prompt_kind_is_refused_in_python(engine: LLM) -> None:
    with pytest.raises(UserError, match="no token"):
        engine.generate(RawPrompt(""))
