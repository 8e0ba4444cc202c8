"""Texts are encoded in bounded processes: as the library does, and by tokenizers of strangers."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.multimodal.conftest import GOLDENS
from trt_eagle3.errors import RequestCancelledError, UserError
from trt_eagle3.multimodal import text_encoder
from trt_eagle3.multimodal.caller import Caller
from trt_eagle3.multimodal.text_encoder import TextEncoder
from trt_eagle3.multimodal.tokenizer import load_tokenizer

FILE = GOLDENS / "processor" / "tokenizer.json"
SOURCE = json.loads(FILE.read_text())
TOKENIZER = Tokenizer.from_file(str(FILE))
TEXTS = ("", "Hello, <|im_start|>world", "\u4e2d\u6587 \U0001f600", "x" * 10_000, "a\r\n\t b")


def changed(**parts: Any) -> str:
    return json.dumps({**SOURCE, **parts})


def split_by(pattern: str) -> dict[str, Any]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {"type": "Sequence", "pretokenizers": [split, {**level, "use_regex": False}]}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(what: str, part: dict[str, Any], times: int) -> dict[str, Any]:
    return {"type": "Sequence", what: [part] * times}


DOUBLED = sequence("normalizers", replace({"String": "x"}, "xx"), 40)
SLOW = changed(pre_tokenizer=split_by("x{0,3000}x{0,3000}[yz]"))
SLOW_TEXT = "x" * 3000 + "ay"
HOSTILE = {
    "panic": (changed(pre_tokenizer=split_by("(x+x+)+y")), "x" * 3000, "retry-limit-in-match over"),
    "memory": (changed(normalizer=DOUBLED), "x" * 3000, "was stopped: the checkpoint's tokenizer"),
    "time": (SLOW, SLOW_TEXT, "took more than 2.03 s"),
}


@pytest.fixture(scope="module", autouse=True)
def end() -> Iterator[None]:
    yield
    text_encoder._PROCESS.close()


def test_ids_are_those_of_the_library() -> None:
    encoder = TextEncoder.of(TOKENIZER)
    assert [encoder.encode(text) for text in TEXTS] == [TOKENIZER.encode(t).ids for t in TEXTS]
    bare = [encoder.encode(text, add_special_tokens=False) for text in TEXTS]
    assert bare == [TOKENIZER.encode(text, add_special_tokens=False).ids for text in TEXTS]


def test_added_tokens_have_the_ids_that_the_library_gives_them() -> None:
    encoder = TextEncoder(changed, [("<new>", {"normalized": False})], encode_special_tokens=True)
    tokenizer = Tokenizer.from_file(str(FILE))
    tokenizer.encode_special_tokens = True
    tokenizer.add_tokens(["<new>"])
    assert encoder.added_ids == [tokenizer.token_to_id("<new>")]
    text = "a<new>b<|im_end|>"
    assert encoder.encode(text) == tokenizer.encode(text).ids


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tokenizer_refuses_a_text_in_one_line_and_the_next_is_encoded(name: str) -> None:
    source, text, reason = HOSTILE[name]
    encoder = TextEncoder(lambda: source)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=reason) as caught:
        encoder.encode(text)
    assert str(caught.value).startswith("prompt: ")
    assert str(caught.value).isprintable()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "KiB"
    assert encoder.encode("Hello") == TOKENIZER.encode("Hello").ids


def test_text_that_nobody_waits_for_is_given_up() -> None:
    encoder, left = TextEncoder(lambda: SLOW), threading.Event()
    assert encoder.encode("Hello") == TOKENIZER.encode("Hello").ids
    threading.Timer(0.05, left.set).start()
    start = time.process_time()
    with pytest.raises(RequestCancelledError):
        encoder.encode(SLOW_TEXT, Caller(cancelled=left.is_set))
    assert time.process_time() - start < 1
    assert encoder.encode("Hello") == TOKENIZER.encode("Hello").ids


def test_process_that_was_killed_is_replaced_and_loads_the_tokenizer_again() -> None:
    encoder = TextEncoder.of(TOKENIZER)
    ids = encoder.encode("Hello")
    for process in text_encoder._PROCESS._all:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert encoder.encode("Hello") == ids


def saved(directory: Path, source: str) -> Path:
    (directory / "tokenizer.json").write_text(source)
    return directory


BROKEN = {
    "aborts": (
        changed(normalizer={"type": "Precompiled", "precompiled_charsmap": "/////w=="}),
        "loading it takes more than",
    ),
    "panics": (
        changed(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "q", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        ),
        "no entry found for key",
    ),
    "bad pattern": (changed(pre_tokenizer=split_by("(((")), "unmatched parenthesis"),
    "decoder with a pattern": (
        changed(decoder=sequence("decoders", replace({"Regex": "(x+x+)+y"}, "z"), 1)),
        "its decoder replaces a regular expression, expected a fixed text",
    ),
    "decoder that strips without end": (
        changed(decoder={"type": "Strip", "content": "x", "start": 1 << 63, "stop": 0}),
        "its decoder strips more than 65536 characters",
    ),
    "decoder that multiplies": (
        changed(decoder=sequence("decoders", replace({"String": "x"}, "xx"), 7)),
        "its decoder lengthens a text more than 64 times",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_tokenizer_that_cannot_be_loaded_in_bounds_is_refused_in_one_line(
    name: str, tmp_path: Path
) -> None:
    source, reason = BROKEN[name]
    with pytest.raises(UserError, match=rf"broken tokenizer \(.*{reason}.*\)\. Copy"):
        load_tokenizer(saved(tmp_path, source))


def test_decoder_of_a_sentencepiece_model_is_taken(tmp_path: Path) -> None:
    decoders = [
        replace({"String": "\u2581"}, " "),
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    source = changed(decoder={"type": "Sequence", "decoders": decoders})
    assert load_tokenizer(saved(tmp_path, source)).get_vocab_size() == TOKENIZER.get_vocab_size()
