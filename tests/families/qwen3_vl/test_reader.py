"""Targets of any geometry are read as transformers wrote them, in both spellings; anything else
is refused by name.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from trt_eagle3.checkpoint.target import target_from_dict, target_to_dict
from trt_eagle3.checkpoint.tensor_index import read_tensor
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import read_target
from trt_eagle3.spec import TargetSpec

TEXT: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [1],
}
SECTIONS = [4, 2, 2]
TOKENS = {
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
}


def _save(
    folder: Path,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    tied: bool = False,
    sections: list[int] | None = None,
    shard: str = "1GB",
) -> Qwen3VLForConditionalGeneration:
    """A random checkpoint, as this transformers writes it."""
    text = {**TEXT, **(text or {})}
    sections = SECTIONS if sections is None else sections
    rope = {
        "rope_type": "default",
        "rope_theta": 1e5,
        "mrope_section": sections,
        "mrope_interleaved": True,
    }
    config = Qwen3VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={**VISION, **(vision or {}), "out_hidden_size": text["hidden_size"]},
        tie_word_embeddings=tied,
        **TOKENS,
    )
    model = Qwen3VLForConditionalGeneration(config)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def _older(folder: Path) -> None:
    """The config in transformers 4.57's spelling."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    rope = config["text_config"].pop("rope_parameters")
    config["text_config"] |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    config["vision_config"].pop("rope_parameters", None)
    config["vision_config"]["model_type"] = "qwen3_vl"
    file.write_text(json.dumps(config))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint, for tests that copy and spoil it."""
    folder = tmp_path_factory.mktemp("target")
    _save(folder)
    return folder


def _check_tensors(spec: TargetSpec, model: Qwen3VLForConditionalGeneration) -> None:
    weights = {
        n.replace("model.language_model.", "").replace("model.visual.", "visual."): t
        for n, t in model.state_dict().items()
    }
    assert spec.tensors.keys() == weights.keys()
    assert all(torch.equal(read_tensor(spec.tensors[n]), t) for n, t in weights.items())


@given(
    heads=st.sampled_from([(2, 1), (4, 2), (3, 3), (6, 2)]),
    head_dim=st.sampled_from([8, 16, 24]),
    hidden=st.sampled_from([8, 12, 20]),
    layers=st.integers(1, 3),
    tied=st.booleans(),
    bias=st.booleans(),
    older=st.booleans(),
    levels=st.lists(st.integers(0, 2), unique=True, max_size=3),
    merge=st.integers(1, 3),
    shard=st.sampled_from(["1GB", "8KB"]),
)
@settings(max_examples=15)
def test_any_geometry_is_read(
    heads: tuple[int, int],
    head_dim: int,
    hidden: int,
    layers: int,
    tied: bool,
    bias: bool,
    older: bool,
    levels: list[int],
    merge: int,
    shard: str,
) -> None:
    text = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": head_dim}
    text |= {"hidden_size": hidden, "num_hidden_layers": layers, "attention_bias": bias}
    vision = {"depth": 3, "spatial_merge_size": merge, "deepstack_visual_indexes": levels[:layers]}
    pairs = head_dim // 2
    sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = _save(folder, text, vision, tied, sections, shard)
        if older:
            _older(folder)
        spec = read_target(folder)
        _check_tensors(spec, model)
    assert (spec.attention.num_heads, spec.attention.num_kv_heads, spec.attention.head_dim) == (
        *heads,
        head_dim,
    )
    assert (spec.hidden_size, spec.num_layers, spec.attention.qkv_bias) == (
        hidden,
        layers,
        bias,
    )
    assert (spec.attention.rope.layout, spec.attention.rope.sections, spec.attention.rope.base) == (
        "interleaved",
        tuple(sections),
        1e5,
    )
    assert (spec.vision.depth, spec.vision.spatial_merge_size, spec.num_visual_levels) == (
        3,
        merge,
        len(levels[:layers]),
    )
    assert spec.tied_head == tied
    again = target_from_dict(json.loads(json.dumps(target_to_dict(spec))))
    assert target_to_dict(again) == target_to_dict(spec)
    assert (again.layers, again.vision) == (spec.layers, spec.vision)


def test_names_of_older_tools_are_read(checkpoint: Path, tmp_path: Path) -> None:
    spec = read_target(checkpoint)
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, tmp_path / "model.safetensors")
    assert read_target(tmp_path).tensors.keys() == spec.tensors.keys()


@pytest.mark.parametrize(
    "flags", [{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}]
)
def test_a_head_of_its_own_goes_before_the_flag(
    flags: dict[str, bool], checkpoint: Path, tmp_path: Path
) -> None:
    folder = _spoiled(
        checkpoint, tmp_path, lambda c: (c.pop("tie_word_embeddings"), c.update(flags))
    )
    spec = read_target(folder)
    assert not spec.tied_head
    assert spec.tensors["lm_head.weight"] != spec.tensors["embed_tokens.weight"]


def test_mixed_float_types_are_read(checkpoint: Path, tmp_path: Path) -> None:
    def halve(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].bfloat16()

    assert (
        read_target(_respoiled(checkpoint, tmp_path, halve)).tensors["lm_head.weight"].dtype
        == "BF16"
    )


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, {}, ()),
        (None, {"eos_token_id": 3}, (3,)),
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 9}, (3, 4)),
        ({"eos_token_id": 4}, {}, (4,)),
        ({"do_sample": True}, {"text_config.eos_token_id": 2}, (2,)),
    ],
)
def test_end_tokens_are_those_of_generate(
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    expected: tuple[int, ...],
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    def change(values: dict[str, Any]) -> None:
        for key, value in config.items():
            place = values["text_config"] if "." in key else values
            place[key.split(".")[-1]] = value

    folder = _spoiled(checkpoint, tmp_path, change)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert read_target(folder).eos_token_ids == expected


def _spoiled(checkpoint: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _respoiled(
    checkpoint: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]
) -> Path:
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _text(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda c: c["text_config"].update(changes)


def _vision(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda c: c["vision_config"].update(changes)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "MoE": (
        lambda c: c.update(
            model_type="qwen3_vl_moe", architectures=["Qwen3VLMoeForConditionalGeneration"]
        ),
        "text_config.num_experts: expected a whole number of at least 1, got None",
    ),
    "another model": (
        lambda c: c.update(
            model_type="qwen2_vl", architectures=["Qwen2VLForConditionalGeneration"]
        ),
        "Qwen2VLForConditionalGeneration.* not supported. Supported: ",
    ),
    "unknown": (
        lambda c: c.update(quantization_config={"quant_method": "bitsandbytes"}),
        "quantised by bitsandbytes: not supported",
    ),
    "AWQ": (
        _text(quantization_config={"quant_method": "awq"}),
        "text_config.quantization_config names awq, but no weight is quantised",
    ),
    "more layers": (
        _text(num_hidden_layers=3),
        r"layers\.2\.self_attn\.q_proj\.weight.* and 8 more missing",
    ),
    "fewer layers": (_text(num_hidden_layers=1), r"layers\.1\..* and 8 more surplus"),
    "endless layers": (_text(num_hidden_layers=10**9), "1000000000 decoder layers"),
    "other heads": (
        _text(num_attention_heads=4),
        r"q_proj\.weight: expected shape \[64, 16\].*got \[32, 16\]",
    ),
    "odd groups": (_text(num_key_value_heads=3), "whole groups of heads"),
    "other vocabulary": (_text(vocab_size=25), r"embed_tokens\.weight: expected shape \[25, 16\]"),
    "no theta": (
        _text(rope_parameters={"rope_type": "default"}),
        "rope_theta: expected a number above 1, got None",
    ),
    "yarn": (
        _text(rope_parameters={"rope_type": "yarn", "rope_theta": 1e5}),
        "rope_type: expected default, got 'yarn'",
    ),
    "sections": (
        _text(rope_parameters={"rope_theta": 1e5, "mrope_section": [1, 1, 1]}),
        r"mrope_section \[1, 1, 1\]: expected 3 counts that sum to half of the channels",
    ),
    "two thetas": (
        _text(rope_theta=5e6),
        "rope_theta: 100000.0 by rope_parameters.*5000000.0 by rope_theta",
    ),
    "activation": (_text(hidden_act="gelu"), "hidden_act: expected silu, got 'gelu'"),
    "no vision": (lambda c: c.pop("vision_config"), "vision_config: expected an object"),
    "vision width": (
        _vision(out_hidden_size=8),
        "out_hidden_size 8 is not the decoder's hidden_size 16",
    ),
    "vision heads": (_vision(num_heads=3), "not 3 heads of a multiple of 4"),
    "vision positions": (_vision(num_position_embeddings=15), "15 is not a square"),
    "vision levels": (
        _vision(deepstack_visual_indexes=[7]),
        r"deepstack_visual_indexes \[7\] are not distinct blocks",
    ),
    "too many levels": (_vision(deepstack_visual_indexes=[0, 1], depth=2), "missing"),
    "vision base": (_vision(rope_parameters={"rope_theta": 1e6}), "rope_theta 1e.06 is not 10000"),
    "a text for a number": (
        _text(hidden_size="16"),
        "hidden_size: expected a whole number from 0 to 2147483647, got '16'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_target_is_refused(case: str, checkpoint: Path, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as caught:
        read_target(_spoiled(checkpoint, tmp_path, change))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value) or case == "sections"


SPOILED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "missing": (
        lambda t: t.pop("model.visual.merger.norm.bias"),
        "visual.merger.norm.bias missing",
    ),
    "surplus": (
        lambda t: t.update(stray=torch.ones(1)),
        r"stray surplus \(in model\.safetensors\)",
    ),
    "misshapen": (
        lambda t: t.update({"lm_head.weight": torch.ones(24, 8)}),
        r"lm_head.weight: expected shape \[24, 16\]",
    ),
    "integer": (
        lambda t: t.update({"lm_head.weight": torch.ones(24, 16, dtype=torch.int8)}),
        "lm_head.weight: expected float32, float16 or bfloat16, got I8",
    ),
    "no head": (lambda t: t.pop("lm_head.weight"), "lm_head.weight missing"),
    "twice": (lambda t: t.update({"visual.merger.norm.bias": torch.ones(16)}), "under two names"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_tensors_that_do_not_fit_are_refused(case: str, checkpoint: Path, tmp_path: Path) -> None:
    change, message = SPOILED[case]
    with pytest.raises(UserError, match=message) as caught:
        read_target(_respoiled(checkpoint, tmp_path, change))
    assert "\n" not in str(caught.value)


def test_read_target_buffers_of_ropes_are_left_out(checkpoint: Path, tmp_path: Path) -> None:
    names = (
        "model.language_model.rotary_emb.inv_freq",
        "model.language_model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.visual.rotary_pos_emb.inv_freq",
    )
    buffers = {name: torch.full((4,), float(i)) for i, name in enumerate(names)}
    spec = read_target(_respoiled(checkpoint, tmp_path, lambda t: t.update(buffers)))
    assert spec.tensors.keys() == read_target(checkpoint).tensors.keys()


def test_read_target_ids_that_a_config_leaves_out_are_those_of_transformers(
    checkpoint: Path, tmp_path: Path
) -> None:
    for file in checkpoint.iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((checkpoint / "config.json").read_text())
    for key in ("vision_start_token_id", "vision_end_token_id"):
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    vision = read_target(tmp_path).require_vision()
    assert (vision.vision_start_token_id, vision.vision_end_token_id) == (None, None)
    del config["image_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    default = Qwen3VLConfig().image_token_id
    with pytest.raises(UserError, match=f"image_token_id: expected an id below .*, got {default}"):
        read_target(tmp_path)


NONSENSE = [None, "x", -1, 0, [], {}, 1.5, True, [1, "a"], {"a": 1}, 10**30, [[]], float("nan")]


def _paths(config: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from _paths(value, (*prefix, key))


def _is_one_line(folder: Path) -> bool:
    try:
        read_target(folder)
    except UserError as error:
        return "\n" not in str(error)
    return True


def test_nonsense_in_a_config_is_never_a_traceback(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    text = (tmp_path / "config.json").read_text()
    for path in _paths(json.loads(text)):
        for value in NONSENSE:
            config = json.loads(text)
            place = config
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            (tmp_path / "config.json").write_text(json.dumps(config))
            assert _is_one_line(tmp_path), (path, value)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_a_config_that_is_not_json_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json"):
        read_target(tmp_path)
