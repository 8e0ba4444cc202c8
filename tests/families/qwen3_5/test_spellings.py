"""Configs of Qwen3.5 as transformers 4.57 to 5.x spell them, each read as transformers reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM

from tests.families.qwen3.test_qwen3 import graph_logits
from tests.families.qwen3_5.test_qwen3_5 import TEXT_IDS
from tests.hybrid import FULL, LINEAR, save_qwen3_5_moe_text, save_qwen3_5_text
from tests.reference.compare import FLOAT32_TOLERANCE
from trt_eagle3.checkpoint.target import target_to_dict
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import read_target
from trt_eagle3.parity.metrics import relative_error

TYPES = {"layer_types": [LINEAR, LINEAR, LINEAR, FULL]}  # as every config's default has them
Values = dict[str, Any]
Change = Callable[[Values], Values]


def _old_rope(config: Values) -> Values:
    rope = config.pop("rope_parameters")
    theta, part = (rope.pop(key) for key in ("rope_theta", "partial_rotary_factor"))
    return config | {"rope_scaling": rope, "rope_theta": theta, "partial_rotary_factor": part}


def _older_rope(config: Values) -> Values:
    """4.57 writes this kind too, which it does not look at."""
    config = _old_rope(config)
    return config | {"rope_scaling": {"type": "mrope", **config["rope_scaling"]}}


def _both_ropes(config: Values) -> Values:
    return config | _old_rope(json.loads(json.dumps(config)))


def _default_beside_it(config: Values) -> Values:
    """As transformers 5.17 writes it, whatever the part is."""
    return config | {"partial_rotary_factor": 0.25}


def _interval(config: Values) -> Values:
    del config["layer_types"]
    return config | {"full_attention_interval": 4}


def _neither_types_nor_interval(config: Values) -> Values:
    del config["layer_types"]
    return config


def _no_types(config: Values) -> Values:
    return config | {"layer_types": None}


def _nested(config: Values) -> Values:
    """Text alone in the config of a whole model."""
    kind = config["model_type"]
    top = {key: config.pop(key) for key in ("architectures", "transformers_version")}
    return {**top, "model_type": kind.removesuffix("_text"), "text_config": config}


def _nested_and_old(config: Values) -> Values:
    return _nested(_old_rope(_interval(config)))


SPELLINGS: dict[str, Change] = {
    "rope_scaling beside rope_theta": _old_rope,
    "rope_scaling of type mrope": _older_rope,
    "rope_parameters and rope_scaling": _both_ropes,
    "rope_parameters beside a default part": _default_beside_it,
    "full_attention_interval": _interval,
    "neither layer_types nor full_attention_interval": _neither_types_nor_interval,
    "layer_types null": _no_types,
    "nested": _nested,
    "nested, rope_scaling, full_attention_interval": _nested_and_old,
}


def respell(folder: Path, change: Change) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


@pytest.mark.parametrize("moe", [False, True])
@torch.no_grad()
def test_spellings_are_one_target_and_transformers_computes_it(moe: bool, tmp_path: Path) -> None:
    save, of_model = (
        (save_qwen3_5_moe_text, Qwen3_5MoeForCausalLM)
        if moe
        else (save_qwen3_5_text, Qwen3_5ForCausalLM)
    )
    save(tmp_path, **TYPES)
    written = (tmp_path / "config.json").read_text()
    expected = target_to_dict(read_target(tmp_path))
    logits = graph_logits(read_target(tmp_path), TEXT_IDS)
    for name, change in SPELLINGS.items():
        (tmp_path / "config.json").write_text(written)
        respell(tmp_path, change)
        assert target_to_dict(read_target(tmp_path)) == expected, name
        theirs = of_model.from_pretrained(tmp_path).eval()(TEXT_IDS[None]).logits[0]
        assert relative_error(logits, theirs) < FLOAT32_TOLERANCE, name


BAD: dict[str, tuple[Values, str]] = {
    "two bases": (
        {"rope_theta": 5e6},
        "rope_theta: 10000.0 by rope_parameters.rope_theta, 5000000.0 by rope_theta",
    ),
    "two parts, neither in rope_parameters": (
        {
            "rope_parameters": None,
            "rope_theta": 1e4,
            "rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5},
            "partial_rotary_factor": 0.25,
        },
        "partial_rotary_factor: 0.5 by rope, 0.25 by the config itself",
    ),
    "a part that is no number": (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": "half"}},
        "partial_rotary_factor: expected a number, got 'half'",
    ),
    "sections of another part": (
        {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [11, 11, 10]}},
        "config.json: rope: mrope_section [11, 11, 10]: expected 3 counts that sum to",
    ),
    "no base": (
        {"rope_parameters": {"mrope_section": [2, 1, 1]}},
        "rope_parameters.rope_theta: expected a number above 1, got None",
    ),
    "yarn": (
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}},
        "rope_parameters: rope_type 'yarn': not supported",
    ),
    "a kind that transformers does not know": (
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "mrope"}},
        "rope_parameters: rope_type 'mrope': not supported",
    ),
    "no output gate": (
        {"attn_output_gate": False},
        "attn_output_gate: expected true, got false: not supported",
    ),
    "an interval that contradicts the tensors": (
        {"layer_types": None, "full_attention_interval": 2},
        "layer_types: layer 1 is full_attention, and the checkpoint has layers.1.linear_attn.",
    ),
    "an interval of none": (
        {"layer_types": None, "full_attention_interval": 0},
        "full_attention_interval: expected a whole number of at least 1, got 0",
    ),
    "an interval beyond the layers": (
        {"layer_types": None, "full_attention_interval": 9},
        "layer_types: expected a layer of full_attention, got none",
    ),
    "a kernel that is not the stored one": (
        {"linear_conv_kernel_dim": 5},
        "conv1d.weight: expected shape [80, 1, 5] by config.json, got [80, 1, 4]",
    ),
    "value heads that are not the stored ones": (
        {"linear_num_value_heads": 6},
        "in_proj_qkv.weight: expected shape [104, 24] by config.json, got [80, 24]",
    ),
    "query heads that do not divide": (
        {"num_attention_heads": 3},
        "3 heads, 2 key-value heads of 16: expected whole groups of heads of an even size",
    ),
    "a whole model's keys at the top": (
        {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]},
        "text_config: expected an object, got none",
    ),
    "a classifier": (
        {"architectures": ["Qwen3_5TextForSequenceClassification"]},
        "expected a Qwen3.5 (Qwen3_5ForCausalLM), got architecture "
        "'Qwen3_5TextForSequenceClassification'",
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_qwen3_5_text(folder)
    return folder


@pytest.mark.parametrize("name", BAD)
def test_contradictions_are_told_in_one_line(name: str, saved: Path, tmp_path: Path) -> None:
    changes, message = BAD[name]
    config = json.loads((saved / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    (tmp_path / "model.safetensors").symlink_to(saved / "model.safetensors")
    with pytest.raises(UserError) as caught:
        read_target(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
