"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.multimodal.bombs import endless_jpeg
from tests.serving.site import Site, serving
from tests.triton.server import data_uri
from trt_eagle3.decode.llm import LLM, load
from trt_eagle3.decode.request.conversation import Conversation
from trt_eagle3.multimodal.tokenizer import TokenBytes
from trt_eagle3.serving import ServingConfig


def post(site: Site, path: str, **body: Any) -> tuple[int, Any]:
    status, text, _ = site.request("POST", path, body)
    return status, json.loads(text)


def test_text_and_messages_are_the_tokens_of_their_prompts(site: Site, engine: LLM) -> None:
    text = "<|im_start|>héllo 🙂"
    _, found = post(site, "/tokenize", prompt=text, return_token_strs=True)
    assert found["tokens"] == engine.bundle.processor.tokenize(text)
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 1024)
    assert found["token_strs"][0] == "<|im_start|>"
    assert post(site, "/detokenize", tokens=found["tokens"])[1] == {"prompt": text}
    messages = [{"role": "user", "content": "hi"}]
    _, found = post(site, "/tokenize", messages=messages)
    assert found["tokens"] == engine.prepare(messages).token_ids.tolist()
    messages = [*messages, {"role": "assistant", "content": "hel"}]
    for ending in ({"add_generation_prompt": False}, {"continue_final_message": True}):
        _, found = post(site, "/tokenize", messages=messages, **ending)
        expected = engine.prepare(Conversation(messages, **ending)).token_ids.tolist()
        assert found["tokens"] == expected


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": [5]}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [99_999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**400]}, "tokens"),
        ("/tokenize", {"messages": [], "add_generation_prompt": 5}, "add_generation_prompt"),
        (
            "/tokenize",
            {"messages": [], "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
    ],
)
def test_bad_body_is_a_400(site: Site, path: str, body: Any, param: str) -> None:
    status, found = post(site, path, **body)
    assert (status, found["error"]["param"]) == (400, param), found


def test_bytes_of_tokens_join_to_the_text(engine: LLM) -> None:
    processor, text = engine.bundle.processor, "a\x00 é漢🙂\n<|im_end|> z"
    token_bytes = TokenBytes(processor.tokenizer)
    assert b"".join(map(token_bytes, processor.tokenize(text))).decode() == text
    assert token_bytes(10**6) == b""


def test_images_that_decode_slowly_are_given_up_in_time(engine: LLM) -> None:
    url = data_uri(endless_jpeg(), "image/jpeg")
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    config = ServingConfig(max_request_s=0.5)
    patient = load(engine.bundle.path, media=replace(config.media(), max_jpeg_scans=None))
    with patient, serving(patient, config) as site:
        start = time.monotonic()
        status, found = post(site, "/tokenize", messages=messages)
        assert (status, found["error"]["code"]) == (504, "timeout")
        assert time.monotonic() - start < 8, "of half a minute or more"
        assert post(site, "/tokenize", prompt="a")[0] == 200
