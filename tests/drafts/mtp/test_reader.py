"""Reading MTP heads: what they are, and what is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.drafts.mtp.head import add_head, change_config, read_head, save_tensors
from tests.hybrid import save_qwen3_5, save_qwen3_5_moe_text, save_qwen3_5_text
from tests.tiny import TARGET
from trt_eagle3.checkpoint.manifest import manifest_to_dict
from trt_eagle3.config import EngineConfig, LimitsConfig
from trt_eagle3.drafts.registry import find_draft, manifest_from_dict
from trt_eagle3.engine.runtime.memory import kv_bytes_per_token, memory_need
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import read_target
from trt_eagle3.spec import SparseMoe

HIDDEN = 24


def told(folder: Path, **overrides: Any) -> str:
    """The one line in which the head of ``folder`` is refused."""
    with pytest.raises(UserError) as caught:
        find_draft("mtp", read_target(folder), overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_head_is_read_from_the_targets_own_checkpoint(tmp_path: Path) -> None:
    save_qwen3_5(tmp_path)
    add_head(tmp_path)
    target, m = read_target(tmp_path), read_head(tmp_path)
    assert not any(name.startswith("mtp.") for name in target.tensors)
    assert (m.aux_layers, m.takes_normed, m.aux_names) == ((3,), True, ("norm",))
    assert (m.image_rows, m.image_rows_rotated, m.positions) == ("vision", True, "3d")
    assert (m.concat, m.feedback, m.norm_offset) == ("embedding_first", "post_norm", 1.0)
    assert (m.embedding, m.head, m.draft_vocab_size) == ("target", "target", 40)
    assert m.attention.output_gate
    assert m.tensors["fc.weight"].shape == (HIDDEN, 2 * HIDDEN)
    assert m.tensors["lm_head.weight"] == target.tensors["lm_head.weight"]
    assert m.sources["hidden"].kind == "convention"


def test_manifest_survives_the_bundle(tmp_path: Path) -> None:
    save_qwen3_5_moe_text(tmp_path)
    manifest = read_head(add_head(tmp_path), concat="hidden_first")
    found: Any = manifest_from_dict(manifest_to_dict(manifest))
    assert manifest_to_dict(found) == manifest_to_dict(manifest)
    assert isinstance(found.layer.mlp, SparseMoe)
    assert found.sources["concat"].kind == "override"


def test_head_of_a_text_model_has_no_vision_rows(tmp_path: Path) -> None:
    save_qwen3_5_text(tmp_path)
    assert read_head(add_head(tmp_path)).image_rows == "pad"


def test_memory_counts_weights_pages_and_rows_of_the_head(tmp_path: Path) -> None:
    save_qwen3_5_moe_text(tmp_path)
    manifest, target = read_head(add_head(tmp_path)), read_target(tmp_path)
    sizes = (LimitsConfig(), EngineConfig())
    with_head, without = (memory_need(target, m, *sizes) for m in (manifest, None))
    values = sum(
        t.numel()
        for n, t in load_file(tmp_path / "model.safetensors").items()
        if n.startswith("mtp.")
    )
    assert with_head.weights - without.weights == 4 * (values + 40 * HIDDEN)
    pages = kv_bytes_per_token(target, manifest, "float32") - kv_bytes_per_token(
        target, None, "float32"
    )
    assert pages == 2 * 4 * manifest.num_kv_heads * manifest.head_dim


def test_older_config_that_announces_nothing_is_read(tmp_path: Path) -> None:
    save_qwen3_5_text(tmp_path)
    add_head(tmp_path)
    change_config(tmp_path, mtp_num_hidden_layers=None)
    assert read_head(tmp_path).num_layers == 1


def _without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def _with(name: str, *shape: int) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__setitem__(name, torch.zeros(shape))


BAD: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "a missing norm": (
        _without("mtp.pre_fc_norm_hidden.weight"),
        "mtp.pre_fc_norm_hidden.weight missing",
    ),
    "fc of one half": (
        _with("mtp.fc.weight", HIDDEN, HIDDEN),
        f"mtp.fc.weight: expected shape [{HIDDEN}, {2 * HIDDEN}] by config.json, got "
        f"[{HIDDEN}, {HIDDEN}]",
    ),
    "q_proj without its gate": (
        _with("mtp.layers.0.self_attn.q_proj.weight", 64, HIDDEN),
        "mtp.layers.0.self_attn.q_proj.weight: expected shape [128, 24]",
    ),
    "a tensor that no head has": (_with("mtp.fc.bias", HIDDEN), "mtp.fc.bias surplus"),
    "two layers": (
        _with("mtp.layers.1.input_layernorm.weight", HIDDEN),
        "expected an MTP head of one layer, got 2",
    ),
    "a table of its own": (
        _with("mtp.embed_tokens.weight", 40, HIDDEN),
        "mtp.embed_tokens.weight: an MTP head with its own table is not supported",
    ),
}


ANNOUNCED: dict[str, tuple[dict[str, Any], str]] = {
    "two layers, and one is there": (
        {"mtp_num_hidden_layers": 2},
        "mtp_num_hidden_layers: expected 1, the number of mtp.layers.*, got 2",
    ),
    "none, and one is there": (
        {"mtp_num_hidden_layers": 0},
        "mtp_num_hidden_layers: expected 1 or more beside mtp.* tensors, got 0",
    ),
    "a number that is none": (
        {"mtp_num_hidden_layers": "one"},
        "mtp_num_hidden_layers: expected a whole number from 0 to 2147483647, got 'one'",
    ),
    "a table that is not there": (
        {"mtp_use_dedicated_embeddings": True},
        "mtp_use_dedicated_embeddings: true, but the checkpoint has no mtp.embed_tokens.weight",
    ),
}


@pytest.mark.parametrize("name", ANNOUNCED)
def test_head_that_is_announced_otherwise_is_told_in_one_line(name: str, tmp_path: Path) -> None:
    save_qwen3_5_text(tmp_path)
    changes, message = ANNOUNCED[name]
    add_head(tmp_path, **changes)
    read_target(tmp_path)  # nothing drafts with it
    assert message in told(tmp_path)


@pytest.mark.parametrize("name", BAD)
def test_broken_head_is_told_in_one_line(name: str, tmp_path: Path) -> None:
    save_qwen3_5_text(tmp_path)
    add_head(tmp_path, mtp_num_hidden_layers=2 if name == "two layers" else 1)
    change, message = BAD[name]
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_tensors(tmp_path, tensors)
    read_target(tmp_path)  # nothing drafts with it
    assert message in told(tmp_path)


def test_expert_that_is_missing_is_told(tmp_path: Path) -> None:
    save_qwen3_5_moe_text(tmp_path)
    add_head(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["mtp.layers.0.mlp.experts.3.up_proj.weight"]
    save_tensors(tmp_path, tensors)
    assert "layers.0.mlp.experts.3.up_proj.weight" in told(tmp_path)


def test_target_as_its_own_draft_is_told_how_to_name_its_head(tmp_path: Path) -> None:
    save_qwen3_5_text(tmp_path)
    add_head(tmp_path)
    with pytest.raises(UserError, match=r"the target itself\. .* draft\.checkpoint: mtp\.$"):
        find_draft(str(tmp_path), read_target(tmp_path), {})


def test_target_without_a_head_is_told(tmp_path: Path) -> None:
    save_qwen3_5_text(tmp_path)
    assert "has no MTP head (no mtp.* tensors)" in told(tmp_path)
    assert "has no MTP head (no mtp.* tensors)" in told(TARGET)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"aux_layers": [1]}, "draft.overrides.aux_layers: the tensors decide it"),
        ({"d2t": "absolute"}, "draft.overrides.d2t: the tensors decide it"),
        ({"residual": "normed"}, "draft.overrides.residual: unknown key"),
        ({"concat": "both"}, "draft.overrides.concat: "),
        ({"position_shift": 3}, "draft.overrides.position_shift: expected 0 or 1, got 3"),
    ],
)
def test_wrong_override_is_told(overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_qwen3_5_text(tmp_path)
    assert message in told(add_head(tmp_path), **overrides)
