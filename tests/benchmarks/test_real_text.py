"""The figures of benchmarks.real_text: margins of tokens, and prompts by kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.real_text import margin_ratios, mean_length, read_kinds
from tests.tiny import ROOT
from trt_eagle3.errors import UserError


def test_margin_of_the_preferred_token_is_zero_and_of_another_its_distance() -> None:
    logits = torch.tensor([[3.0, 0.0, -4.0], [1.0, 7.0, 0.0]])
    ratios = margin_ratios(logits, [0, 0])
    rms = (50 / 3) ** 0.5
    torch.testing.assert_close(ratios, torch.tensor([0.0, 6 / rms]))


def test_mean_length_without_drafts_is_none() -> None:
    assert mean_length([]) is None


def test_prompts_are_cut_by_kind() -> None:
    kinds = read_kinds(ROOT / "examples/smollm2/prompts.json", 2)
    assert {kind: len(prompts) for kind, prompts in kinds.items()} == dict.fromkeys(
        ("chat", "code", "mathematics", "summary", "translation"), 2
    )


def test_prompts_without_kinds_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    file.write_text('[{"prompt": "Hello"}]')
    with pytest.raises(UserError, match="expected a JSON list"):
        read_kinds(file, 2)
