"""Keys that stand twice are refused, with the line; everything else is PyYAML's."""

from __future__ import annotations

from pathlib import Path

import pytest

from trt_eagle3.config import load_config
from trt_eagle3.errors import UserError
from trt_eagle3.parity.thresholds import read_overrides
from trt_eagle3.yaml_file import read_yaml


@pytest.mark.parametrize(
    "text", ["name: a\nname: b\n", "engine:\n  dtype: float16\n  dtype: float32\n", "{a: 1, a: 1}"]
)
def test_key_that_stands_twice_is_one_line_with_its_place(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    for read in (load_config, read_overrides):
        with pytest.raises(UserError, match=r"key (name|dtype|a) stands twice.*line \d") as caught:
            read(file)
        assert "\n" not in str(caught.value)


def test_anchors_merges_and_equal_keys_of_other_mappings_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("one: &one {x: 1, y: 2}\ntwo: {<<: *one, x: 3}\nthree: [{x: 1}, {x: 2}]\n'1': a\n1: b\n")
    found = read_yaml(file)
    assert found["two"] == {"x": 3, "y": 2}
    assert found["three"] == [{"x": 1}, {"x": 2}]
    assert (found["1"], found[1]) == ("a", "b")
