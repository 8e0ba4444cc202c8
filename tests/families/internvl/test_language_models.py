"""Random InternVLs over Qwen2 and Qwen3-MoE through the whole program, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import InternVLForConditionalGeneration

from tests.families.gates import failed, questions, validate_pair
from tests.families.internvl.random_pair import TEXTS, save_internvl, save_internvl_draft
from tests.families.random_pairs import DRAFTS, config_of
from tests.families.test_readers import changed
from trt_eagle3 import LLM, SamplingParams
from trt_eagle3.checkpoint.target import target_to_dict
from trt_eagle3.families.internvl.reference import tiles_from_patches
from trt_eagle3.families.registry import read_target
from trt_eagle3.pipeline import build
from trt_eagle3.spec import DenseMlp, SparseMoe

LANGUAGES = ["qwen2", "qwen3_moe"]
ANSWER = SamplingParams(max_tokens=12, ignore_eos=True)
[ASKED, _] = questions(24)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of each language model and its drafts of two producers."""
    folder = tmp_path_factory.mktemp("internvl")
    for language in LANGUAGES:
        model = save_internvl(folder / language / "target", text=TEXTS[language])
        for producer in DRAFTS:
            save_internvl_draft(folder / language / producer, model, producer)
    return folder


def built(root: Path, output: Path, draft: str, **engine: Any) -> Path:
    pair = config_of(root / "target", root / draft, output, engine={"prefill_chunk": 64, **engine})
    return build(pair).path


def test_layers_are_those_of_the_language_model(root: Path) -> None:
    dense, sparse = (read_target(root / language / "target") for language in LANGUAGES)
    assert (dense.attention.qk_norm, dense.attention.qkv_bias) == (None, True)
    assert not any(isinstance(layer.mlp, SparseMoe) for layer in dense.layers)
    kinds = [DenseMlp, SparseMoe, DenseMlp, SparseMoe, DenseMlp]
    assert [type(layer.mlp) for layer in sparse.layers] == kinds
    assert sparse.attention.qk_norm is not None


@pytest.mark.parametrize(
    ("backend", "draft"), [("onnxruntime", "specforge"), ("torch", "speculators")]
)
@pytest.mark.parametrize("language", LANGUAGES)
@torch.no_grad()
def test_speculative_equals_autoregressive_equals_transformers(
    language: str, backend: str, draft: str, root: Path, tmp_path: Path
) -> None:
    with LLM(built(root / language, tmp_path, draft, backend=backend)) as engine:
        plain = engine.generate(
            ASKED.prompt, images=ASKED.images, sampling=ANSWER, speculation=False
        )
        drafted = engine.generate(ASKED.prompt, images=ASKED.images, sampling=ANSWER)
        inputs = engine.prepare(ASKED.prompt, images=ASKED.images)
    assert drafted.token_ids == plain.token_ids
    assert len(set(plain.token_ids)) > 3, "an answer that repeats itself shows little"
    model = InternVLForConditionalGeneration.from_pretrained(root / language / "target").eval()
    pixels = tiles_from_patches(inputs.patches, inputs.grid_thw, model.config.vision_config, 2)
    ids = inputs.token_ids[None]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    mask = torch.ones_like(ids)
    out = model.generate(input_ids=ids, attention_mask=mask, pixel_values=pixels, **options)
    assert plain.token_ids == tuple(out[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_gate_holds(language: str, root: Path, tmp_path: Path) -> None:
    found = validate_pair(built(root / language, tmp_path, "specforge"), [ASKED])
    assert failed(found) == []
    names = ("processor.pixel_values", "vision.embeds", "target.logits_l2", "tokens.speculative")
    assert all(found.recorder[name].worst is not None for name in names)


@pytest.mark.parametrize("language", LANGUAGES)
def test_tensorrt_bundle_is_exported(language: str, root: Path, tmp_path: Path) -> None:
    engine = {"backend": "tensorrt", "device": "cuda", "dtype": "float16"}
    bundle = built(root / language, tmp_path, "specforge", **engine)
    script = (bundle / "build_engine.sh").read_text()
    assert "target" in script
    assert "vision" in script


def older(config: dict[str, Any]) -> None:
    """The config as transformers 4.57 writes it."""
    text = config["text_config"]
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    text.pop("layer_types", None)
    text["use_sliding_window"], text["sliding_window"] = False, None
    config["torch_dtype"] = "float32"


@pytest.mark.parametrize("language", LANGUAGES)
def test_older_spellings_are_the_same_target(language: str, root: Path, tmp_path: Path) -> None:
    """transformers 4.57 saves the modules' own names; older and newer versions the Hub's."""
    source = root / language / "target"
    folder = changed(source, tmp_path / "older", older)
    renamed = {
        name.replace("language_model.model.", "model.language_model.")
        .replace("language_model.lm_head.", "lm_head.")
        .replace("vision_tower.", "model.vision_tower.")
        .replace("multi_modal_projector.", "model.multi_modal_projector."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    assert "model.language_model.norm.weight" in renamed
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    ours, theirs = read_target(folder), read_target(source)
    assert json.dumps(target_to_dict(ours)) == json.dumps(target_to_dict(theirs))
    assert ours.tensors.keys() == theirs.tensors.keys()
