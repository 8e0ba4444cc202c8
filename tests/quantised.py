"""The tiny target as quantised checkpoints, packed by plain code of the tests' own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny import TARGET

__all__ = ["PACKERS", "add_kv_scales", "pack", "save_quantised"]

Packed = dict[str, Tensor]
GROUP = 64
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp8_block(weight: Tensor) -> Packed:
    """Blocks of 128 x 128, short ones at the ends."""
    scale = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    codes = torch.empty_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            where = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scale[i, j] = weight[where].abs().max() / 448
            codes[where] = weight[where] / scale[i, j]
    return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def fp8_channel(weight: Tensor) -> Packed:
    scale = (weight.abs().amax(dim=1, keepdim=True) / 448).bfloat16()
    codes = (weight / scale.float()).clamp(-448, 448)
    return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale": scale}


def fp8_tensor(weight: Tensor) -> Packed:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.02)}


def int8(weight: Tensor) -> Packed:
    scale = (weight.abs().amax(dim=1, keepdim=True) / 127).bfloat16()
    codes = (weight / scale.float()).round().clamp(-128, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scale}


def words(numbers: Tensor) -> Tensor:
    """int32 [..., n / 8] of numbers 0 to 15 [..., n], lowest bits first."""
    places = 16 ** torch.arange(8, dtype=torch.int64)
    whole = (numbers.long().unflatten(-1, (-1, 8)) * places).sum(dim=-1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).int()


def grouped(weight: Tensor, *, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Codes 0 to 15 [out, in], scales [out, groups] and zero points [out, groups]."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(dim=-1).clamp(max=0), groups.amax(dim=-1).clamp(min=0)
    scale = torch.maximum(-low / 8, high / 7) if symmetric else (high - low) / 15
    scale = scale.clamp(min=1e-5).to(dtype)
    wide = scale.float()
    zero = torch.full_like(wide, 8) if symmetric else (-low / wide).round().clamp(0, 15)
    codes = ((groups / wide[..., None]).round() + zero[..., None]).clamp(0, 15)
    return codes.flatten(1), scale, zero


def w4a16(weight: Tensor, *, symmetric: bool = True) -> Packed:
    codes, scale, zero = grouped(weight, symmetric=symmetric, dtype=torch.bfloat16)
    packed = {"weight_packed": words(codes), "weight_scale": scale}
    packed["weight_shape"] = torch.tensor(weight.shape)
    if not symmetric:
        packed["weight_zero_point"] = words(zero.T).T.contiguous()
    return packed


def awq(weight: Tensor) -> Packed:
    codes, scale, zero = grouped(weight, symmetric=False, dtype=torch.float16)

    def interleaved(numbers: Tensor) -> Tensor:
        return words(numbers.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(-2))

    return {
        "qweight": interleaved(codes.T),
        "qzeros": interleaved(zero.T),
        "scales": scale.T.contiguous(),
    }


def gptq(weight: Tensor) -> Packed:
    codes, scale, zero = grouped(weight, symmetric=True, dtype=torch.float16)
    return {
        "qweight": words(codes).T.contiguous(),
        "qzeros": words(zero.T - 1),
        "scales": scale.T.contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def gptq_act_order(weight: Tensor) -> Packed:
    """Columns of a group stand apart."""
    order = torch.arange(weight.shape[1]) % (weight.shape[1] // GROUP)
    places = order.argsort(stable=True)
    packed = gptq(weight[:, places])
    codes = packed["qweight"].T[..., None] >> torch.arange(0, 32, 4)
    shuffled = torch.empty(weight.shape, dtype=torch.int64)
    shuffled[:, places] = (codes & 15).flatten(1).long()
    return {**packed, "qweight": words(shuffled).T.contiguous(), "g_idx": order.int()}


def nvfp4(weight: Tensor) -> Packed:
    groups = weight.unflatten(1, (-1, 16))
    whole = weight.abs().max() / (6 * 448)
    scale = (groups.abs().amax(dim=-1) / 6 / whole).to(torch.float8_e4m3fn)
    wide = (scale.float() * whole).clamp(min=1e-12)[..., None]
    sizes = torch.tensor(E2M1)
    codes = ((groups / wide).abs()[..., None] - sizes).abs().argmin(dim=-1) + 8 * (groups < 0)
    pairs = codes.flatten(1).unflatten(1, (-1, 2)).to(torch.uint8)
    packed = pairs[..., 0] | pairs[..., 1] << 4
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": whole}


def _ct(stored: str, **weights: Any) -> dict[str, Any]:
    """A config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*visual.*"],
    }


_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}
PACKERS: Mapping[str, tuple[Callable[[Tensor], Packed], dict[str, Any]]] = {
    "fp8": (
        fp8_block,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["visual", "lm_head"],
        },
    ),
    "fp8-channel": (fp8_channel, _ct("float-quantized", **_FP8, strategy="channel")),
    "modelopt-fp8": (
        fp8_tensor,
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "model.visual*"]},
    ),
    "int8": (
        int8,
        _ct("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"),
    ),
    "w4a16": (w4a16, _ct("pack-quantized", **_INT4, symmetric=True)),
    "w4a16-asymmetric": (
        lambda weight: w4a16(weight, symmetric=False),
        _ct("pack-quantized", **_INT4, symmetric=False),
    ),
    "awq": (
        awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["visual"],
        },
    ),
    "gptq": (gptq, _GPTQ),
    "gptq-act-order": (gptq_act_order, {**_GPTQ, "desc_act": True}),
    "modelopt-nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
}
"""Name of a format -> what packs a weight, and its config."""


def pack(tensors: Mapping[str, Tensor], packer: Callable[[Tensor], Packed]) -> dict[str, Tensor]:
    """``tensors`` with the decoder's projections packed."""
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if "language_model.layers" in name and name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            packed = packer(tensor.float())
            made |= {f"{module}.{last}": value.contiguous() for last, value in packed.items()}
        else:
            made[name] = tensor
    return made


def save_quantised(folder: Path, name: str, **changes: Any) -> Path:
    """The tiny target in the format ``name``, its quantisation config with ``changes``."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in TARGET.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder / file.name)
    packer, claim = PACKERS[name]
    save_file(pack(load_file(TARGET / "model.safetensors"), packer), folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**claim, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def add_kv_scales(folder: Path) -> Path:
    """Give a checkpoint scales of keys and values, no two alike; those of layer 1's keys are so
    small that many keys are too large.
    """
    file = folder / "model.safetensors"
    tensors, config = load_file(file), json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    head = torch.arange(text["num_key_value_heads"])
    for layer in range(text["num_hidden_layers"]):
        for kind, base in (("k", 0.0002 if layer == 1 else 0.02), ("v", 0.05)):
            name = f"model.language_model.layers.{layer}.self_attn.{kind}_scale"
            tensors[name] = base * (1 + 0.1 * layer + 0.37 * head)
    save_file(tensors, file)
    return folder
