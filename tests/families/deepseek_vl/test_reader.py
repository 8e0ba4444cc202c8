"""DeepSeek-VL checkpoints are read in every layout; prompts are what transformers makes of them;
what is not read is refused in one line.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.families.deepseek_vl.random_pair import FAMILIES, HYBRID, IMAGE, save_deepseek
from tests.families.test_readers import changed
from trt_eagle3.checkpoint.target import target_to_dict
from trt_eagle3.checkpoint.tensor_index import read_tensor
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import family_of, read_target
from trt_eagle3.parity.record.workload import draw_image

PLAIN = "deepseek_vl"
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    for family in FAMILIES:
        save_deepseek(folder / family, family)
    return folder


def copied(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy whose tensors are changed in place."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def published(tensors: dict[str, torch.Tensor]) -> None:
    """Names of the Hub and of transformers 4.57: SigLIP is below a second ``vision_model``."""
    prefix = "model.vision_model."
    for name in [name for name in tensors if name.startswith(prefix)]:
        tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)


def older(config: dict[str, Any]) -> None:
    """The config as transformers 4.57 writes it."""
    text = config["text_config"]
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    text |= {"rope_scaling": None, "torch_dtype": "float32"}
    config["torch_dtype"] = config.pop("dtype")


@pytest.mark.parametrize("family", FAMILIES)
def test_published_layout_is_the_same_target(family: str, root: Path, tmp_path: Path) -> None:
    folder = changed(root / family, tmp_path / "older", older)
    folder = copied(folder, tmp_path / "published", published)
    ours, theirs = read_target(folder), read_target(root / family)
    assert target_to_dict(ours) == target_to_dict(theirs)
    assert ours.tensors.keys() == theirs.tensors.keys()


@pytest.mark.parametrize("flags", [(True, True), (None, None), (True, False)])
def test_head_of_the_file_counts_whatever_the_flags(
    flags: tuple[bool | None, bool | None], root: Path, tmp_path: Path
) -> None:
    def flagged(config: dict[str, Any]) -> None:
        for section, flag in zip((config, config["text_config"]), flags, strict=True):
            section.pop("tie_word_embeddings")
            section |= {} if flag is None else {"tie_word_embeddings": flag}

    folder = changed(root / PLAIN, tmp_path / "target", flagged)
    spec = read_target(folder)
    assert spec.tied_head is False
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert torch.equal(read_tensor(spec.tensors["lm_head.weight"]), head)
    model = FAMILIES[PLAIN].from_pretrained(folder)
    assert torch.equal(model.lm_head.weight, head)


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoint_without_a_head_is_tied_by_default(family: str, tmp_path: Path) -> None:
    """transformers 5 leaves its default at the top out; the language model's flag is false."""
    save_deepseek(tmp_path, family, tied=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert read_target(tmp_path).tied_head is True


@pytest.mark.parametrize("family", FAMILIES)
def test_conversation_equals_transformers_with_one_bos(family: str, root: Path) -> None:
    folder = root / family
    spec = read_target(folder)
    ours = family_of(spec).processor(folder, spec)
    images = [draw_image(1, (60, 40)), draw_image(2, (30, 90))]

    def messages(shown: list[Any]) -> list[dict[str, Any]]:
        user = [{"type": "text", "text": "One:"}, shown[0], {"type": "text", "text": "naïvely —"}]
        return [
            {"role": "user", "content": user},
            {"role": "assistant", "content": [{"type": "text", "text": "Seen."}]},
            {"role": "user", "content": [shown[1], {"type": "text", "text": "And this?"}]},
        ]

    found = ours.messages(messages([{"type": "image", "image": image} for image in images]))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    kinds: Any = {
        PLAIN: (transformers.DeepseekVLProcessor, transformers.DeepseekVLImageProcessorPil),
        HYBRID: (
            transformers.DeepseekVLHybridProcessor,
            transformers.DeepseekVLHybridImageProcessorPil,
        ),
    }
    processor, pixels = kinds[family]
    theirs = processor(
        pixels.from_pretrained(folder),
        tokenizer,
        chat_template=tokenizer.chat_template,
        num_image_tokens=36,
    )
    made = theirs.apply_chat_template(
        messages([{"type": "image", "image": image} for image in images]),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    assert torch.equal(found.token_ids, made["input_ids"][0])
    assert found.token_ids.tolist().count(tokenizer.bos_token_id) == 1
    assert int(found.visual_rows.sum()) == 72


def test_texts_are_given_to_the_template_as_parts(root: Path) -> None:
    spec = read_target(root / PLAIN)
    processor = family_of(spec).processor(spec.path, spec)
    as_text = processor.messages([{"role": "user", "content": f"Say {IMAGE}."}])
    part = {"type": "text", "text": f"Say {IMAGE}."}
    assert torch.equal(
        as_text.token_ids, processor.messages([{"role": "user", "content": [part]}]).token_ids
    )
    assert not as_text.visual_rows.any()


def _set(**values: Any) -> Change:
    return lambda config: config.update(values)


def _in(section: str, **values: Any) -> Change:
    return lambda config: config[section].update(values)


SAM = "high_res_vision_config"
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}
REFUSED: dict[str, tuple[str, Change, str]] = {
    "one half": (HYBRID, lambda c: c.pop(SAM), f"{SAM}: expected an object, got none"),
    "other half": (
        HYBRID,
        lambda c: c.pop("vision_config"),
        "vision_config: expected an object, got none",
    ),
    "as one tower": (
        HYBRID,
        _set(model_type=PLAIN, architectures=["DeepseekVLForConditionalGeneration"]),
        "visual.aligner.linear1.weight, ",
    ),
    "as two towers": (
        PLAIN,
        lambda c: c.update(
            model_type=HYBRID,
            architectures=["DeepseekVLHybridForConditionalGeneration"],
            **{SAM: {"model_type": "sam_vision_model"}},
        ),
        "visual.sam.patch_embed.projection.weight, ",
    ),
    "another tower": (
        PLAIN,
        _in("vision_config", model_type="clip_vision_model"),
        "vision_config.model_type: expected siglip_vision_model, got 'clip_vision_model'",
    ),
    "language model": (
        PLAIN,
        _in("text_config", model_type="qwen2"),
        "text_config.model_type: expected llama, got 'qwen2': not supported",
    ),
    "llama3 without its factors": (
        PLAIN,
        _in("text_config", rope_parameters=LLAMA3),
        "rope_type llama3 needs low_freq_factor, high_freq_factor, "
        "original_max_position_embeddings",
    ),
    "window": (
        PLAIN,
        _in("text_config", sliding_window=64),
        "text_config.sliding window attention",
    ),
    "architecture": (
        PLAIN,
        _set(architectures=["DeepseekVLModel"]),
        "expected a DeepSeek-VL (DeepseekVLForConditionalGeneration), got architecture",
    ),
    "patches": (PLAIN, _in("vision_config", patch_size=5), "expected whole patches of 5 pixels"),
    "heads": (PLAIN, _in("vision_config", num_attention_heads=3), "hidden_size 40 is not 3 heads"),
    "colours": (PLAIN, _in("vision_config", num_channels=1), "num_channels: expected 3, got 1"),
    "a token": (PLAIN, _set(image_token_id=99999), "image_token_id: expected an id below"),
    "SAM's heads": (HYBRID, _in(SAM, num_attention_heads=5), "5 equal heads in hidden_size 36"),
    "SAM's window": (HYBRID, _in(SAM, window_size=4), "rel_pos_h: expected shape [7, 12]"),
    "endless blocks": (PLAIN, _in("vision_config", num_hidden_layers=10**9), "1000000000 vision"),
    "endless blocks of SAM": (HYBRID, _in(SAM, num_hidden_layers=10**9), "1000000000 vision"),
    "SAM's colours": (HYBRID, _in(SAM, num_channels=1), "num_channels: expected 3, got 1"),
    "no early block": (
        HYBRID,
        _in(SAM, global_attn_indexes=[]),
        "global_attn_indexes: expected a first block below 4, whose output is projected too",
    ),
    "DeepSeek's layout": (
        PLAIN,
        _set(model_type="multi_modality"),
        "DeepSeek-VL or Janus in DeepSeek's own layout, model_type 'multi_modality'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_target_is_refused_in_one_line(
    name: str, root: Path, tmp_path: Path
) -> None:
    family, change, expected = REFUSED[name]
    folder = changed(root / family, tmp_path / "spoilt", change)
    with pytest.raises(UserError, match=re.escape(expected)) as caught:
        read_target(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("half", ["model.vision_model.", "model.high_res_vision_model."])
def test_tower_of_two_without_one_half_is_refused_in_one_line(
    half: str, root: Path, tmp_path: Path
) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(half)]:
            del tensors[name]

    folder = copied(root / HYBRID, tmp_path / "spoilt", drop)
    with pytest.raises(UserError, match="missing, required by its config") as caught:
        read_target(folder)
    assert "\n" not in str(caught.value)


FILES: dict[str, tuple[str, str, Change, str]] = {
    "size": (
        PLAIN,
        "preprocessor_config.json",
        _set(size={"height": 384, "width": 384}),
        "size: expected height and width 24 as in config.json",
    ),
    "large size": (
        HYBRID,
        "preprocessor_config.json",
        _set(high_res_size={"height": 1024, "width": 1024}),
        "high_res_size: expected height and width 40 as in config.json",
    ),
    "no borders": (
        PLAIN,
        "preprocessor_config.json",
        _set(do_pad=False),
        "do_pad: expected true, got False",
    ),
    "smallest side": (
        PLAIN,
        "preprocessor_config.json",
        _set(min_size=25),
        "min_size: expected at most the size 24, got 25",
    ),
    "colours": (
        HYBRID,
        "preprocessor_config.json",
        _set(high_res_image_std=[0.5]),
        "high_res_image_std: expected 3 numbers",
    ),
    "tokens": (
        PLAIN,
        "processor_config.json",
        _set(num_image_tokens=576),
        "num_image_tokens: expected 36 by image_size and patch_size of config.json, got 576",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_processor_files_of_another_checkpoint_are_refused_in_one_line(
    name: str, root: Path, tmp_path: Path
) -> None:
    family, file, change, expected = FILES[name]
    folder = changed(root / family, tmp_path / "spoilt", change, file)
    spec = read_target(folder)
    with pytest.raises(UserError, match=re.escape(expected)) as caught:
        family_of(spec).processor(folder, spec)
    assert "\n" not in str(caught.value)
