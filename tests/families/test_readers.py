"""Qwen2.5-VL and InternVL checkpoints are read as transformers wrote them and as they are
published; what is not read is refused in one line.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto import modeling_auto as auto

from tests.families.internvl.random_pair import save_internvl
from tests.families.qwen2_5_vl.random_pair import save_qwen25
from trt_eagle3.checkpoint.target import target_from_dict, target_to_dict
from trt_eagle3.checkpoint.tensor_index import read_tensor
from trt_eagle3.errors import UserError
from trt_eagle3.families.qwen2_5_vl.tower import windows_of
from trt_eagle3.families.registry import FAMILIES, family_named, family_of, read_target

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def qwen25(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen25")
    save_qwen25(folder)
    return folder


@pytest.fixture(scope="module")
def internvl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("internvl")
    save_internvl(folder)
    return folder


def changed(source: Path, folder: Path, change: Change, name: str = "config.json") -> Path:
    """A copy whose JSON file ``name`` is changed."""
    shutil.copytree(source, folder)
    values = json.loads((folder / name).read_text())
    change(values)
    (folder / name).write_text(json.dumps(values))
    return folder


def published(config: dict[str, Any]) -> None:
    """Qwen2.5-VL's config as on the Hub: flat, with the older spelling of its rope."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    config |= {key: value for key, value in text.items() if key != "model_type"}
    config["rope_theta"] = rope["rope_theta"]
    config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    config["use_sliding_window"], config["max_window_layers"] = False, 28
    config.pop("layer_types", None)
    config["vision_config"] |= {"in_chans": 3, "spatial_patch_size": 4}
    config["vision_config"].pop("rope_parameters", None)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_architecture_of_a_family_is_that_of_transformers(model_type: str) -> None:
    mappings = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
    known = [names[model_type] for names in mappings if model_type in names]
    assert family_named(model_type).architecture in known


@pytest.mark.parametrize("tied", [False, True])
def test_qwen25_tensors_are_read_under_canonical_names(tied: bool, tmp_path: Path) -> None:
    model = save_qwen25(tmp_path, tied=tied)
    spec = read_target(tmp_path)
    assert spec.tied_head is tied
    assert (spec.attention.qkv_bias, spec.attention.out_bias, spec.attention.qk_norm) == (
        *(True, False),
        None,
    )
    assert (spec.attention.rope.layout, spec.attention.rope.sections) == ("chunked", (2, 3, 3))
    for name, tensor in model.state_dict().items():
        named = name.replace("model.language_model.", "").replace("model.visual.", "visual.")
        if named != "lm_head.weight" or not tied:
            assert torch.equal(read_tensor(spec.tensors[named]), tensor), name


def test_qwen25_published_spelling_is_the_same_target(qwen25: Path, tmp_path: Path) -> None:
    folder = changed(qwen25, tmp_path / "published", published)
    weights = load_file(folder / "model.safetensors")
    renamed = {
        n.replace("model.language_model.", "model.").replace("model.visual.", "visual."): t
        for n, t in weights.items()
    }
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    ours, theirs = read_target(folder), read_target(qwen25)
    assert target_to_dict(ours) == target_to_dict(theirs)
    assert ours.tensors.keys() == theirs.tensors.keys()


@pytest.mark.parametrize("family", ["qwen25", "internvl"])
def test_spec_is_the_same_after_json(family: str, request: pytest.FixtureRequest) -> None:
    spec = read_target(request.getfixturevalue(family))
    plain = json.loads(json.dumps(target_to_dict(spec)))
    again = target_from_dict(plain)
    assert target_to_dict(again) == target_to_dict(spec)
    assert again.vision == spec.vision
    if family == "qwen25":
        assert windows_of(again.require_vision()) == windows_of(spec.require_vision())


def test_internvl_tensors_are_read_under_canonical_names(tmp_path: Path) -> None:
    vision = {"use_qk_norm": True, "norm_type": "rms_norm", "use_mean_pooling": False}
    model = save_internvl(tmp_path, vision=vision)
    spec = read_target(tmp_path)
    assert spec.attention.rope.layout == "1d"
    for name, tensor in model.state_dict().items():
        named = (
            name.replace("model.language_model.", "")
            .replace("model.vision_tower.", "visual.")
            .replace("model.multi_modal_projector.", "visual.projector.")
        )
        assert torch.equal(read_tensor(spec.tensors[named]), tensor), name


def _set(**values: Any) -> Change:
    return lambda config: config.update(values)


def _vision(**values: Any) -> Change:
    return lambda config: config["vision_config"].update(values)


def _text(**values: Any) -> Change:
    return lambda config: config["text_config"].update(values)


