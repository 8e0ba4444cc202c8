"""The ops' reference lowerings, run by ONNX Runtime as one-node graphs, against
``tests/reference/ops.py``.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from torch import Tensor

from tests.reference import ops
from tests.reference.compare import FAULT_FLOOR, FLOAT32_TOLERANCE
from trt_eagle3.engine.onnxruntime.session import OnnxRuntimeSession
from trt_eagle3.graph.builder import GraphBuilder
from trt_eagle3.graph.ops import OPS
from trt_eagle3.parity.metrics import relative_error
from trt_eagle3.parity.ops import pair_axis

GQA = [(1, 1), (2, 1), (4, 2), (5, 1), (7, 1)]
FAR_POSITION = 200_000
SEEDS = st.integers(0, 2**31)
Attributes = tuple[tuple[str, Any], ...]
_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.int32: TensorProto.INT32,
    torch.bool: TensorProto.BOOL,
}


@cache
def session(
    op_type: str, overload: str, types: tuple[tuple[int, torch.dtype], ...], attributes: Attributes
) -> Any:
    """A graph of one node; ``types``: rank and type of each input."""
    b = GraphBuilder(op_type, "float32", str)
    op = OPS[op_type]
    inputs = [
        b.input(name, _TYPES[dtype], [f"{name}_{i}" for i in range(rank)])
        for name, (rank, dtype) in zip(op.inputs[overload], types, strict=True)
    ]
    names = op.outputs[overload]
    outputs = b.own_op(op_type, *inputs, names=names, overload=overload, **dict(attributes))
    for value, name in zip(outputs, names, strict=True):
        rank = 3 if "cache" in name else 2
        b.output(value, name, [f"{name}_out_{i}" for i in range(rank)])
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.onnx"
        path.write_bytes(b.build().SerializeToString())
        return OnnxRuntimeSession(path, Path(directory))


def run_op(
    op_type: str, overload: str, inputs: dict[str, Tensor], **attributes: Any
) -> dict[str, Tensor]:
    types = tuple((inputs[name].ndim, inputs[name].dtype) for name in OPS[op_type].inputs[overload])
    return session(op_type, overload, types, tuple(sorted(attributes.items()))).run(inputs)


# AddRmsNorm


@settings(max_examples=50)
@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 97),
    epsilon=st.sampled_from([1e-6, 1e-5, 0.1]),
    seed=SEEDS,
)
def test_add_rms_norm_of_any_shape_follows_the_equation(
    rows: int, width: int, epsilon: float, seed: int
) -> None:
    torch.manual_seed(seed)
    x, residual, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    plain = run_op("AddRmsNorm", "", {"x": x, "weight": weight}, epsilon=epsilon)
    added = run_op(
        "AddRmsNorm", "residual", {"x": x, "weight": weight, "residual": residual}, epsilon=epsilon
    )
    assert relative_error(plain["y"], ops.rms_norm(x, weight, epsilon)) < FLOAT32_TOLERANCE
    assert (
        relative_error(added["y"], ops.rms_norm(x + residual, weight, epsilon)) < FLOAT32_TOLERANCE
    )
    assert torch.equal(added["sum"], x + residual)


@pytest.mark.parametrize("fault", ["no residual", "no weight", "epsilon", "layer norm"])
def test_add_rms_norm_planted_fault_is_caught(fault: str) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, 16), torch.randn(5, 16), 1 + torch.randn(16)
    total = x + residual
    expected = {
        "no residual": ops.rms_norm(x, weight, 1e-6),
        "no weight": ops.rms_norm(total, torch.ones(16), 1e-6),
        "epsilon": ops.rms_norm(total, weight, 0.01),
        "layer norm": ops.rms_norm(total - total.mean(-1, keepdim=True), weight, 1e-6),
    }[fault]
    out = run_op(
        "AddRmsNorm", "residual", {"x": x, "weight": weight, "residual": residual}, epsilon=1e-6
    )
    assert relative_error(out["y"], expected) > FAULT_FLOOR


# SiluMul


@settings(max_examples=30)
@given(
    rows=st.integers(1, 20),
    width=st.integers(1, 65),
    scale=st.sampled_from([1.0, 30.0]),
    seed=SEEDS,
)
def test_silu_mul_of_any_shape_follows_the_equation(
    rows: int, width: int, scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    gate, up = scale * torch.randn(rows, width), torch.randn(rows, width)
    out = run_op("SiluMul", "", {"gate_up": torch.cat([gate, up], dim=-1)})["out"]
    assert (
        relative_error(out, gate.double() / (1 + (-gate.double()).exp()) * up) < FLOAT32_TOLERANCE
    )


@pytest.mark.parametrize("fault", ["gate and up exchanged", "sigmoid alone", "no up"])
def test_silu_mul_planted_fault_is_caught(fault: str) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(2, 5, 16)
    expected = {
        "gate and up exchanged": torch.nn.functional.silu(up) * gate,
        "sigmoid alone": torch.sigmoid(gate) * up,
        "no up": torch.nn.functional.silu(gate),
    }[fault]
    out = run_op("SiluMul", "", {"gate_up": torch.cat([gate, up], dim=-1)})["out"]
    assert relative_error(out, expected) > FAULT_FLOOR


# QKNormMRope


@dataclass(frozen=True)
class RopeCase:
    inputs: dict[str, Tensor]
    heads: tuple[int, int, int]
    normed: bool

    def run(self) -> dict[str, Tensor]:
        num_heads, num_kv_heads, dim = self.heads
        attributes: dict[str, Any] = {
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": dim,
        }
        if not self.normed:
            return run_op("QKNormMRope", "", self.inputs, **attributes)
        return run_op("QKNormMRope", "norm", self.inputs, **attributes, epsilon=1e-6)

    def expected(self, **changed: Any) -> tuple[Tensor, Tensor, Tensor]:
        i = {**self.inputs, **changed}
        norms = (i["q_norm"], i["k_norm"], 1e-6) if self.normed else None
        return ops.qk_norm_mrope(
            i["qkv"], i["position_ids"], i["inv_freq"], i["pair_axis"].tolist(), self.heads, norms
        )

    def error(self, **changed: Any) -> float:
        out, expected = self.run(), self.expected(**changed)
        return max(relative_error(out[name], e) for name, e in zip("qkv", expected, strict=True))


def rope_case(
    heads: tuple[int, int, int],
    layout: str,
    sections: tuple[int, ...],
    normed: bool,
    far: int,
    seed: int,
) -> RopeCase:
    num_heads, num_kv_heads, dim = heads
    generator = torch.Generator().manual_seed(seed)
    rows, new = (1, 7) if seed % 2 else (3, 4)
    inputs = {
        "qkv": torch.randn(rows * new, (num_heads + 2 * num_kv_heads) * dim, generator=generator),
        "position_ids": torch.randint(
            0, far, (3, rows, new), generator=generator, dtype=torch.int32
        ),
        "inv_freq": 5e6 ** -(torch.arange(0, dim, 2) / dim),
        "pair_axis": torch.tensor(pair_axis(layout, sections, dim // 2), dtype=torch.int32),
    }
    inputs["position_ids"][:, 0, 0] = far
    if normed:
        inputs |= {f"{p}_norm": 1 + 0.5 * torch.randn(dim, generator=generator) for p in "qk"}
    return RopeCase(inputs, heads, normed)


@st.composite
def rope_cases(draw: st.DrawFn) -> RopeCase:
    num_heads, num_kv_heads = draw(st.sampled_from(GQA))
    pairs = draw(st.integers(1, 9))
    layout = draw(st.sampled_from(["1d", "chunked", "interleaved"]))
    h, w = draw(st.integers(0, pairs // 3)), draw(st.integers(0, pairs // 3))
    sections = () if layout == "1d" else (pairs - h - w, h, w)
    far = draw(st.sampled_from([3, 1000, FAR_POSITION]))
    return rope_case(
        (num_heads, num_kv_heads, 2 * pairs),
        layout,
        sections,
        draw(st.booleans()),
        far,
        draw(SEEDS),
    )


@settings(max_examples=80)
@given(case=rope_cases())
def test_qk_norm_mrope_of_any_layout_follows_the_equation(case: RopeCase) -> None:
    assert case.error() < FLOAT32_TOLERANCE


FAULT_CASE = rope_case((4, 2, 16), "interleaved", (4, 2, 2), normed=True, far=50, seed=1)


@pytest.mark.parametrize(
    "changed",
    [
        {"pair_axis": torch.tensor(pair_axis("chunked", (4, 2, 2), 8))},
        {"pair_axis": torch.tensor(pair_axis("1d", (), 8))},
        {"position_ids": FAULT_CASE.inputs["position_ids"][[0, 2, 1]]},
        {"position_ids": FAULT_CASE.inputs["position_ids"] + 1},
        {"inv_freq": 1e4 ** -(torch.arange(0, 16, 2) / 16)},
        {"q_norm": torch.ones(16)},
        {"q_norm": FAULT_CASE.inputs["k_norm"], "k_norm": FAULT_CASE.inputs["q_norm"]},
    ],
    ids=[
        "chunked",
        "1d",
        "axes swapped",
        "position off by one",
        "base",
        "q norm skipped",
        "norms swapped",
    ],
)
def test_qk_norm_mrope_planted_fault_is_caught(changed: dict[str, Tensor]) -> None:
    assert FAULT_CASE.error() < FLOAT32_TOLERANCE
    assert FAULT_CASE.error(**changed) > FAULT_FLOOR


# TreeAttention


@dataclass(frozen=True)
class AttentionCase:
    """Inputs of the op with q, k, v as [B, S, heads, D]."""

    inputs: dict[str, Tensor]
    page_size: int
    scale: float

    def run(self, **changed: Tensor) -> dict[str, Tensor]:
        i = {**self.inputs, **changed}
        flat = {name: i[name].flatten(0, 1).flatten(1) for name in "qkv"}
        heads = {"num_heads": i["q"].shape[2], "num_kv_heads": i["k"].shape[2]}
        return run_op(
            "TreeAttention", "", {**i, **flat}, **heads, page_size=self.page_size, scale=self.scale
        )

    def check(self, **changed: Tensor) -> float:
        """Compare caches byte for byte and return the error of the real rows' output;
        ``changed`` plants a fault.
        """
        found = self.run(**changed)
        out, k_cache, v_cache, _ = ops.tree_attention(self.inputs, self.page_size, self.scale)
        owned = slice(self.page_size, None)  # page 0 belongs to no row: padding writes there
        assert torch.equal(found["k_cache_out"][owned], k_cache[owned])
        assert torch.equal(found["v_cache_out"][owned], v_cache[owned])
        real = ~out.isnan().any(-1).any(-1)
        assert int(real.sum()) == int(self.inputs["query_lengths"].sum())
        return relative_error(found["out"].view_as(out)[real], out[real])


def ancestors(num: int, tail: int, generator: torch.Generator) -> Tensor:
    """A random tree over the tail, holes and all: bool [num, tail], for its last ``num`` nodes."""
    mask = torch.eye(tail, dtype=torch.bool)
    for i in range(1, tail):
        parent = int(torch.randint(-1, i, (), generator=generator))
        if parent >= 0:
            mask[i] |= mask[parent]
    return mask[tail - num :]


def attention_case(
    pasts: list[int],
    new: int,
    hidden_tail: int,
    page_size: int,
    heads: tuple[int, int, int],
    scale: float,
    seed: int,
) -> AttentionCase:
    """``hidden_tail``: tail rows before the new ones; rows of the batch have 1 to ``new`` real
    tokens, one has all.
    """
    num_heads, num_kv_heads, dim = heads
    generator = torch.Generator().manual_seed(seed)
    rows, tail = len(pasts), new + hidden_tail
    pages_per_row = max(-(-(past + tail) // page_size) for past in pasts)
    order = torch.randperm(rows * pages_per_row, generator=generator, dtype=torch.int32) + 1
    queries = torch.randint(1, new + 1, (rows,), generator=generator, dtype=torch.int32)
    queries[0] = new
    slots = (rows * pages_per_row + 1) * page_size

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    inputs = {
        "q": draw(rows, new, num_heads, dim),
        "k": draw(rows, new, num_kv_heads, dim),
        "v": draw(rows, new, num_kv_heads, dim),
        "k_cache": draw(slots, num_kv_heads, dim),
        "v_cache": draw(slots, num_kv_heads, dim),
        "past_lengths": torch.tensor(pasts, dtype=torch.int32),
        "query_lengths": queries,
        "page_table": order.view(rows, pages_per_row),
        "tree_mask": torch.stack([ancestors(new, tail, generator) for _ in range(rows)]),
    }
    return AttentionCase(inputs, page_size, scale)


@st.composite
def attention_cases(draw: st.DrawFn) -> AttentionCase:
    num_heads, num_kv_heads = draw(st.sampled_from(GQA))
    page_size = draw(st.sampled_from([1, 4, 16]))
    edges = st.sampled_from([0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size, 19])
    pasts = draw(st.lists(edges, min_size=1, max_size=3))
    dim = 2 * draw(st.integers(1, 6))
    # the second: yarn's factor at 8 x, folded in the scale
    factor = draw(st.sampled_from([1.0, 1.2079441541679836]))
    return attention_case(
        *(pasts, draw(st.integers(1, 6)), draw(st.integers(0, 5)), page_size),
        *((num_heads, num_kv_heads, dim), factor**2 / dim**0.5, draw(SEEDS)),
    )


@settings(max_examples=200)
@given(case=attention_cases())
def test_tree_attention_over_any_pages_follows_the_equation_and_touches_only_its_slots(
    case: AttentionCase,
) -> None:
    assert case.check() < FLOAT32_TOLERANCE


def test_tree_attention_padding_rows_past_the_last_page_touch_no_owned_page() -> None:
    case = attention_case([0, 13, 14], 6, 0, 4, (2, 1, 4), 0.5, seed=3)
    case.inputs["query_lengths"][:] = torch.tensor([6, 1, 2])
    # 16 slots: padding would stand past them
    case.inputs["page_table"] = case.inputs["page_table"][:, :4].contiguous()
    assert case.check() < FLOAT32_TOLERANCE
    written = ops.tree_attention(case.inputs, case.page_size, case.scale)[3]
    changed = (
        (case.run()["k_cache_out"] != case.inputs["k_cache"])
        .flatten(1)
        .any(1)
        .nonzero()
        .flatten()
        .tolist()
    )
    assert {slot for slot in changed if slot >= case.page_size} == written


@pytest.mark.parametrize("name", ["mask ignored", "new row blind", "scale", "kv heads swapped"])
def test_tree_attention_planted_fault_in_the_output_is_caught(name: str) -> None:
    case = attention_case([7, 3], 5, 2, 4, (4, 2, 6), 0.4, seed=5)
    mask = case.inputs["tree_mask"]
    changed = {
        "mask ignored": {"tree_mask": torch.ones_like(mask)},
        "new row blind": {"tree_mask": mask & ~torch.eye(5, 7, dtype=torch.bool).roll(2, 1)},
        "scale": {"q": case.inputs["q"] * 1.05},
        "kv heads swapped": {"q": case.inputs["q"].flip(2)},
    }[name]
    assert case.check() < FLOAT32_TOLERANCE
    assert case.check(**changed) > FAULT_FLOOR


@pytest.mark.parametrize(
    "name", ["slot off by one", "pages in another order", "padding written", "hole closed"]
)
def test_tree_attention_planted_fault_in_the_slots_is_caught(name: str) -> None:
    case = attention_case([7, 3], 5, 2, 4, (4, 2, 6), 0.4, seed=5)
    case.inputs["query_lengths"][1] = 3
    i = case.inputs
    changed = {
        "slot off by one": {"past_lengths": i["past_lengths"] - 1},
        "pages in another order": {"page_table": i["page_table"].flip(1)},
        "padding written": {"query_lengths": torch.tensor([5, 5], dtype=torch.int32)},
        "hole closed": {"tree_mask": i["tree_mask"][:, :, 2:].contiguous()},
    }[name]
    assert case.check() < FLOAT32_TOLERANCE
    with pytest.raises(AssertionError):
        case.check(**changed)
