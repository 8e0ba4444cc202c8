"""Words KEY=VALUE of a command line."""

from __future__ import annotations

import pytest

from trt_eagle3.errors import UserError
from trt_eagle3.io.assignments import parse_assignments


def test_dots_make_sections_and_values_are_yaml() -> None:
    found = parse_assignments(["a.b=1", "a.c=[x, 2]", "d=text"])
    assert found == {"a": {"b": 1, "c": ["x", 2]}, "d": "text"}


@pytest.mark.parametrize("words", [("rope=1", "rope.base=2"), ("aux_layers=[1]", "aux_layers.x=2")])
def test_parts_of_a_plain_value_are_refused(words: tuple[str, str]) -> None:
    with pytest.raises(UserError, match=r"--override .*has the value .* already"):
        parse_assignments(words, "--override")


@pytest.mark.parametrize("option", ["--set", "--override"])
def test_word_without_a_value_names_its_option(option: str) -> None:
    with pytest.raises(UserError, match=f"^{option} limits: expected KEY=VALUE, .*{option} "):
        parse_assignments(["limits"], option)