REFUSED: dict[str, tuple[str, Change, str]] = {
    "a window": (
        "qwen25",
        _text(use_sliding_window=True, max_window_layers=2, layer_types=None),
        "text_config.sliding window attention",
    ),
    "layers that slide": (
        "qwen25",
        _text(layer_types=["sliding_attention"] * 5),
        "text_config.sliding window attention",
    ),
    "sections": (
        "qwen25",
        _text(rope_parameters={"rope_theta": 1e6, "mrope_section": [4, 4, 4]}),
        "mrope_section [4, 4, 4]: expected 3 counts that sum to half of the channels that turn, 8",
    ),
    "dynamic rope": (
        "qwen25",
        _text(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e6}),
        "rope_type dynamic: not supported",
    ),
    "activation": ("qwen25", _vision(hidden_act="gelu"), "hidden_act 'gelu' is not silu"),
    "blocks": (
        "qwen25",
        _vision(fullatt_block_indexes=[7]),
        "fullatt_block_indexes [7] are not blocks of 3",
    ),
    **{
        f"a window of {size}": (
            "qwen25",
            _vision(window_size=size),
            f"window_size {size} is no multiple of a token's 8 pixels (2 patches of 4)",
        )
        for size in (4, 28)
    },
    "width": ("qwen25", _vision(out_hidden_size=40), "out_hidden_size 40 is not the decoder's"),
    "heads": ("qwen25", _vision(num_heads=3), "hidden_size 40 is not 3 heads"),
    "a token": ("qwen25", _set(image_token_id=9999), "image_token_id: expected an id below"),
    "architecture": (
        "qwen25",
        _set(architectures=["Qwen2_5OmniModel"]),
        "expected a Qwen2.5-VL (Qwen2_5_VLForConditionalGeneration), got architecture",
    ),
    "no tower": ("qwen25", lambda c: c.pop("vision_config"), "vision_config: expected an object"),
    "more layers": (
        "qwen25",
        _text(num_hidden_layers=6, layer_types=None),
        "missing, required by its config",
    ),
    "language model": (
        "internvl",
        _text(model_type="gpt_oss"),
        "text_config.model_type: expected qwen2, qwen3, qwen3_moe, got 'gpt_oss': not supported",
    ),
    "language model of another kind": (
        "internvl",
        _text(model_type="qwen2"),
        "q_proj.bias",
    ),
    "no experts": ("internvl", _text(model_type="qwen3_moe"), "text_config.num_experts: expected"),
    "layer of features": (
        "internvl",
        _set(vision_feature_layer=-2),
        "vision_feature_layer: expected -1, got -2",
    ),
    "class token kept": (
        "internvl",
        _set(vision_feature_select_strategy="full"),
        "vision_feature_select_strategy: expected default, got 'full'",
    ),
    "no positions": (
        "internvl",
        _vision(use_absolute_position_embeddings=False),
        "use_absolute_position_embeddings: expected True, got False",
    ),
    "oblong tiles": (
        "internvl",
        _vision(image_size=[24, 48]),
        "vision_config.image_size: expected a square, got [24, 48]",
    ),
    "odd tiles": ("internvl", _vision(image_size=[20, 20]), "expected whole tokens of 2 patches"),
    "ratio": ("internvl", _set(downsample_ratio=0.3), "downsample_ratio: expected one over"),
    "norm": ("internvl", _vision(norm_type="batch"), "norm_type: expected layer_norm or rms_norm"),
    "tokens of a tile": ("internvl", _set(image_seq_length=256), "image_seq_length: expected 9"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_target_is_refused_in_one_line(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    family, change, expected = REFUSED[name]
    folder = changed(request.getfixturevalue(family), tmp_path / "spoilt", change)
    with pytest.raises(UserError, match=re.escape(expected)) as caught:
        read_target(folder)
    assert "\n" not in str(caught.value)


FILES: dict[str, tuple[str, Change, str]] = {
    "patches of another": (
        "qwen25",
        _set(patch_size=14),
        "patch_size: expected 4 as in config.json, got 14",
    ),
    "tiles of another": (
        "internvl",
        _set(size={"height": 448, "width": 448}),
        "size: expected height and width 24 as in config.json",
    ),
    "no resizing": ("internvl", _set(do_resize=False), "do_resize: expected true, got False"),
    "tiles beyond counting": ("internvl", _set(max_patches="x"), "max_patches: expected a number"),
}


@pytest.mark.parametrize("name", FILES)
def test_processor_files_of_another_checkpoint_are_refused_in_one_line(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    family, change, expected = FILES[name]
    source = request.getfixturevalue(family)
    folder = changed(source, tmp_path / "spoilt", change, "preprocessor_config.json")
    spec = read_target(folder)
    with pytest.raises(UserError, match=re.escape(expected)) as caught:
        family_of(spec).processor(folder, spec)
    assert "\n" not in str(caught.value)


def test_internvl_refuses_a_tokenizer_without_its_marks(
    internvl: Path, qwen25: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "spoilt"
    shutil.copytree(internvl, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(qwen25 / name, folder / name)
    spec = read_target(folder)
    with pytest.raises(UserError, match="tokenizer: no token"):
        family_of(spec).processor(folder, spec)
