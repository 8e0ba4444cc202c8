"""Quantised checkpoints: what is read of them, and what is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.quantised import PACKERS, save_quantised
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.commands.report import inspection, inspection_lines
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import read_target

Q = "model.language_model.layers.0.self_attn.q_proj"
Tensors = dict[str, Tensor]
NUM_WEIGHTS = 8 * 7


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("quantised")
    return {name: save_quantised(root / name, name) for name in PACKERS}


def changed(
    source: Path,
    folder: Path,
    change: Callable[[Tensors], object] | None = None,
    claim: dict[str, Any] | None = None,
) -> Path:
    """A copy of ``source`` with other tensors, or keys of its quantisation config replaced."""
    folder.mkdir(exist_ok=True)
    if change is None:
        (folder / "model.safetensors").hardlink_to(source / "model.safetensors")
    else:
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] |= claim or {}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_target(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


@pytest.mark.parametrize("name", PACKERS)
def test_quantised_checkpoint_is_read_as_weights_of_the_models_shapes(
    name: str, folders: dict[str, Path]
) -> None:
    spec: TargetCheckpoint = read_target(folders[name])
    assert spec.quantisation is not None
    assert list(spec.quantisation.weights.values()) == [NUM_WEIGHTS]
    assert spec.tensors["layers.3.mlp.down_proj.weight"].shape == (256, 448)
    assert spec.quantisation.method == PACKERS[name][1]["quant_method"]


def poke(name: str, value: float) -> Callable[[Tensors], None]:
    """Set the first value of a tensor of ``q_proj``."""

    def change(tensors: Tensors) -> None:
        tensor = tensors[f"{Q}.{name}"].float().flatten()
        tensor[0] = value
        like = tensors[f"{Q}.{name}"]
        tensors[f"{Q}.{name}"] = tensor.reshape(like.shape).to(like.dtype)

    return change


def replace(name: str, tensor: Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({f"{Q}.{name}": tensor})


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.pop(f"{Q}.{name}")


BAD_TENSORS: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "no number": ("fp8", poke("weight_scale_inv", float("nan")), "scales above 0, got nan"),
    "infinite": ("fp8-channel", poke("weight_scale", float("inf")), "scales above 0, got inf"),
    "zero": ("w4a16", poke("weight_scale", 0), "q_proj.weight_scale: expected scales above 0"),
    "negative": ("awq", poke("scales", -1), "scales above 0, got -1"),
    "of all": ("modelopt-nvfp4", poke("weight_scale_2", 0), "weight_scale_2: expected scales"),
    "missing": ("fp8", drop("weight_scale_inv"), f"{Q}.weight_scale_inv is missing"),
    "no zero points": ("w4a16-asymmetric", drop("weight_zero_point"), "zero_point is missing"),
    "transposed": (
        "fp8",
        lambda t: t.update({f"{Q[:-17]}.mlp.down_proj.weight_scale_inv": torch.ones(4, 2)}),
        "its scale: expected F32 or F16 or BF16 [2, 4], got F32 [4, 2]",
    ),
    "packed": (
        "w4a16",
        replace("weight_shape", torch.tensor([256, 512])),
        "its codes: expected I32 [256, 64], got I32 [256, 32]",
    ),
    "no shape": ("w4a16", replace("weight_shape", torch.tensor([0, 256])), "expected [out, in]"),
    "groups": ("gptq", replace("g_idx", torch.full((256,), 9)), "expected groups 0 to 3, got 9"),
    "zero points": (
        "gptq",
        replace("qzeros", torch.full((4, 32), 0x11111111, dtype=torch.int32)),
        "as gptq its zero points are not 8",
    ),
    "twice": ("awq", replace("weight", torch.ones(256, 256)), "stored in two formats at once"),
    "scaled activations": (
        "modelopt-fp8",
        replace("pre_quant_scale", torch.ones(256)),
        "pre_quant_scale: activations that are scaled",
    ),
    "type": (
        "fp8",
        replace("weight", torch.ones(256, 256)),
        "expected F8_E4M3 [256, 256], got F32",
    ),
    "excluded": (
        "fp8",
        lambda t: t.update({"lm_head.weight_scale_inv": torch.ones(6, 2)}),
        "lm_head is quantised, and config.json: quantization_config excludes it",
    ),
    "token table": (
        "awq",
        lambda t: t.update({"model.language_model.embed_tokens.scales": torch.ones(4, 2)}),
        "a quantised table: not supported",
    ),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_are_no_sound_weights_are_refused_in_one_line(
    case: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    name, change, message = BAD_TENSORS[case]
    assert message in refusal(changed(folders[name], tmp_path / "bad", change))


BAD_CLAIMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "method": ("fp8", {"quant_method": "bitsandbytes"}, "quantised by bitsandbytes: not supported"),
    "no method": ("fp8", {"quant_method": 7}, "quantised by unknown: not supported"),
    "fmt": ("fp8", {"fmt": "e5m2"}, "fmt: expected e4m3, float8_e4m3fn, got 'e5m2'"),
    "block": ("fp8", {"weight_block_size": [64, 64]}, "its scale: expected"),
    "no block": ("fp8", {"weight_block_size": [0, 128]}, "expected rows and columns"),
    "marlin": ("awq", {"version": "marlin"}, "version: expected gemm, got 'marlin'"),
    "bits": ("gptq", {"bits": 3}, "bits: expected 4, got 3"),
    "group": ("gptq", {"group_size": 0}, "group_size: expected columns of a group, or -1, got 0"),
    "other group": ("awq", {"group_size": 128}, "its scale: expected"),
    "algorithm": ("modelopt-fp8", {"quant_algo": "W4A8_AWQ"}, "quant_algo: expected FP8,"),
    "format": ("w4a16", {"format": "marlin-24"}, "format: expected float-quantized,"),
    "sparse": ("w4a16", {"sparsity_config": {"format": "sparse-bitmask"}}, "sparse weights"),
    "no groups": ("w4a16", {"config_groups": {}}, "expected at least one"),
    "group of nothing": ("w4a16", {"config_groups": {"g": 3}}, "expected targets and weights"),
    "three bits": (
        "w4a16",
        {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 3}}}},
        "config_groups.g: num_bits 3: not supported",
    ),
    "group of lists": ("awq", {"group_size": [64]}, "group_size: expected columns of a group"),
    "bits of lists": (
        "w4a16",
        {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": [4]}}}},
        "config_groups.g: num_bits: expected a word or a number, got [4]",
    ),
    "layer of lists": (
        "modelopt-fp8",
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {Q: {"quant_algo": ["FP8"]}}},
        "expected one of FP8",
    ),
    "huge repeat": (
        "w4a16",
        {"ignore": ["re:a{99999999999}"]},
        "regular expression a{99999999999}: {999",
    ),
    "no expression": ("w4a16", {"ignore": ["re:("]}, "regular expression (: missing )"),
    "lookahead": ("w4a16", {"ignore": ["re:.*(?!gate)"]}, "lookahead: not supported"),
}


@pytest.mark.parametrize("case", BAD_CLAIMS)
def test_config_that_is_unknown_or_contradicts_the_tensors_is_refused_in_one_line(
    case: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    name, claim, message = BAD_CLAIMS[case]
    assert message in refusal(changed(folders[name], tmp_path / "bad", claim=claim))


def test_two_formats_claimed_at_once_are_refused_by_both_places(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = changed(folders["fp8"], tmp_path / "two")
    other = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(other))
    message = refusal(folder)
    assert "two formats are claimed at once" in message
    assert "'fp8' in config.json: quantization_config" in message
    assert "'modelopt FP8' in hf_quant_config.json" in message


def test_modelopts_own_file_alone_is_read_with_its_kv_scales(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    scales = {f"{Q[:-7]}.{p}_proj.{p}_scale": torch.tensor(0.5) for p in "kv"}
    folder = changed(folders["modelopt-fp8"], tmp_path / "own", lambda t: t.update(scales))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    own = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    producer = {"name": "modelopt", "version": "0.47.0"}
    text = json.dumps({"producer": producer, "quantization": own})
    (folder / "hf_quant_config.json").write_text(text)
    found = read_target(folder).quantisation
    assert found is not None
    assert found.provenance == "ModelOpt 0.47.0, FP8 (hf_quant_config.json)"
    assert (found.kv_cache, found.excluded) == ("FP8", ("lm_head",))
    kv_scales = {f"layers.0.self_attn.{p}_proj.{p}_scale" for p in "kv"}
    assert set(found.kv_scales) == kv_scales


def test_claim_over_weights_of_16_bits_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders["fp8"], tmp_path / "dense")
    tensors = load_file(folder / "model.safetensors")
    dense = {
        name: tensor.to(torch.bfloat16) if tensor.dtype == torch.float8_e4m3fn else tensor
        for name, tensor in tensors.items()
        if not name.endswith("scale_inv")
    }
    (folder / "model.safetensors").unlink()  # it is the other's too
    save_file(dense, folder / "model.safetensors")
    assert "names fp8, but no weight is quantised" in refusal(folder)


def test_inspect_names_format_groups_exclusions_and_provenance(folders: dict[str, Path]) -> None:
    spec = read_target(folders["w4a16-asymmetric"])
    line = "\n".join(map(str, inspection_lines(spec, None)))
    title = "INT4 (pack-quantized) group 64, zero points"
    where = "compressed-tensors, format pack-quantized (config.json: quantization_config)"
    for part in (f"by {where}: 56 weights {title}", "activations 16-bit", "lm_head, re:.*visual.*"):
        assert part in line
    told = inspection(spec, None)["target"]["quantisation"]
    assert told["weights"] == {title: 56}
    assert (told["method"], told["excluded"]) == (
        "compressed-tensors",
        ["lm_head", "re:.*visual.*"],
    )


def test_group_index_that_says_nothing_new_is_left_out(folders: dict[str, Path]) -> None:
    name = "layers.0.self_attn.q_proj.weight"
    plain = read_target(folders["gptq"]).tensors[name]
    shuffled = read_target(folders["gptq-act-order"]).tensors[name]
    assert (len(plain.stored), len(shuffled.stored)) == (3, 4)
