"""Qwen3 checkpoints as transformers writes them: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.qwen3 import save_qwen3
from trt_eagle3.checkpoint.target import TargetCheckpoint, target_from_dict, target_to_dict
from trt_eagle3.checkpoint.tensor_index import read_tensor
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import family_of, read_target

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


def save_random(folder: Path, **changes: Any) -> Qwen3ForCausalLM:
    """A random Qwen3 as transformers saves it."""
    config = {
        "vocab_size": 40,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**config | changes)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return model


@given(
    heads=st.sampled_from([(2, 1), (4, 2), (3, 3)]),
    head_dim=st.sampled_from([8, 16]),
    layers=st.integers(1, 3),
    tied=st.booleans(),
    bias=st.booleans(),
)
def test_read_target_any_geometry_is_what_transformers_wrote(
    heads: tuple[int, int],
    head_dim: int,
    layers: int,
    tied: bool,
    bias: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("qwen3")
    model = save_random(
        folder,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=head_dim,
        num_hidden_layers=layers,
        tie_word_embeddings=tied,
        attention_bias=bias,
    )
    spec = read_target(folder)
    attention = spec.attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (*heads, head_dim)
    assert (attention.qkv_bias, attention.out_bias, spec.tied_head) == (bias, bias, tied)
    assert (spec.num_layers, spec.num_visual_levels, spec.vision) == (layers, 0, None)
    assert attention.rope.layout == "1d"
    _check_tensors(spec, model)
    again = target_from_dict(json.loads(json.dumps(target_to_dict(spec))))
    assert (again.family, again.layers, again.norm) == ("qwen3", spec.layers, spec.norm)


def _check_tensors(spec: TargetCheckpoint, model: Qwen3ForCausalLM) -> None:
    weights = {name.removeprefix("model."): t for name, t in model.state_dict().items()}
    assert spec.tensors.keys() == weights.keys()
    assert all(torch.equal(read_tensor(spec.tensors[n]), t) for n, t in weights.items())


def test_target_to_dict_equal_layers_are_one_run_with_a_count(tmp_path: Path) -> None:
    spec = read_target(save_qwen3(tmp_path / "target"))
    (run,) = target_to_dict(spec)["layers"]
    assert run["count"] == 8


@pytest.mark.parametrize("count", [0, -1, 10**9])
def test_target_from_dict_refuses_a_count_that_no_decoder_has(count: int, tmp_path: Path) -> None:
    plain = target_to_dict(read_target(save_qwen3(tmp_path / "target")))
    plain["layers"][0]["count"] = count
    with pytest.raises(ValueError, match="count"):
        target_from_dict(plain)


def test_read_target_yarn_has_transformers_frequencies_and_reach(tmp_path: Path) -> None:
    rope = YARN | {"rope_theta": 1e6}
    spec = read_target(save_qwen3(tmp_path / "target", rope_scaling=rope, rope_theta=1e6))
    config = Qwen3Config(head_dim=64, max_position_embeddings=4096, rope_parameters=rope)
    inv_freq, scaling = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    found = spec.attention.rope
    np.testing.assert_allclose(found.inv_freq, inv_freq.numpy(), rtol=1e-6)
    assert found.attention_scaling == pytest.approx(scaling)
    assert spec.max_position_embeddings == 4 * 4096


def test_family_of_a_text_target_has_no_tower(tmp_path: Path) -> None:
    spec = read_target(save_qwen3(tmp_path / "target"))
    assert family_of(spec).vision is None
    with pytest.raises(UserError, match="reads text only"):
        spec.require_vision()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sliding window": (
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 4},
        "sliding window attention",
    ),
    "sliding layer": (
        {"layer_types": ["full_attention"] * 7 + ["sliding_attention"]},
        "sliding window attention",
    ),
    "layer types": ({"layer_types": ["full_attention"]}, "layer_types: expected 8 of them, got 1"),
    "classifier": (
        {"architectures": ["Qwen3ForSequenceClassification"]},
        "expected a Qwen3 that generates text .*Qwen3ForSequenceClassification",
    ),
    "quantised": ({"quantization_config": {"quant_method": "awq"}}, "names awq, but no weight is"),
    "MoE": ({"model_type": "qwen3_moe"}, "expected a Qwen3 that generates text .Qwen3MoeFor"),
    "endless layers": ({"num_hidden_layers": 10**9}, "1000000000 decoder layers"),
    "bias": ({"attention_bias": True}, r"q_proj\.bias.* missing"),
    "no theta": ({"rope_theta": None}, "rope_theta: expected a number above 1, got None"),
    "dynamic": (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_type dynamic: not supported",
    ),
    "yarn without factor": ({"rope_scaling": {"rope_type": "yarn"}}, "needs factor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_read_target_what_cannot_be_a_target_is_refused(case: str, tmp_path: Path) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as caught:
        read_target(save_qwen3(tmp_path / "target", **changes))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_read_target_window_that_no_layer_reaches_is_full_attention(tmp_path: Path) -> None:
    changes = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 8}
    assert read_target(save_qwen3(tmp_path / "target", **changes)).num_layers == 8


def test_read_target_a_tower_in_a_text_checkpoint_is_surplus(tmp_path: Path) -> None:
    folder = save_qwen3(tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    tensors["visual.pos_embed.weight"] = torch.ones(4, 4)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"visual\.pos_embed\.weight surplus"):
        read_target(folder)
