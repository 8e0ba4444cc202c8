"""Record quantised weights as the producers' own writers pack and unpack them.

Run with compressed-tensors, autoawq, gptqmodel, nvidia-modelopt and transformers installed:
``python -m tests.checkpoint.quantised.record_goldens``. Every file holds one weight, a few kB: the
tensors under their names in a checkpoint, what the producer makes of them in float32
(``expected``), and the config in its metadata. Written by compressed-tensors 0.20.0, autoawq 0.2.9,
gptqmodel 7.7.0, nvidia-modelopt 0.47.0 and transformers 5.23.0.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor

GOLDENS = Path(__file__).parent / "goldens"
MODULE = "model.layers.0.self_attn.q_proj"
SHAPE = (32, 64)

Golden = tuple[dict[str, Tensor], Tensor, dict[str, Any]]


def drawn(shape: tuple[int, int] = SHAPE) -> Tensor:
    """Rows and columns of different sizes, so that a misplaced scale shows."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator) * 0.02
    weight *= torch.rand(shape[0], 1, generator=generator) + 0.5
    return (weight * (torch.rand(1, shape[1], generator=generator) + 0.5)).bfloat16()


def fine_grained_fp8() -> Golden:
    """transformers' quantiser; the weight is of whole blocks, as it quantises no other."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize, _dequantize_fp8_weight

    config = SimpleNamespace(weight_block_size=(16, 32), scale_fmt="float")
    quantise = Fp8Quantize(SimpleNamespace(quantization_config=config))
    found = quantise._quantize_one("weight", drawn())
    expected = _dequantize_fp8_weight(
        found["weight"], found["weight_scale_inv"], (16, 32), torch.float32
    )
    claim = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}
    return found, expected, claim


def compressed(arguments: dict[str, Any], stored: str) -> Golden:
    """compressed-tensors' compressor of ``stored``, over a min-max observer's scales."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.compressors.nvfp4 import base as nvfp4
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=stored)
    weight = drawn()
    state = {"weight": weight}
    whole = None
    if stored == "nvfp4-pack-quantized":
        whole = generate_gparam(weight.min(), weight.max())
        state["weight_global_scale"] = whole
    low, high = _extremes(weight, args)
    scale, zero = calculate_qparams(low, high, args, whole)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(stored)
    packed = compressor.compress(dict(state), scheme)
    # its float32 values: it rounds to the type of the scales
    wide = {n: t.float() if t.dtype == torch.bfloat16 else t for n, t in packed.items()}
    with mock.patch.object(nvfp4, "unpack_fp4_from_uint8", _unpack_float32):
        expected = compressor.decompress(wide, scheme)["weight"].float()
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": None}
    claim = {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*visual.*"],
    }
    return packed, expected, claim


def _unpack_float32(packed: Tensor, rows: int, columns: int) -> Tensor:
    """compressed-tensors' unpacking of NVFP4, which makes bfloat16 unless told otherwise."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    made: Tensor = unpack_fp4_from_uint8(packed, rows, columns, dtype=torch.float32)
    return made


def _extremes(weight: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    """Least and largest of each scale's values."""
    strategy = str(args.strategy)
    if strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if strategy == "block":
        rows, columns = args.block_structure
        blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        return blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    columns = args.group_size if strategy in {"group", "tensor_group"} else weight.shape[1]
    groups = weight.unflatten(1, (-1, columns))
    return groups.amin(dim=-1), groups.amax(dim=-1)


def awq() -> Golden:
    """AutoAWQ's gemm packing and its own unpacking."""
    gemm = _file_module("awq", "modules/linear/gemm.py")
    packing = _file_module("awq", "utils/packing_utils.py")
    weight = drawn().half()
    scales, zeros = _asymmetric(weight, 32)
    linear = torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False, dtype=torch.float16)
    linear.weight.data = weight
    made = gemm.WQLinear_GEMM.from_linear(linear, 4, 32, False, scales.T, zeros.T)
    found = {name: getattr(made, name) for name in ("qweight", "qzeros", "scales")}
    wide = [made.qweight, made.qzeros, made.scales.float()]
    expected = packing.dequantize_gemm(*wide, 4, 32).T
    claim = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    return found, expected, {**claim, "zero_point": True, "modules_to_not_convert": ["visual"]}


def gptq(*, shuffled: bool, symmetric: bool) -> Golden:
    """GPTQModel's packing (version 2), turned into version 1 as its ``save`` does."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    weight = drawn()
    order = torch.arange(SHAPE[1]) // 32
    if shuffled:
        order = order[torch.randperm(SHAPE[1], generator=torch.Generator().manual_seed(2))]
    scales, zeros = _grouped(weight.float(), order, symmetric=symmetric)
    linear = torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    linear.weight.data = weight.float()
    made = TorchLinear(
        bits=4,
        group_size=32,
        sym=symmetric,
        desc_act=shuffled,
        in_features=SHAPE[1],
        out_features=SHAPE[0],
        bias=False,
        pack_dtype=torch.int32,
    )
    made.pack_original(linear, scales, zeros, g_idx=order.int())
    made.scales = made.scales.float()
    made.post_init()
    expected = made.dequantize_weight().float().T.contiguous()
    made.scales = made.scales.half()
    convert_gptq_v2_to_v1_format_module(made, SimpleNamespace(bits=4, pack_dtype=torch.int32))
    found = {n: getattr(made, n).data for n in ("qweight", "qzeros", "scales", "g_idx")}
    claim = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": shuffled}
    return found, expected, {**claim, "sym": symmetric, "checkpoint_format": "gptq"}


def modelopt_fp8() -> Golden:
    """ModelOpt's tensor of FP8."""
    from modelopt.torch.quantization.qtensor.fp8_tensor import FP8QTensor

    made, scale = FP8QTensor.quantize(drawn().float())
    expected = made.dequantize(torch.float32, scale=scale)
    found = {"weight": made._quantized_data, "weight_scale": scale.float().reshape(())}
    found["input_scale"] = torch.tensor(0.01)
    return found, expected, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}


