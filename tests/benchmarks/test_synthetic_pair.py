"""A synthetic pair that builds and answers: every id has a token, prompts have exact lengths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import synthetic
from benchmarks.synthetic_pair import write_pair, write_prompts
from tests.tiny import TARGET
from trt_eagle3.config import BuildConfig
from trt_eagle3.decode.llm import LLM
from trt_eagle3.errors import UserError
from trt_eagle3.pipeline import build

SMALL = (256, 8, 2, 1, 256, False, 4, 256, 512, (0, 1, 2))
VOCAB = 4096


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "SIZES", {"8b": SMALL})
    monkeypatch.setattr(synthetic, "_VOCAB", VOCAB)
    monkeypatch.setattr(synthetic, "_DRAFT_VOCAB", VOCAB // 2)


def test_synthetic_pair_answers_prompts_of_exact_lengths_with_text(tmp_path: Path) -> None:
    write_pair(tmp_path, "8b", TARGET, device="cpu")
    write_prompts(tmp_path / "prompts.json", 100, 2)
    (first, second) = (
        entry["prompt"] for entry in json.loads((tmp_path / "prompts.json").read_text())
    )
    config = {
        "name": "pair",
        "target": {"checkpoint": str(tmp_path / "target")},
        "draft": {"checkpoint": str(tmp_path / "draft")},
        "limits": {"max_seq_len": 160},
    }
    path = build(BuildConfig.model_validate(config), output=tmp_path, reference_weights=True).path
    with LLM(path) as llm:
        template = len(llm.prepare("<t1>").token_ids) - 1
        assert len(llm.prepare(first).token_ids) == 100 + template
        answer = llm.generate(first, max_tokens=8, ignore_eos=True)
        assert len(answer.token_ids) == 8
        assert len(set(answer.token_ids)) > 1, "weights are drawn, not zero"
        assert answer.text.startswith("<t")
        assert answer.token_ids != llm.generate(second, max_tokens=8, ignore_eos=True).token_ids


def test_processor_without_a_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Give --processor a checkpoint"):
        write_pair(tmp_path / "pair", "8b", _without_tokenizer(tmp_path / "given"), device="cpu")


def _without_tokenizer(folder: Path) -> Path:
    folder.mkdir()
    for file in TARGET.glob("*.*"):
        if file.name not in {"tokenizer.json", "model.safetensors"}:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder
