"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving.site import Site
from trt_eagle3.decode.llm import LLM
from trt_eagle3.multimodal.tokenizer import TokenBytes


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


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": [5]}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [99_999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
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
