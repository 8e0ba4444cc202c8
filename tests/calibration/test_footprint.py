"""The memory that is reckoned before a calibration, against every tensor that it makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.calibration.live_bytes import LiveBytes
from trt_eagle3.calibration.activations import RowStatistics
from trt_eagle3.calibration.footprint import reckon_bytes
from trt_eagle3.calibration.prompts import CalibrationPrompts
from trt_eagle3.calibration.run import calibrate
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.families.registry import read_target
from trt_eagle3.multimodal import ModelInputs

_SHAPE = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def dense(folder: Path) -> TargetCheckpoint:
    Qwen3ForCausalLM(Qwen3Config(**_SHAPE)).bfloat16().save_pretrained(folder)
    return read_target(folder)


def sparse(folder: Path) -> TargetCheckpoint:
    config = Qwen3MoeConfig(**_SHAPE, **_EXPERTS)
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder)
    return read_target(folder)


def prompts(count: int, tokens: int) -> CalibrationPrompts:
    positions = torch.arange(tokens, dtype=torch.int32).expand(3, -1).contiguous()
    none, visual = torch.zeros(0, 3, dtype=torch.int64), torch.zeros(tokens, dtype=torch.bool)
    ids = torch.randint(0, 128, (count, tokens), generator=torch.Generator().manual_seed(0))
    return CalibrationPrompts([ModelInputs(x, positions, 0, (), none, visual) for x in ids], count)


def counted(spec: TargetCheckpoint, of: CalibrationPrompts, folder: Path) -> int:
    with torch.inference_mode(), LiveBytes() as live:
        calibrate(spec, of, "cpu", folder)
    return live.peak


@pytest.mark.parametrize("make", [dense, sparse])
def test_reckoned_bytes_are_those_of_all_tensors(
    make: Callable[[Path], TargetCheckpoint], tmp_path: Path
) -> None:
    spec, of = make(tmp_path / "target"), prompts(12, 64)
    reckoned, taken = reckon_bytes(spec, of, "cpu", weights=True), counted(spec, of, tmp_path)
    assert taken <= reckoned <= 2 * taken, f"{reckoned:,} reckoned, {taken:,} taken"


def test_rows_that_are_kept_whole_exceed_what_was_reckoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = RowStatistics.add
    kept = []

    def add(self: RowStatistics, rows: Tensor) -> None:
        count(self, rows)
        kept.append(rows.clone())

    monkeypatch.setattr(RowStatistics, "add", add)
    spec, of = dense(tmp_path / "target"), prompts(24, 64)
    taken = counted(spec, of, tmp_path)
    assert taken > reckon_bytes(spec, of, "cpu", weights=True)