def modelopt_nvfp4() -> Golden:
    """ModelOpt's tensor of NVFP4."""
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    made, scale, whole = NVFP4QTensor.quantize(drawn().float(), 16)
    expected = made.dequantize(torch.float32, scale=scale, double_scale=whole, block_sizes={-1: 16})
    found = {"weight": made._quantized_data, "weight_scale": scale, "weight_scale_2": whole}
    return found, expected, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}


def _asymmetric(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Scales and zero points [out, groups] of four bits."""
    return _grouped(weight.float(), torch.arange(weight.shape[1]) // group, symmetric=False)


def _grouped(weight: Tensor, order: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor]:
    scales, zeros = [], []
    for index in range(int(order.max()) + 1):
        columns = weight[:, order == index]
        low, high = columns.amin(dim=1).clamp(max=0), columns.amax(dim=1).clamp(min=0)
        if symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scale = ((high - low) / 15).half().float()
        zeros.append(
            torch.full_like(scale, 8) if symmetric else (-low / scale).round().clamp(0, 15)
        )
        scales.append(scale)
    return torch.stack(scales, dim=1), torch.stack(zeros, dim=1)


def _file_module(package: str, file: str) -> ModuleType:
    """A module by its file: what its package imports is not all installed."""
    root = importlib.util.find_spec("compressed_tensors")
    assert root is not None
    assert root.origin is not None
    path = Path(root.origin).parent.parent / package / file
    for name in (
        "awq",
        "awq.utils",
        "awq.utils.module",
        "awq.utils.utils",
        "awq.utils.packing_utils",
    ):
        sys.modules.setdefault(name, ModuleType(name))
    packing = path.parents[1] / "utils/packing_utils.py"
    source = path if path.name == "packing_utils.py" else path.parents[2] / "utils/packing_utils.py"
    del packing
    for name, value in {
        "try_import": lambda _: (None, ""),
        "get_best_device": lambda: "cpu",
    }.items():
        setattr(sys.modules["awq.utils.module"], name, value)
        setattr(sys.modules["awq.utils.utils"], name, value)
    spec = importlib.util.spec_from_file_location("awq.utils.packing_utils", source)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    sys.modules["awq.utils.packing_utils"] = made
    if path == source:
        return made
    spec = importlib.util.spec_from_file_location("awq_gemm", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


_INT4 = {"num_bits": 4, "type": "int"}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
WRITERS: dict[str, Callable[[], Golden]] = {
    "fp8": fine_grained_fp8,
    "ct-fp8-channel": lambda: compressed({**_FP8, "strategy": "channel"}, "float-quantized"),
    "ct-fp8-tensor": lambda: compressed({**_FP8, "strategy": "tensor"}, "float-quantized"),
    "ct-fp8-block": lambda: compressed(
        {**_FP8, "strategy": "block", "block_structure": [16, 32]}, "float-quantized"
    ),
    "ct-int8-channel": lambda: compressed(
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}, "int-quantized"
    ),
    "ct-w4a16-group": lambda: compressed(
        {**_INT4, "symmetric": True, "strategy": "group", "group_size": 32}, "pack-quantized"
    ),
    "ct-w4a16-asymmetric": lambda: compressed(
        {**_INT4, "symmetric": False, "strategy": "group", "group_size": 32}, "pack-quantized"
    ),
    "ct-w4a16-channel": lambda: compressed(
        {**_INT4, "symmetric": True, "strategy": "channel"}, "pack-quantized"
    ),
    "ct-w8a16-group": lambda: compressed(
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        "pack-quantized",
    ),
    "ct-nvfp4": lambda: compressed(
        {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": "torch.float8_e4m3fn",
        },
        "nvfp4-pack-quantized",
    ),
    "awq": awq,
    "gptq": lambda: gptq(shuffled=False, symmetric=True),
    "gptq-act-order": lambda: gptq(shuffled=True, symmetric=False),
    "modelopt-fp8": modelopt_fp8,
    "modelopt-nvfp4": modelopt_nvfp4,
}


def main(names: list[str]) -> Iterator[str]:
    """Write the goldens called ``names``, or all."""
    GOLDENS.mkdir(exist_ok=True)
    for name in names or WRITERS:
        tensors, expected, claim = WRITERS[name]()
        stored = {f"{MODULE}.{n}": t.detach().contiguous() for n, t in tensors.items()}
        stored["expected"] = expected.detach().float().contiguous()
        file = GOLDENS / f"{name}.safetensors"
        save_file(stored, file, {"quantization_config": json.dumps(claim)})
        yield f"{file.name}: {file.stat().st_size} bytes"


if __name__ == "__main__":
    for line in main(sys.argv[1:]):
        print(line)
