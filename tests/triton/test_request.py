"""Tensors and parameters become a `Request`, or one line that says what is wrong."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.multimodal.bombs import encode
from tests.tiny import TARGET
from tests.triton.hostile import SURROGATES
from tests.triton.server import data_uri
from trt_eagle3.decode.request.conversation import Conversation
from trt_eagle3.decode.sampling.grammar import Grammar
from trt_eagle3.decode.sampling.sampling_params import GREEDY, SamplingParams
from trt_eagle3.errors import UserError
from trt_eagle3.families.qwen3_vl import FAMILY
from trt_eagle3.families.registry import read_target
from trt_eagle3.serving import ServingConfig
from trt_eagle3.serving.json_reader import TooLargeError
from trt_eagle3.serving.served_model import ServedModel
from trt_eagle3.triton.request import ParsedRequest, read_order

SERVING = ServingConfig()


@cache
def served() -> ServedModel:
    """The tiny pair, whose prompts nobody reads here."""
    processor = FAMILY.processor(TARGET, read_target(TARGET))
    return ServedModel(("tiny",), 1024, GREEDY, processor)


def strings(*values: str | bytes) -> Any:
    return np.array([v if isinstance(v, bytes) else v.encode() for v in values], dtype=np.object_)


def read(
    parameters: dict[str, Any] | None = None, serving: ServingConfig = SERVING, **tensors: Any
) -> ParsedRequest:
    return read_order(tensors, parameters or {}, serving, served())


def test_text_alone_takes_every_default() -> None:
    order = read(text_input=strings("héllo"))
    assert order.request.prompt == "héllo"
    assert order.request.sampling == SamplingParams()
    assert (order.stream, order.echo, order.return_token_ids) == (False, "", False)


def test_every_input_is_passed_on() -> None:
    order = read(
        text_input=strings("hi"),
        max_tokens=np.array([7], dtype=np.int32),
        stream=np.array([True]),
        temperature=np.array([0.5], dtype=np.float32),
        top_k=np.array([3], dtype=np.int32),
        top_p=np.array([0.25], dtype=np.float32),
        min_p=np.array([0.125], dtype=np.float32),
        repetition_penalty=np.array([1.5], dtype=np.float32),
        presence_penalty=np.array([0.75], dtype=np.float32),
        seed=np.array([2**64 - 1], dtype=np.uint64),
        stop_words=strings("a", "b"),
        stop_token_ids=np.array([4, 5], dtype=np.int32),
        ignore_eos=np.array([True]),
        frequency_penalty=np.array([0.5], dtype=np.float32),
        logit_bias=strings('{"5": 1.5}'),
        min_tokens=np.array([2], dtype=np.int32),
        logprobs=np.array([3], dtype=np.int32),
        response_format=strings('{"type": "json_object"}'),
        speculation=np.array([False]),
        image_url=strings("data:,1", "data:,2"),
        image_bytes=strings(b"\xff\xd8"),
        video=strings("data:video/mp4;base64,AA", ' ["data:,3", "data:,4"]'),
        video_bytes=strings(b"\x1a\x45"),
        exclude_input_in_output=np.array([False]),
        return_token_ids=np.array([True]),
    )
    request = order.request
    assert request.sampling == SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=0.75,
        frequency_penalty=0.5,
        logit_bias={5: 1.5},
        seed=2**64 - 1,
        max_tokens=7,
        min_tokens=2,
        stop=("a", "b"),
        stop_token_ids=(4, 5),
        ignore_eos=True,
        grammar=Grammar.json_object("response_format"),
        logprobs=3,
    )
    assert not request.speculation
    assert request.images == ("data:,1", "data:,2", b"\xff\xd8")
    assert request.videos == ("data:video/mp4;base64,AA", ["data:,3", "data:,4"], b"\x1a\x45")
    assert (order.stream, order.echo, order.return_token_ids) == (True, "hi", True)


def test_keys_that_nothing_reads_are_logged_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    call = {"function": {"name": "f", "arguments": "{"}}
    messages = [
        {"role": "user", "content": "hi", "foo": 1},
        {"role": "assistant", "tool_calls": [call]},
    ]
    read(messages=strings(json.dumps(messages)))
    assert "keys of a request are ignored: messages[0].foo" in caplog.text
    assert "are repaired: messages[1].tool_calls[0].function.arguments" in caplog.text
    with pytest.raises(UserError, match=r"messages\[0\]\.foo: not served here"):
        read(messages=strings(json.dumps(messages)), serving=ServingConfig(strict_fields=True))


def test_messages_are_json() -> None:
    order = read(messages=strings('[{"role": "user", "content": "hi"}]'))
    assert order.request.prompt == Conversation([{"role": "user", "content": "hi"}])
    assert order.parser is not None


def test_keys_of_parts_are_honoured_and_others_logged_or_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    frames = [data_uri(encode(Image.new("RGB", (64, 64)))) for _ in range(4)]
    part = {"type": "video", "video": frames, "sample_fps": 0.5, "spam": 1}
    messages = strings(json.dumps([{"role": "user", "content": [part]}]))
    prompt = read(messages=messages).request.prompt
    assert "messages[0].content[0].spam" in caplog.text
    assert isinstance(prompt, Conversation)
    processor = served().processor
    text = processor.decode(processor.messages(prompt.messages).token_ids.tolist())
    assert re.findall(r"<([0-9.]+) seconds>", text) == ["1.0", "5.0"]
    with pytest.raises(UserError, match=r"messages\[0\].content\[0\].spam: not served here"):
        read(serving=ServingConfig(strict_fields=True), messages=messages)


def test_tools_and_their_choice_are_json() -> None:
    order = read(
        messages=strings('[{"role": "user", "content": "hi"}]'),
        tools=strings('[{"type": "function", "function": {"name": "f"}}]'),
        tool_choice=strings('{"type": "function", "function": {"name": "f"}}'),
        parallel_tool_calls=np.array([False]),
        chat_template_kwargs=strings('{"thinking": true}'),
    )
    prompt = order.request.prompt
    assert isinstance(prompt, Conversation)
    assert ([tool.name for tool in prompt.tools], prompt.tool_choice) == (["f"], "f")
    assert prompt.template_options == {"thinking": True}
    assert order.request.sampling.grammar is not None


def test_calls_are_read_and_constrained_in_the_format_in_use() -> None:
    processor = FAMILY.processor(TARGET, read_target(TARGET), tool_format="qwen3_xml")
    tensors = {
        "messages": strings('[{"role": "user", "content": "hi"}]'),
        "tools": strings('[{"type": "function", "function": {"name": "f"}}]'),
        "tool_choice": strings("required"),
    }
    order = read_order(tensors, {}, SERVING, ServedModel(("tiny",), 1024, GREEDY, processor))
    grammar = order.request.sampling.grammar
    assert grammar is not None
    assert "<function=f>" in grammar.source
    assert order.parser is not None
    text = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    order.parser.push(text)
    assert order.parser.message.calls == [("f", '{"a": "1"}')]


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"text_input": "hi", "tools": "[]"}, "tools: needs messages, got text_input"),
        ({"messages": "[]", "tools": "{}"}, "tools: expected a JSON list of tools"),
        ({"messages": "[]", "tool_choice": "f"}, "tool_choice: expected"),
        ({"messages": "[]", "response_format": "5"}, "response_format: expected a JSON object"),
        ({"text_input": "hi", "logit_bias": '{"a": 1}'}, "logit_bias: expected token ids"),
        ({"text_input": "hi", "structured_outputs": "{"}, "structured_outputs: not JSON"),
    ],
)
def test_bad_json_is_refused_by_its_input(tensors: dict[str, str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        read(**{name: strings(text) for name, text in tensors.items()})


def test_parameters_of_the_server_and_headers_are_let_through() -> None:
    assert read(
        {"id": "7", "triton_enable_empty_final_response": True, "x-user": "me"},
        text_input=strings("hi"),
    )


@pytest.mark.parametrize("name", ["beam_width", "Temperature", "text_output", ""])
def test_unknown_parameter_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="unknown input"):
        read({name: 1}, text_input=strings("hi"))


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({}, "neither"),
        ({"text_input": strings("a"), "messages": strings("[]")}, "both"),
        ({"text_input": strings(b"\x80")}, "text_input: not UTF-8 at byte 0"),
        ({"messages": strings("{}")}, "expected a JSON list"),
        ({"messages": strings("")}, "not JSON"),
        (
            {"text_input": strings("a"), "video": strings("[3]")},
            "expected a JSON list of data URIs",
        ),
        ({"text_input": strings("a"), "max_tokens": np.array([0], dtype=np.int32)}, "max_tokens"),
        (
            {"text_input": strings("a"), "stop_words": strings(*"x" * 65)},
            "stop: 65 of them, the limit is 64",
        ),
        ({"text_input": strings("a"), "top_p": np.array([np.nan], dtype=np.float32)}, "top_p"),
    ],
)
def test_bad_tensor_is_refused_in_one_line(tensors: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        read(**tensors)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        (
            {"text_input": strings("x" * (1 << 20) + "x")},
            "text: 1048577 bytes, the limit is 1048576",
        ),
        (
            {"text_input": strings("x"), "stop_words": strings(*["x" * 1000] * 1100)},
            "text: 1100001 bytes",
        ),
        (
            {"text_input": strings("x"), "stop_words": strings(*["x"] * 70_000)},
            "stop_words: 70000 values",
        ),
        (
            {"text_input": strings("x"), "image_url": strings(*["x"] * 70_000)},
            "image_url: 70000 values",
        ),
        ({"messages": strings("[" + "{}," * 70_000 + "{}]")}, "messages: more than 65536 values"),
        (
            {"messages": strings('[{"content": "' + "x" * (1 << 20))},
            "messages: more than 1048576 bytes of text",
        ),
        (
            {"text_input": strings("x"), "video": strings("[" + "[]," * 70_000)},
            "video: more than 65536 values",
        ),
    ],
)
def test_what_is_too_much_is_refused_before_it_is_read(
    tensors: dict[str, Any], expected: str
) -> None:
    with pytest.raises(TooLargeError) as caught:
        read(**tensors)
    assert expected in str(caught.value)


@pytest.mark.parametrize("messages", SURROGATES.values(), ids=SURROGATES.keys())
def test_lone_surrogate_is_refused_in_a_line_that_can_be_sent(messages: str) -> None:
    with pytest.raises(UserError, match="not Unicode text") as caught:
        read(messages=strings(messages))
    assert str(caught.value).encode()


def test_characters_are_counted_without_images() -> None:
    serving = ServingConfig(max_prompt_chars=10)
    url = f"data:image/png;base64,{'A' * 25}"
    picture = f'{{"type": "image_url", "image_url": {{"url": "{url}"}}}}'
    assert read(
        serving=serving,
        messages=strings(f'[{{"role": "user", "content": [{picture}, "0123456789"]}}]'),
    )
    for content in ('"01234567890"', '[{"type": "text", "text": "012345"}, "67890"]'):
        with pytest.raises(UserError, match="prompt: 11 characters, the limit is 10"):
            read(serving=serving, messages=strings(f'[{{"role": "user", "content": {content}}}]'))
