"""Random targets of every family with drafts: tokens are transformers', in float32."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.families.odd_pairs import LAYOUTS, ODD
from tests.families.text_pairs import check_speculation
from trt_eagle3.families.registry import FAMILIES

RUNS = {LAYOUTS[0]: ("torch", "speculators"), LAYOUTS[1]: ("onnxruntime", "specforge")}
"""Layout -> backend, and producer of the draft."""


def test_every_family_has_an_odd_target() -> None:
    assert ODD.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", ODD)
def test_tokens_with_and_without_speculation_are_transformers(family: str, tmp_path: Path) -> None:
    answer = ODD[family].save_pairs(tmp_path)
    assert len(set(answer)) > 3, "an answer that repeats itself shows little"
    for layout, (backend, draft) in RUNS.items():
        check_speculation(tmp_path / layout, tmp_path / draft, tmp_path / backend, backend, answer)
