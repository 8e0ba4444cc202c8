"""The memory that is reckoned before a calibration, against every tensor that it makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.calibration.conftest import text_prompts
from tests.calibration.live_bytes import LiveBytes
from tests.hybrid import save_qwen3_5_moe_text
from trt_eagle3.calibration.activations import RowStatistics
from trt_eagle3.calibration.footprint import reckon_bytes
from trt_eagle3.calibration.prompts import CalibrationPrompts
from trt_eagle3.calibration.run import calibrate
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.families.registry import read_target

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


def hybrid(folder: Path) -> TargetCheckpoint:
    """Linear attention, and a mixture with a shared expert."""
    own = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    own |= {"linear_num_value_heads": 4, "linear_value_head_dim": 32, "head_dim": 16}
    own |= _EXPERTS | {"shared_expert_intermediate_size": 64}
    save_qwen3_5_moe_text(folder, **_SHAPE | own).bfloat16().save_pretrained(folder)
    return read_target(folder)


def counted(spec: TargetCheckpoint, of: CalibrationPrompts, folder: Path) -> int:
    with torch.inference_mode(), LiveBytes() as live:
        calibrate(spec, of, "cpu", folder)
    return live.peak


@pytest.mark.parametrize("make", [dense, sparse, hybrid])
def test_reckoned_bytes_are_those_of_all_tensors(
    make: Callable[[Path], TargetCheckpoint], tmp_path: Path
) -> None:
    spec, of = make(tmp_path / "target"), text_prompts(12, 64)
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
    spec, of = dense(tmp_path / "target"), text_prompts(24, 64)
    taken = counted(spec, of, tmp_path)
    assert taken > reckon_bytes(spec, of, "cpu", weights=True)
