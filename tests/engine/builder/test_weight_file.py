"""Weights in the engine's type: the values, what is refused by name, and the memory it takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.peak_memory import peak_bytes
from tests.tiny import DRAFT, TARGET
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.checkpoint.tensor_index import open_index
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.builder.weight_file import write_tables, write_weights
from trt_eagle3.engine.bundle.weight_locations import TABLE_FILE, table_tensors
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.trt_export import TrtExport
from trt_eagle3.graph.weights import WeightExpr, WeightPart, part_of


def ready(
    folder: Path, tensors: dict[str, Tensor], scale: float = 1.0, dtype: str = "float16"
) -> TrtExport:
    """One weight made of ``tensors`` stacked, each times ``scale``."""
    save_file(tensors, folder / "model.safetensors")
    index = open_index(folder)
    parts = tuple(part_of(index[name], lambda r: r.file.name, scale) for name in tensors)
    return TrtExport(onnx.ModelProto(), {"w": 256}, {"w": WeightExpr(parts, dtype_named(dtype))})


def test_parts_are_stacked_converted_and_scaled(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 8).bfloat16(), "a": torch.randn(2, 8)}
    write_weights(ready(tmp_path, tensors, scale=1 / 64), tmp_path, tmp_path / "w.bin")
    found = torch.from_numpy(np.fromfile(tmp_path / "w.bin", dtype=np.float16, offset=256)).view(
        5, 8
    )
    assert torch.equal(found, (torch.cat([t.float() for t in tensors.values()]) / 64).half())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1e5, "layers.0.w holds 99840, which is no float16 value: float16 ends at 65504"),
        (float("nan"), "damaged"),
    ],
)
def test_value_that_does_not_fit_is_refused_with_its_tensor(
    tmp_path: Path, value: float, said: str
) -> None:
    weight = torch.zeros(300, 7, dtype=torch.bfloat16)
    weight[299, 6] = value
    with pytest.raises(UserError, match=said):
        write_weights(ready(tmp_path, {"layers.0.w": weight}), tmp_path, tmp_path / "w.bin")
    bfloat16 = ready(tmp_path, {"layers.0.w": torch.full((2, 2), 1e5).bfloat16()}, dtype="bfloat16")
    write_weights(bfloat16, tmp_path, tmp_path / "w.bin")


def test_value_that_fits_once_scaled_is_taken(tmp_path: Path) -> None:
    large = {"w": torch.full((2, 2), 1e5)}
    write_weights(ready(tmp_path, large, scale=1 / 64), tmp_path, tmp_path / "w.bin")
    with pytest.raises(UserError, match="float16 ends at"):
        write_weights(ready(tmp_path, large), tmp_path, tmp_path / "w.bin")


def test_file_cut_short_is_refused(tmp_path: Path) -> None:
    cut = ready(tmp_path, {"w": torch.zeros(64, 64)})
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UserError, match="w is cut short"):
        write_weights(cut, tmp_path, tmp_path / "w.bin")


def test_tables_are_what_decoding_reads_outside_the_engines(tmp_path: Path) -> None:
    spec = read_target(TARGET)
    manifest = read_draft(DRAFT, spec)
    tables = table_tensors(spec, manifest)
    assert tables.keys() == {"embed_tokens.weight", "draft.d2t"}
    write_tables(tmp_path / TABLE_FILE, tables, dtype_named("float16"))
    found = load_file(tmp_path / TABLE_FILE)
    original = load_file(TARGET / "model.safetensors")["model.language_model.embed_tokens.weight"]
    assert torch.equal(found["embed_tokens.weight"], original.half())
    assert found["draft.d2t"].dtype == torch.int64


def test_conversion_takes_the_same_memory_whatever_the_tensors_size(tmp_path: Path) -> None:
    """A tensor of 128 MB, converted piece by piece: whole in both types it would take 256 MB."""
    part = WeightPart("w", "w.raw", 0, 128 << 20, dtype_named("bfloat16"), (65536, 1024))
    (tmp_path / "w.raw").open("wb").truncate(part.num_bytes)
    weights = {"w": WeightExpr((part,), dtype_named("float16"))}
    export = TrtExport(onnx.ModelProto(), {"w": 0}, weights)
    taken = peak_bytes(lambda: write_weights(export, tmp_path, tmp_path / "w.bin"))
    assert taken < 112 << 20
