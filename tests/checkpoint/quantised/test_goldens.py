"""Weights that the producers' own writers packed: read as their own readers unpack them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint.quantised.record_goldens import GOLDENS, SHAPE
from trt_eagle3.checkpoint.model_config import read_model_config
from trt_eagle3.checkpoint.quantised.read import open_weights
from trt_eagle3.checkpoint.quantised.weight import Quantisation, QuantisedRef
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.runtime.weights import materialise
from trt_eagle3.errors import UserError
from trt_eagle3.graph.weight_formats import format_of
from trt_eagle3.graph.weights import WeightExpr, part_of

WEIGHT = "layers.0.self_attn.q_proj.weight"
TITLES = {
    "fp8": "FP8 (e4m3) block 16 x 32",
    "ct-fp8-channel": "FP8 (e4m3) per channel",
    "ct-fp8-tensor": "FP8 (e4m3) per tensor",
    "ct-fp8-block": "FP8 (e4m3) block 16 x 32",
    "ct-int8-channel": "INT8 per channel",
    "ct-w4a16-group": "INT4 (pack-quantized) group 32",
    "ct-w4a16-asymmetric": "INT4 (pack-quantized) group 32, zero points",
    "ct-w4a16-channel": "INT4 (pack-quantized) per channel",
    "ct-w8a16-group": "INT8 (pack-quantized) group 32",
    "ct-nvfp4": "NVFP4 (global scale divides) group 16",
    "awq": "INT4 (AWQ) group 32, zero points",
    "gptq": "INT4 (GPTQ) group 32, zero points",
    "gptq-act-order": "INT4 (GPTQ) group 32, zero points, act order",
    "modelopt-fp8": "FP8 (e4m3) per tensor",
    "modelopt-nvfp4": "NVFP4 group 16",
}


def read(name: str, folder: Path, **weights: Any) -> tuple[QuantisedRef, Quantisation, Tensor]:
    """The weight of a golden, written as a checkpoint, and what its producer makes of it.

    ``weights``: keys of its group's weights replaced.
    """
    tensors = load_file(GOLDENS / f"{name}.safetensors")
    with safe_open(GOLDENS / f"{name}.safetensors", framework="pt") as file:
        config = {"quantization_config": json.loads(file.metadata()["quantization_config"])}
    for group in config["quantization_config"].get("config_groups", {}).values():
        group["weights"] |= weights
    expected = tensors.pop("expected")
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    found, quantisation = open_weights(read_model_config(folder), (("model.", ""),))
    ref = found[WEIGHT]
    assert isinstance(ref, QuantisedRef)
    assert quantisation is not None
    return ref, quantisation, expected


def made(ref: QuantisedRef) -> Tensor:
    expr = WeightExpr(
        (part_of(ref, lambda r: r.file.name),), dtype_named("float32"), format_of([ref])
    )
    return materialise(expr, ref.file.parent, expr.dtype)


@pytest.mark.parametrize("name", TITLES)
def test_weight_of_a_producers_writer_has_the_values_of_its_reader(
    name: str, tmp_path: Path
) -> None:
    ref, quantisation, expected = read(name, tmp_path)
    assert ref.shape == SHAPE
    assert quantisation.weights == {TITLES[name]: 1}
    # one product of floats at most is rounded otherwise
    torch.testing.assert_close(made(ref), expected, rtol=2e-7, atol=0)


def test_block_of_compressed_tensors_may_be_a_text(tmp_path: Path) -> None:
    ref, _, expected = read("ct-fp8-block", tmp_path, block_structure="16x32")
    assert ref.block == (16, 32)
    torch.testing.assert_close(made(ref), expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("block", ["16", "16x", "-1x32", "16x32x1", "x".join(["9" * 400] * 2)])
def test_block_that_is_no_rows_and_columns_is_refused(block: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="block_structure: expected rows and columns") as caught:
        read("ct-fp8-block", tmp_path, block_structure=block)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_goldens_are_all_read() -> None:
    assert {file.stem for file in GOLDENS.iterdir()} == set(TITLES)
