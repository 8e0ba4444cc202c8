"""Bodies of chat completions, and what answers become."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from PIL import Image

from tests.multimodal.bombs import encode
from tests.multimodal.test_policy import data_uri
from tests.serving.openai.model import SERVING, WEATHER, generation, pieces, served, sse
from tests.serving.site import Site
from tests.tiny import TARGET
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.request.conversation import Conversation
from trt_eagle3.decode.request.request import Chunk
from trt_eagle3.decode.sampling.logprobs import TokenLogprob
from trt_eagle3.errors import UserError
from trt_eagle3.families.qwen3_vl import FAMILY
from trt_eagle3.families.registry import read_target
from trt_eagle3.serving import ServingConfig
from trt_eagle3.serving.openai.call import Call
from trt_eagle3.serving.openai.chat import read_chat
from trt_eagle3.serving.served_model import ServedModel

QUESTION = [{"role": "user", "content": "What is 12 plus 30?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


def read(model: ServedModel, serving: ServingConfig = SERVING, **body: Any) -> Call:
    return read_chat({"messages": QUESTION, **body}, model, serving)


def grammar_of(call: Call) -> Any:
    return call.requests[0].sampling.grammar


def test_tools_reach_the_prompt_unless_the_choice_is_none(model: ServedModel, engine: LLM) -> None:
    texts = {}
    for choice in ("auto", "none"):
        call = read(model, tools=[WEATHER], tool_choice=choice)
        ids = engine.prepare(call.requests[0].prompt).token_ids.tolist()
        texts[choice] = engine.bundle.processor.tokenizer.decode(ids, skip_special_tokens=False)
        assert grammar_of(call) is None
    assert json.dumps(WEATHER) in texts["auto"]
    assert "weather" not in texts["none"]


def test_special_tokens_in_tools_are_text(model: ServedModel, engine: LLM) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}
    call = read(model, tools=[tool])
    [end] = [engine.bundle.processor.tokenizer.token_to_id("<|im_end|>")]
    ids = engine.prepare(call.requests[0].prompt).token_ids.tolist()
    assert ids.count(end) == 2  # of the system turn and of the user's


@pytest.mark.parametrize(
    ("choice", "parallel", "required", "many"),
    [
        ("required", True, True, True),
        ("required", False, True, False),
        ({"type": "function", "function": {"name": "weather"}}, True, True, False),
    ],
)
def test_forced_choice_of_tools_is_a_grammar(
    model: ServedModel, choice: Any, parallel: bool, required: bool, many: bool
) -> None:
    call = read(model, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=parallel)
    form = json.loads(grammar_of(call).source)
    assert (form["required"], form["parallel"]) == (required, many)
    [[begin, schema, _]] = form["tags"]
    assert '"name": "weather"' in begin
    assert json.loads(schema) == WEATHER["function"]["parameters"]


def test_strict_tool_constrains_calls_but_not_text(model: ServedModel) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    form = json.loads(grammar_of(read(model, tools=[strict])).source)
    assert not form["required"]


@pytest.mark.parametrize(
    ("body", "kind", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", "response_format"),
        ({"response_format": FORMAT}, "json_schema", "response_format"),
        ({"guided_regex": "a+"}, "regex", "guided_regex"),
        ({"guided_choice": ["a", "b"]}, "choice", "guided_choice"),
        ({"guided_json": SCHEMA}, "json_schema", "guided_json"),
        ({"guided_grammar": 'start: "a"'}, "ebnf", "guided_grammar"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", "structured_outputs"),
        ({"structured_outputs": {"json_object": True}}, "json_schema", "structured_outputs"),
    ],
)
def test_structured_output_is_a_grammar_that_names_its_field(
    model: ServedModel, body: dict[str, Any], kind: str, field: str
) -> None:
    grammar = grammar_of(read(model, **body))
    assert (grammar.kind, grammar.field, grammar.after) == (kind, field, "")


def test_grammar_begins_behind_the_reasoning_of_a_thinking_checkpoint(model: ServedModel) -> None:
    options = {"chat_template_kwargs": {"thinking": True}}
    assert grammar_of(read(model, response_format=FORMAT, **options)).after == "</think>"
    assert grammar_of(read(model, tools=[WEATHER], tool_choice="required", **options)).after


def test_answer_format_beside_tools_allows_either(model: ServedModel) -> None:
    grammar = grammar_of(read(model, response_format=FORMAT, tools=[WEATHER]))
    form = json.loads(grammar.source)
    assert (grammar.kind, grammar.field, form["answer"]) == (
        "tags",
        "response_format",
        json.dumps(SCHEMA),
    )
    assert "weather" in form["tags"][0][0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": FORMAT, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"structured_outputs": {"yaml": 1}}, "structured_outputs"),
        ({"guided_choice": []}, None),
        ({"guided_choice": [5]}, "guided_choice.0"),
        (
            {"response_format": FORMAT, "tools": [WEATHER], "tool_choice": "required"},
            None,
        ),
        ({"guided_regex": "a", "tools": [WEATHER]}, None),
        ({"guided_json": 5}, None),
    ],
)
def test_bad_formats_are_refused(
    model: ServedModel, body: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(UserError) as caught:
        read(model, **body)
    if param is not None:
        assert caught.value.param == param  # type: ignore[attr-defined]
    else:
        assert str(caught.value).startswith(next(iter(body)))


TOOL_TYPE = b'[{"type":"function","function":{"name":"f","parameters":{"properties":{"a":{%s}}}}}]'
PARAMETERS = "tools[0].function.parameters.properties.a"


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        *(
            (b"tools", TOOL_TYPE % (b'"type":' + bad), f"{PARAMETERS}.type")
            for bad in (b"5", b"null", b"true", b"1.5")
        ),
        *(
            (b"tools", TOOL_TYPE % (b'"default":' + bad), f"{PARAMETERS}.default")
            for bad in (b"NaN", b"1e999")
        ),
        *(
            (b"tools", TOOL_TYPE % (b'"$ref":' + bad), f"{PARAMETERS}.$ref")
            for bad in (b"[]", b"{}")
        ),
        *((b"guided_json", b'{"$ref":' + bad + b"}", "guided_json") for bad in (b"[]", b"{}")),
        (b"metadata", b'{"a": NaN}', "metadata.a"),
    ],
)
def test_bad_schema_is_a_400_that_names_where_it_is_wrong(
    site: Site, field: bytes, value: bytes, param: str
) -> None:
    choice = b'"tool_choice":"required",' if field == b"tools" else b""
    body = b'{"messages":[{"role":"user","content":"a"}],%s"%s":%s}' % (choice, field, value)
    status, text, _ = site.request("POST", "/v1/chat/completions", body)
    assert (status, json.loads(text)["error"]["param"]) == (400, param), text


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_streamed_message_is_the_whole_one(model: ServedModel, size: int) -> None:
    body = {
        "tools": [WEATHER],
        "chat_template_kwargs": {"thinking": True},
        "stream_options": {"include_usage": True},
    }
    text = f"Why?\n</think>\n\nI look.\n{CALL}\n{CALL}"
    ids = model.processor.tokenize(text)
    whole = read(model, **body).reply.whole([generation(text, ids)])
    [choice] = whole["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Why?", "I look.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Bonn"}'}
    ] * 2

    reply = read(model, **body).reply
    events = sse(
        reply.opening()
        + "".join(reply.piece(0, chunk) for chunk in pieces(text, size))
        + reply.closing([generation(text, ids)])
    )
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"]["completion_tokens"] == len(ids)
    details = {"reasoning_tokens": len(model.processor.tokenize("Why?\n"))}
    assert events[-2]["usage"]["completion_tokens_details"] == details
    assert whole["usage"]["completion_tokens_details"] == details
    deltas = [event["choices"][0]["delta"] for event in events[:-2]]
    assert _sum(deltas) == {**message, "tool_calls": _without_ids(message["tool_calls"])}
    assert events[-3]["choices"][0]["finish_reason"] == "tool_calls"


def _sum(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of deltas."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name, "")
        for call in delta.get("tool_calls", []):
            found = calls.setdefault(call["index"], {"arguments": ""})
            if "id" in call:
                assert call["id"].startswith("call_")
                found["name"] = call["function"]["name"]
            found["arguments"] += call["function"].get("arguments", "")
    return {**message, "tool_calls": list(calls.values())}


def _without_ids(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [call["function"] for call in calls]


def test_message_of_calls_alone_has_no_content(model: ServedModel) -> None:
    [choice] = read(model, tools=[WEATHER]).reply.whole([generation(CALL)])["choices"]
    assert choice["message"]["content"] is None


def test_calls_that_are_cut_off_end_with_length(model: ServedModel) -> None:
    reply = read(model, tools=[WEATHER]).reply
    [choice] = reply.whole([generation(CALL[:-30], finish_reason="length")])["choices"]
    assert choice["finish_reason"] == "length"


def test_several_answers_have_indices_and_one_prompt(model: ServedModel) -> None:
    call = read(model, n=2, temperature=1.0, seed=2**64 - 1)
    assert [request.sampling.seed for request in call.requests] == [2**64 - 1, 0]
    call = read(model, n=2, temperature=1.0, seed=-1)  # as OpenAI allows
    assert [request.sampling.seed for request in call.requests] == [2**64 - 1, 0]
    with pytest.raises(UserError, match="seed: expected a whole number from 0"):
        read(model, seed=-(2**63) - 1)
    found = call.reply.whole([generation("a"), generation("b")])
    said = [(c["index"], c["message"]["content"]) for c in found["choices"]]
    assert said == [(0, "a"), (1, "b")]
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (5, 6)


def test_usage_counts_what_the_prefix_cache_had(site: Site) -> None:
    body = {"messages": [{"role": "user", "content": "Once more? " * 30}], "max_tokens": 3}
    used = [site.chat(**body)[1]["usage"] for _ in range(2)]
    first, second = (u["prompt_tokens_details"]["cached_tokens"] for u in used)
    assert first < second <= used[1]["prompt_tokens"]
    assert second >= used[1]["prompt_tokens"] // 2


def test_logprobs_are_sent_with_the_text_that_they_make(model: ServedModel) -> None:
    tokenizer = model.processor.tokenizer
    [a] = tokenizer.encode("a").ids
    end = tokenizer.token_to_id("<|im_end|>")
    found = [TokenLogprob(a, -0.5, ((a, -0.5), (end, float("-inf"))))]
    reply = read(model, logprobs=True, top_logprobs=2).reply
    [choice] = reply.whole([generation("a", logprobs=found)])["choices"]
    [entry] = choice["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("a", -0.5, [97])
    assert entry["top_logprobs"][1] == {
        "token": "<|im_end|>",
        "logprob": -9999.0,
        "bytes": list(b"<|im_end|>"),
    }
    reply = read(model, logprobs=True).reply
    assert reply.piece(0, Chunk((a,), "", None, tuple(found))) == ""
    [event] = sse(reply.piece(0, Chunk((a,), "aa", None, tuple(found))))
    assert len(event["choices"][0]["logprobs"]["content"]) == 2


def test_prompt_logprobs_are_vllms_objects_beside_the_choices(site: Site, engine: LLM) -> None:
    messages = [{"role": "user", "content": "What is 12 plus 30?"}]
    asked = {"messages": messages, "max_tokens": 2, "n": 2}
    found = site.chat(**asked, prompt_logprobs=1)[1]
    first, *entries = found["prompt_logprobs"]
    assert first is None
    assert len(entries) == found["usage"]["prompt_tokens"] - 1
    ids = engine.generate(messages, prompt_logprobs=0, max_tokens=1).prompt_logprobs
    assert ids is not None
    for entry, expected in zip(entries, ids[1:], strict=True):
        assert expected is not None
        [token] = expected
        assert entry[str(token)]["rank"] == expected[token].rank
        assert entry[str(token)]["decoded_token"] == served(engine).token_bytes(token).decode(
            "utf-8", "replace"
        )
        assert any(one["rank"] == 1 for one in entry.values())
    assert "prompt_logprobs" not in site.chat(**asked)[1]
    status, refused = site.chat(**asked, prompt_logprobs=1, stream=True)
    assert (status, refused["error"]["param"]) == (400, "prompt_logprobs")
    assert "not served with stream: true" in refused["error"]["message"]


def test_acceptance_is_sent_where_it_is_asked_for(model: ServedModel) -> None:
    a, b = (model.processor.tokenizer.encode(text).ids[0] for text in ("a", "b"))
    reply = read(model, stream_options={"include_acceptance": True}).reply
    [event] = sse(reply.piece(0, Chunk((a, b), "ab", None, (), (2,))))
    assert event["trt_eagle3"] == {"accepted": 1, "pieces": ["a", "b"]}
    [event] = sse(reply.piece(0, Chunk((a,), "a", None, (), (1,))))
    assert event["trt_eagle3"] == {"accepted": 0, "pieces": ["a"]}
    [event] = sse(reply.piece(0, Chunk((a,), "a", None)))
    assert event["trt_eagle3"] == {"accepted": None, "pieces": ["a"]}, "a forward without a draft"


def test_unknown_fields_are_ignored_and_named_or_refused(model: ServedModel, site: Site) -> None:
    fields = {"thinking_budget": 5, "safety": None, "spam\n": 1}
    assert read(model, **fields).ignored == ("thinking_budget", "spam\\n")
    with pytest.raises(UserError, match="thinking_budget: not served here") as caught:
        read(model, ServingConfig(strict_fields=True), **fields)
    assert caught.value.code == "unknown_parameter"  # type: ignore[attr-defined]
    body = {"messages": QUESTION, "max_tokens": 2, **fields}
    status, _, headers = site.request("POST", "/v1/chat/completions", body)
    assert (status, headers["x-ignored-fields"]) == (200, "thinking_budget, spam\\n")


def seen(engine: LLM, call: Call) -> Any:
    """The one image or video of a call."""
    [visual] = engine.prepare(call.requests[0].prompt).visuals
    return visual


def test_keys_of_parts_are_honoured_and_others_named_or_refused(
    model: ServedModel, site: Site, engine: LLM
) -> None:
    url = data_uri(encode(Image.new("RGB", (200, 300))))
    part = {"type": "image_url", "image_url": {"url": url, "max_pixels": 2000}, "spam\n": 1}
    messages = [*QUESTION, {"role": "user", "content": [part]}]
    call = read(model, messages=messages)
    assert call.ignored == ("messages[1].content[0].spam\\n",)
    assert seen(engine, call).grid == (1, 2, 2)
    with pytest.raises(UserError, match=r"messages\[1\].content\[0\].spam.*: not served here"):
        read(model, ServingConfig(strict_fields=True), messages=messages)
    body = {"messages": messages, "max_tokens": 2}
    status, _, headers = site.request("POST", "/v1/chat/completions", body)
    assert (status, headers["x-ignored-fields"]) == (200, "messages[1].content[0].spam\\n")
    part["image_url"]["max_pixels"] = "many"  # type: ignore[index]
    status, refusal = site.chat(**body)
    assert status == 400
    assert refusal["error"]["param"] == "messages[1].content[0].max_pixels"


def test_rate_of_a_list_of_frames_reaches_the_prompt(model: ServedModel) -> None:
    processor = FAMILY.processor(TARGET, read_target(TARGET))  # whose template knows videos
    frames = [data_uri(encode(Image.new("RGB", (64, 64), (i, 0, 0)))) for i in range(4)]
    for fps, times in ((None, ("0.2", "1.2")), (1, ("0.5", "2.5")), (0.5, ("1.0", "5.0"))):
        part = {"type": "video_url", "video_url": {"url": frames}, "sample_fps": fps}
        call = read(model, messages=[{"role": "user", "content": [part]}])
        assert call.ignored == ()
        prompt = call.requests[0].prompt
        assert isinstance(prompt, Conversation)
        text = processor.decode(processor.messages(prompt.messages).token_ids.tolist())
        assert re.findall(r"<([0-9.]+) seconds>", text) == list(times)


def test_processor_options_are_for_parts_that_say_nothing(model: ServedModel, engine: LLM) -> None:
    url = data_uri(encode(Image.new("RGB", (200, 300))))
    grids = {}
    for key in (None, 4000):
        content = [{"type": "image_url", "image_url": {"url": url}, "max_pixels": key}]
        call = read(
            model,
            messages=[{"role": "user", "content": content}],
            mm_processor_kwargs={"max_pixels": 2000, "fps": 1, "size": {}},
        )
        assert call.ignored == ("mm_processor_kwargs.size",)
        assert call.reply.whole([generation("Hi.")])["model"] == model.names[0]
        grids[key] = seen(engine, call).grid
    assert grids == {None: (1, 2, 2), 4000: (1, 4, 2)}
    with pytest.raises(UserError, match=r"mm_processor_kwargs.size: not served here"):
        read(model, ServingConfig(strict_fields=True), mm_processor_kwargs={"size": {}})


def test_what_the_template_says_of_tools_reaches_the_model(site: Site, engine: LLM) -> None:
    messages = [
        *QUESTION,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city":"Bonn"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
    ]
    status, found = site.chat(messages=messages, tools=[WEATHER], max_tokens=4)
    assert status == 200, found
    tokenizer = engine.bundle.processor.tokenizer
    prompt = engine.prepare(Conversation(messages)).token_ids.tolist()
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    assert '{"name": "weather", "arguments": {"city":"Bonn"}}' in text
    assert "12 degrees" in text


def test_continued_final_message_gets_the_rest_of_the_answer(site: Site, engine: LLM) -> None:
    whole = engine.generate(QUESTION)
    begun = engine.bundle.processor.decode(whole.token_ids[:3])
    messages = [*QUESTION, {"role": "assistant", "content": begun}]
    for extra in ({}, {"add_generation_prompt": False}):
        _, found = site.chat(messages=messages, continue_final_message=True, **extra)
        assert begun + found["choices"][0]["message"]["content"] == whole.text
    status, found = site.chat(
        messages=messages, continue_final_message=True, add_generation_prompt=True
    )
    assert (status, found["error"]["param"]) == (400, "continue_final_message")


@pytest.mark.parametrize("stream", [False, True])
def test_two_answers_of_one_request_are_those_of_their_seeds(
    site: Site, engine: LLM, stream: bool
) -> None:
    sampled = {"temperature": 4.0, "max_tokens": 12, "ignore_eos": True}
    expected = [
        engine.generate(Conversation(QUESTION), seed=seed, **sampled).text for seed in (7, 8)
    ]
    assert expected[0] != expected[1]
    body = {"messages": QUESTION, "n": 2, "seed": 7, **sampled}
    if stream:
        texts = ["", ""]
        for event in site.events(**body):
            [choice] = event["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
    else:
        texts = [choice["message"]["content"] for choice in site.chat(**body)[1]["choices"]]
    assert texts == expected
