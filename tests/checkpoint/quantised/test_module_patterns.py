"""Patterns of modules: what Python's ``re`` and ``fnmatch`` mean by them, in linear time."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from trt_eagle3.checkpoint.quantised.claim import Claim
from trt_eagle3.checkpoint.quantised.module_patterns import ModulePatterns
from trt_eagle3.errors import UserError

CLAIM = Claim("compressed-tensors", {}, Path("checkpoint/config.json"), "quantization_config")
LAYER = "model.language_model.layers"
NAMES = (
    "lm_head",
    "mtp.fc",
    "model.mtp.layers.0.mlp.gate",
    "model.visual.blocks.0.attn.qkv",
    f"{LAYER}.1.mlp.gate_proj",
    f"{LAYER}.10.mlp.gate",
    f"{LAYER}.10.mlp.experts.127.down_proj",
)
# As llm-compressor, ModelOpt, GPTQModel and AutoRound write them; and what is odd of each kind.
REGEXES = (
    r"(model\.)?mtp\..*",
    r".*visual.*",
    r".*mlp.gate$",
    r"^lm_head$",
    r"model\.language_model\.layers\.(0|1|2|3)\..*",
    r".*layers\.(\d+)\.mlp\.(gate|up)_proj",
    r"(?:.*\.)?(?P<what>gate|fc)$",
    r"(?i)LM_HEAD",
    r".*\.layers\.(1[0-9]|2[0-7])\..*",
    r"[^.]+(\.[^.]+){3}",
    r"(a+)+$",
    r".*a.*b.*c.*d",
    "mtp",
    "gate",
)


def meant(pattern: str) -> list[str]:
    patterns = ModulePatterns([pattern], CLAIM)
    return [name for name in NAMES if patterns.first(name) == pattern]


@pytest.mark.parametrize("text", REGEXES)
def test_regular_expression_means_what_pythons_does(text: str) -> None:
    assert meant(f"re:{text}") == [name for name in NAMES if re.match(text, name)]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("lm_head", NAMES[:1]),
        ("model.visual", NAMES[3:4]),
        ("gate", (NAMES[2], NAMES[5])),
        ("layers.1", NAMES[4:5]),
        ("model.visual*", NAMES[3:4]),
        ("*.mlp.gate", (NAMES[2], NAMES[5])),
        ("*layers.[0-1].*", (NAMES[2], NAMES[4])),
        ("visual.blocks.?", ()),
        ("model", NAMES[2:]),
        ("mode", ()),
    ],
)
def test_name_or_glob_means_whole_parts_or_the_whole_name(
    pattern: str, expected: tuple[str, ...]
) -> None:
    found = [name for name in NAMES if ModulePatterns([pattern], CLAIM).first(name)]
    assert found == list(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(?=a)b", "lookahead: not supported"),
        ("(?!a)b", "lookahead: not supported"),
        ("(?<=a)b", "lookbehind: not supported"),
        ("(?<!a)b", "lookbehind: not supported"),
        (r"(a)\1", "backreferences: not supported"),
        ("(?P<x>a)(?P=x)", "backreferences: not supported"),
        ("(?>a)b", "atomic groups: not supported"),
        ("(a)(?(1)b|c)", "conditions: not supported"),
        ("a++", "bad repetition operator: ++"),
        ("layers.{,3}gate", "{,3}: not supported"),
        ("a{99999999999}", "{99999999999: not supported"),
        ("[[:alpha:]]+", "[:alpha:]: not supported"),
        ("(" * 900 + ")" * 899, "missing )"),
        (".?" * 1001, "2002 characters, expected at most 2000"),
        ("(.?){1000}" * 3, "at most 20000 instructions"),
    ],
)
def test_expression_that_re2_cannot_express_is_refused_by_its_name(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        ModulePatterns([f"re:{text}"], CLAIM)
    assert str(caught.value).startswith("checkpoint/config.json: quantization_config: ")
    assert message in str(caught.value)


def test_expressions_that_hang_pythons_engine_end_at_once() -> None:
    hostile = [".?" * 60 + "!", "(a+)+!", "(.*a){400}!", "(.{0,30}){20}!"]
    patterns = ModulePatterns([*(f"re:{text}" for text in hostile), "*a" * 249], CLAIM)
    began = time.process_time()
    assert all(patterns.first("a" * 120) is None for _ in range(20))
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ([f"re:{n}(.?){{500}}" for n in range(500)], "instructions in all"),
        ([f"*{n}*" for n in range(2001)], "at most 2000 patterns with wildcards"),
        (["*a" * 300], "the longest of 600"),
    ],
)
def test_work_of_all_patterns_together_is_bounded(patterns: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ModulePatterns(patterns, CLAIM)


def test_names_without_patterns_are_unlimited_and_looked_up_at_once() -> None:
    names = [f"{LAYER}.{i // 128}.mlp.experts.{i % 128}.up_proj" for i in range(20_000)]
    patterns = ModulePatterns(names, CLAIM)
    began = time.process_time()
    assert all(patterns.first(name) == name for name in names[::10])
    assert time.process_time() - began < 1
