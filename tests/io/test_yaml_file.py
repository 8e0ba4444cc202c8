"""Keys that stand twice are refused, with the line; everything else is PyYAML's."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from trt_eagle3.config import load_config
from trt_eagle3.errors import UserError
from trt_eagle3.io.assignments import parse_assignments
from trt_eagle3.io.yaml_file import parse_yaml, read_yaml
from trt_eagle3.parity.checks.thresholds import read_overrides


@pytest.mark.parametrize(
    "text", ["name: a\nname: b\n", "engine:\n  dtype: float16\n  dtype: float32\n", "{a: 1, a: 1}"]
)
def test_key_that_stands_twice_is_one_line_with_its_place(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    for read in (load_config, read_overrides):
        with pytest.raises(UserError, match=r"key (name|dtype|a) appears twice.*line \d") as caught:
            read(file)
        assert "\n" not in str(caught.value)


def test_anchors_merges_and_equal_keys_of_other_mappings_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "one: &one {x: 1, y: 2}\ntwo: {<<: *one, x: 3}\nthree: [{x: 1}, {x: 2}]\n'1': a\n1: b\n"
    )
    found = read_yaml(file)
    assert found["two"] == {"x": 3, "y": 2}
    assert found["three"] == [{"x": 1}, {"x": 2}]
    assert (found["1"], found[1]) == ("a", "b")


def _laughs(levels: int, width: int = 9, merge: bool = False) -> str:
    lines = ["l0: &l0 {a: lol}" if merge else "l0: &l0 [lol]"]
    for level in range(1, levels):
        aliases = ", ".join([f"*l{level - 1}"] * width)
        lines.append(
            f"l{level}: &l{level} {{<<: [{aliases}]}}"
            if merge
            else f"l{level}: &l{level} [{aliases}]"
        )
    return "\n".join(lines)


HOSTILE = {
    "billion laughs": (_laughs(20), "more than 20000 keys and values, line 6"),
    "billion merges": (_laughs(20, merge=True), "more than 20000 keys and values"),
    "alias to itself": ("a: &a [*a]", "an alias to what contains it, line 1"),
    "nested deep": ("[" * 500_000, "nested deeper than 64"),
    "nested a level too deep": ("[" * 65 + "]" * 65, "nested deeper than 64"),
    "many values": ("[" + "a," * 400_000 + "]", "more than 20000 keys and values"),
    "long": ("a" * (2 << 20), "expected at most"),
    "no such day": ("2020-13-45", "month must be in 1..12"),
    "no day at all": ("!!timestamp x", "not YAML"),
    "no flag": ("!!bool x", "not YAML"),
    "no number": ("!!float x", "not YAML"),
    "long number": ("1" * 5000, "not YAML"),
    "list as a key": ("{[1]: 2}", "unhashable key"),
    "control character": ("a: \x07", "special characters are not allowed"),
    "object of Python": (
        "!!python/object/apply:os.system [echo]",
        "could not determine a constructor",
    ),
    "long key twice": (f"{'k' * 900}: 1\n{'k' * 900}: 2\n", "appears twice, line 2"),
    "cut off": ("{a: ", "not YAML"),
    "two documents": ("a: 1\n---\nb: 2\n", "expected a single document"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_yaml_is_one_short_line_soon(case: str) -> None:
    text, message = HOSTILE[case]
    start = time.process_time()
    with pytest.raises(UserError, match=message) as caught:
        parse_yaml(text, "it")
    assert time.process_time() - start < 8
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


def test_aliases_within_the_bound_are_fine() -> None:
    assert len(str(parse_yaml(_laughs(4), "it"))) > 1000


@pytest.mark.parametrize("word", ["a=2020-13-45", "a=!!bool x", "a=" + "[" * 9999])
def test_override_that_is_no_yaml_is_one_line(word: str) -> None:
    with pytest.raises(UserError, match="the value is not YAML") as caught:
        parse_assignments([word])
    assert len(str(caught.value)) < 600


def test_config_that_is_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "c.yaml")
    for read in (load_config, read_overrides):
        with pytest.raises(UserError, match="got a FIFO"):
            read(tmp_path / "c.yaml")
