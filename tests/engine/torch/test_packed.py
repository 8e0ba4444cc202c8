"""Quantised weights as they are packed for the kernels: the same values, or none at all."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.quantised import PACKERS
from tests.quantised import pack as quantise
from trt_eagle3.checkpoint.model_config import ModelConfig
from trt_eagle3.checkpoint.quantised.read import open_weights
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.runtime.weights import integer_rows, materialise
from trt_eagle3.engine.torch import pack as pack_module
from trt_eagle3.engine.torch import packed
from trt_eagle3.engine.torch.pack import pack
from trt_eagle3.engine.torch.packed import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Nvfp4Weight,
    PackedWeight,
    warn_of_unrounded,
)
from trt_eagle3.engine.torch.packing import packed_columns
from trt_eagle3.graph.formats.format import IntegerRows
from trt_eagle3.graph.formats.nvfp4 import E2M1
from trt_eagle3.graph.weight_formats import format_of
from trt_eagle3.graph.weight_slices import take_columns, take_rows
from trt_eagle3.graph.weights import WeightExpr, WeightPart, part_of

CPU = torch.device("cpu")
F32, BF16 = dtype_named("float32"), dtype_named("bfloat16")
INT4 = {"awq", "gptq", "gptq_v2", "int4_packed"}
CLASSES = {
    "fp8": Fp8Weight,
    "int8": Int8Weight,
    **dict.fromkeys(INT4, Int4Weight),
    **dict.fromkeys(("nvfp4", "nvfp4_divided"), Nvfp4Weight),
}
ROWS = {"gate": 384, "up": 208}


def expression(
    name: str, folder: Path, columns: int = 512, activations: dict[str, object] | None = None
) -> tuple[WeightExpr, Path]:
    """Gate and up in the format ``name``, the second one halved; ``activations``: what
    compressed-tensors' config says of them.
    """
    prefix = "model.language_model.layers.0.mlp."
    drawn = torch.Generator().manual_seed(columns)
    packer, claim = PACKERS[name]
    if activations is not None:
        groups = claim["config_groups"]
        said = {key: group | {"input_activations": activations} for key, group in groups.items()}
        claim = {**claim, "config_groups": said}
    dense = {
        f"{prefix}{part}_proj.weight": torch.randn(rows, columns, generator=drawn)
        for part, rows in ROWS.items()
    }
    save_file(quantise(dense, packer), folder / "model.safetensors")
    config = ModelConfig({"quantization_config": claim}, folder / "config.json")
    tensors, _ = open_weights(config, (("model.language_model.", ""),))
    refs = [tensors[f"layers.0.mlp.{part}_proj.weight"] for part in ROWS]
    parts = [part_of(ref, lambda r: r.file.name, s) for ref, s in zip(refs, (1, 0.5), strict=True)]
    return WeightExpr(tuple(parts), BF16, format_of(refs)), folder


def values_of(weight: PackedWeight) -> Tensor:
    """float32 [N, K]: what the kernels take a packed weight for."""
    if isinstance(weight, Fp8Weight | Int8Weight):
        columns = weight.codes.shape[1]
        place = packed_columns(columns).argsort()
        codes = weight.codes.float()[:, place] - (128 if isinstance(weight, Int8Weight) else 0)
        rows = weight.scale.repeat_interleave(-(-len(codes) // len(weight.scale)), 0)
        if len(weight.scale) not in {1, len(codes)}:
            rows = weight.scale.repeat_interleave(128, 0)
        wide: Tensor = rows[: len(codes)].repeat_interleave(columns // rows.shape[1], 1)
        values: Tensor = codes * wide
        return values
    assert isinstance(weight, Int4Weight | Nvfp4Weight)
    words = weight.codes.view(len(weight.codes), -1, 4, 4)  # [128s, lanes, 32s]
    nibbles = torch.stack([words >> 4 * place & 15 for place in range(8)], -1)
    pairs = nibbles.unflatten(-1, (2, 2, 2))  # [two of a pair, 16s, halves]
    codes = pairs.permute(0, 1, 3, 5, 6, 2, 4).flatten(1).float()
    if isinstance(weight, Nvfp4Weight):
        scales = weight.scale.float() * weight.row_scale
        return torch.tensor(E2M1)[codes.int()] * scales.repeat_interleave(16, 1)
    group = codes.shape[1] // weight.scale.shape[1]
    zero = torch.tensor(8.0) if weight.zero_point is None else weight.zero_point.float()
    whole = codes - (zero if zero.ndim == 0 else zero.repeat_interleave(group, 1))
    scale: Tensor = weight.scale.float().repeat_interleave(group, 1)
    found: Tensor = whole * scale
    return found


@pytest.mark.parametrize("name", PACKERS)
def test_pack_has_the_values_of_the_weight_or_declines(name: str, tmp_path: Path) -> None:
    expr, root = expression(name, tmp_path)
    weight = pack(expr, root, CPU)
    if expr.format not in CLASSES or "act" in name:
        assert weight is None
        return
    assert isinstance(weight, CLASSES[expr.format])
    if isinstance(weight, Fp8Weight):
        assert not weight.fp8_activations, "answers would depend on how many rows there are"
    expected = materialise(replace(expr, dtype=F32), root, F32)
    torch.testing.assert_close(values_of(weight), expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("zero", [128, 120])
def test_pack_takes_int8_groups_of_multiples_of_128_columns_without_zero_points(
    zero: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expr, root = expression("int8", tmp_path)
    scales = torch.rand(sum(ROWS.values()), 2) + 0.1

    def rows_of(expr: WeightExpr, part: WeightPart, root: Path) -> IntegerRows:
        whole = integer_rows(expr, part, root)
        own = scales[: len(whole.codes)]
        return replace(
            whole,
            zeros=torch.full(own.shape, zero, dtype=torch.uint8),
            scales=own,
            groups=torch.arange(512) // 256,
        )

    monkeypatch.setattr(pack_module, "integer_rows", rows_of)
    weight = pack(expr, root, CPU)
    if zero != 128:
        assert weight is None
        return
    assert isinstance(weight, Int8Weight)
    expected = torch.cat([rows_of(expr, part, root).values() * part.scale for part in expr.parts])
    torch.testing.assert_close(values_of(weight), expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_pack_multiplies_many_rows_in_fp8_where_asked_and_activations_are_dynamic(
    dynamic: bool, tmp_path: Path
) -> None:
    activations = {"num_bits": 8, "type": "float", "dynamic": dynamic, "strategy": "token"}
    expr, root = expression("fp8-channel", tmp_path, activations=activations)
    weight = pack(expr, root, CPU, activations="fp8")
    assert isinstance(weight, Fp8Weight)
    assert weight.fp8_activations is dynamic


def test_pack_takes_rows_of_a_part(tmp_path: Path) -> None:
    name = next(name for name in PACKERS if "block" in name or name == "fp8")
    expr, root = expression(name, tmp_path)
    expr = replace(expr, parts=(replace(expr.parts[0], rows=(5, 309)),))
    weight = pack(expr, root, CPU)
    assert weight is not None
    expected = materialise(replace(expr, dtype=F32), root, F32)
    torch.testing.assert_close(values_of(weight), expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("name", PACKERS)
def test_pack_has_the_values_of_a_slice_or_declines_one_that_cuts_a_group(
    name: str, tmp_path: Path
) -> None:
    expr, root = expression(name, tmp_path)
    packs = pack(expr, root, CPU) is not None
    for first, end in ((128, 256), (0, 384), (256, 512)):
        cut = take_columns(take_rows(expr, [(0, 160), (176, 304)]), (first, end))
        weight = pack(cut, root, CPU)
        assert (weight is not None) == packs
        if weight is not None:
            expected = materialise(replace(cut, dtype=F32), root, F32)
            torch.testing.assert_close(values_of(weight), expected, rtol=2e-7, atol=0)
    grouped = [p.quantised for p in expr.parts if p.quantised]
    if packs and all(1 < q.block[1] < 512 for q in grouped):
        assert pack(take_columns(expr, (8, 136)), root, CPU) is None


@pytest.mark.parametrize(
    ("rows", "passes"), [(1, [1]), (128, [128]), (129, [128, 1]), (384, [128] * 3)]
)
def test_few_rows_go_through_the_kernels_128_at_a_time(
    rows: int, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def linear_int8(x: Tensor, codes: Tensor, scale: Tensor, *, out: Tensor, **_: object) -> Tensor:
        seen.append(len(x))
        return torch.mm(x, (codes.float() - 128).T * scale.T, out=out)

    monkeypatch.setattr(packed.capi, "linear_int8", linear_int8)
    weight = Int8Weight(torch.randint(0, 256, (32, 128), dtype=torch.uint8), torch.rand(32, 1))
    x = torch.randn(rows, 128)
    expected = x @ ((weight.codes.float() - 128) * weight.scale).T
    torch.testing.assert_close(weight.linear(x), expected, atol=1e-3, rtol=0)
    assert seen == passes


@pytest.mark.parametrize("rows", [16, 385])
def test_rows_that_no_kernel_takes_meet_the_dequantised_weight(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        assert rows == 16, "too many rows are not asked for"
        raise NotImplementedError

    values = torch.randn(32, 128)
    monkeypatch.setattr(packed.capi, "linear_int8", refuse)
    monkeypatch.setattr(packed.capi, "unpack_int8", lambda *_: values)
    x = torch.randn(rows, 128)
    weight = Int8Weight(torch.zeros(32, 128, dtype=torch.uint8), torch.ones(32, 1))
    torch.testing.assert_close(weight.linear(x), x @ values.T)


@pytest.mark.parametrize("change", ["float32", "columns"])
def test_pack_declines_what_no_kernel_computes(change: str, tmp_path: Path) -> None:
    name = next(name for name in PACKERS if "channel" in name and "fp8" in name)
    expr, root = expression(name, tmp_path, columns=448 if change == "columns" else 512)
    expr = replace(expr, dtype=F32) if change == "float32" else expr
    assert pack(expr, root, CPU) is None


class _Asked:
    """Rows that say what they were asked for."""

    dtype = torch.bfloat16

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def values(self) -> Tensor:
        raise _AskedError("values")

    def codes(self, *, blocks: bool = False, integers: bool = False) -> packed.capi.RowCodes:
        raise _AskedError("blocks" if blocks else "int8" if integers else "codes")

    def rounded(self, *, blocks: bool = False) -> Tensor:
        raise _AskedError("rounded by blocks" if blocks else "rounded")


class _AskedError(Exception):
    pass


BY_ROW, BY_BLOCK = torch.ones(128, 1), torch.ones(1, 2)


@pytest.mark.parametrize(
    ("chip", "scale", "asked"),
    [
        ((9, 0), BY_ROW, {1: "rounded", 8: "rounded", 9: "codes", 4096: "codes"}),
        ((8, 9), BY_ROW, {1: "rounded", 128: "rounded", 129: "codes"}),
        ((9, 0), BY_BLOCK, {1: "rounded by blocks", 128: "rounded by blocks", 144: "blocks"}),
        ((8, 0), BY_ROW, {1: "values", 4096: "values"}),
    ],
)
def test_fp8_activations_are_rounded_whatever_the_number_of_rows_or_never(
    chip: tuple[int, int], scale: Tensor, asked: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_capability", lambda: chip)
    codes = torch.zeros(128, 256).to(torch.float8_e4m3fn)
    for rows, what in asked.items():
        with pytest.raises(_AskedError, match=f"^{what}$"):
            Fp8Weight(codes, scale, fp8_activations=True).product(_Asked(rows))
        with pytest.raises(_AskedError, match=r"^values$"):
            Fp8Weight(codes, scale).product(_Asked(rows))


def test_int8_activations_are_for_hopper_and_scales_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes = torch.zeros(128, 256, dtype=torch.uint8)
    for chip, scale, what in (
        ((9, 0), BY_ROW, "int8"),
        ((9, 0), torch.ones(128, 2), "values"),
        ((8, 9), BY_ROW, "values"),
    ):
        monkeypatch.setattr(packed, "_capability", lambda chip=chip: chip)
        weight = Int8Weight(codes, scale, int8_activations=True)
        assert weight.takes_bytes is (what == "int8")
        for rows in (1, 4096):
            with pytest.raises(_AskedError, match=f"^{what}$"):
                weight.product(_Asked(rows))


@pytest.mark.parametrize("activations", ["compute", "int8"])
def test_pack_rounds_rows_to_int8_where_asked(activations: str, tmp_path: Path) -> None:
    expr, root = expression("int8", tmp_path)
    weight = pack(expr, root, CPU, activations=activations)
    assert isinstance(weight, Int8Weight)
    assert weight.int8_activations is (activations == "int8")


@pytest.mark.parametrize(
    ("activations", "chip", "warns"),
    [
        ("fp8", (8, 0), "activations: fp8: this GPU .sm80. multiplies"),
        ("fp8", (8, 9), None),
        ("int8", (8, 9), "activations: int8: this GPU .sm89. multiplies"),
        ("int8", (9, 0), None),
        ("compute", (8, 0), None),
    ],
)
def test_activations_that_a_chip_does_not_round_are_warned_of(
    activations: str, chip: tuple[int, int], warns: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_capability", lambda: chip)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of_unrounded(activations)
    assert len(found) == (warns is not None)
    assert all(re.search(str(warns), str(warning.message)) for warning in found)
