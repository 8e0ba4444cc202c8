"""TreeAttention's reference lowering against ``tests/reference/ops.py``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.graph.ops.one_node import GQA, SEEDS, run_op
from tests.reference import ops
from tests.reference.compare import FAULT_FLOOR, FLOAT32_TOLERANCE
from trt_eagle3.graph.ops import OPS
from trt_eagle3.graph.ops.kv_fp8 import decode, encode
from trt_eagle3.parity.metrics import relative_error


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


def fp8_case(case: AttentionCase, scales: Tensor) -> AttentionCase:
    """``case`` over the bytes of its caches."""
    caches = {
        f"{name}_cache": encode(case.inputs[f"{name}_cache"], scale)
        for name, scale in zip("kv", scales, strict=True)
    }
    return replace(case, inputs={**case.inputs, **caches, "kv_scales": scales})


def rounded_case(case: AttentionCase, scales: Tensor) -> AttentionCase:
    """``case`` with keys and values that e4m3 holds: what FP8 caches make of it."""
    rounded = {
        name: decode(encode(case.inputs[name], scale), scale, torch.float32)
        for kind, scale in zip("kv", scales, strict=True)
        for name in (kind, f"{kind}_cache")
    }
    return replace(case, inputs={**case.inputs, **rounded})


def run_fp8(case: AttentionCase, backend: str) -> dict[str, Tensor]:
    i = case.inputs
    flat = {name: i[name].flatten(0, 1).flatten(1) for name in "qkv"}
    attributes = {
        "num_heads": i["q"].shape[2],
        "num_kv_heads": i["k"].shape[2],
        "page_size": case.page_size,
        "scale": case.scale,
    }
    given = {**i, **flat}
    if backend == "onnxruntime":
        return run_op("TreeAttention", "fp8", given, **attributes)
    op = OPS["TreeAttention"]
    inputs = [given[name].clone() for name in op.inputs["fp8"]]
    return dict(zip(op.outputs["fp8"], op.torch_function(*inputs, **attributes), strict=True))


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
@pytest.mark.parametrize("seed", range(4))
def test_tree_attention_fp8_follows_the_equation_over_rounded_rows(seed: int, backend: str) -> None:
    case = attention_case([7, 0, 19], 5, seed, 4, (4, 2, 6), 0.4, seed=seed)
    scales = torch.tensor([[0.002, 0.3], [0.05, 0.0011]])
    fp8, rounded = fp8_case(case, scales), rounded_case(case, scales)
    found = run_fp8(fp8, backend)
    out, k_cache, v_cache, _ = ops.tree_attention(rounded.inputs, case.page_size, case.scale)
    for name, scale, expected in zip("kv", scales, (k_cache, v_cache), strict=True):
        codes = found[f"{name}_cache_out"][case.page_size :]
        assert codes.dtype == torch.uint8
        assert torch.equal(decode(codes, scale, torch.float32), expected[case.page_size :])
    real = ~out.isnan().any(-1).any(-1)
    assert relative_error(found["out"].view_as(out)[real], out[real]) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("fault", ["kinds swapped", "heads swapped", "wrapped"])
def test_tree_attention_fp8_planted_fault_is_caught(fault: str) -> None:
    case = attention_case([7, 3], 5, 2, 4, (4, 2, 6), 0.4, seed=5)
    scales = torch.tensor([[0.002, 0.3], [0.05, 0.0011]])
    wrong = {
        "kinds swapped": scales.flip(0),
        "heads swapped": scales.flip(1),
        "wrapped": scales / 512,
    }[fault]
    out = ops.tree_attention(rounded_case(case, scales).inputs, case.page_size, case.scale)[0]
    fp8 = fp8_case(case, scales)
    found = run_fp8(replace(fp8, inputs={**fp8.inputs, "kv_scales": wrong}), "torch")["out"]
    real = ~out.isnan().any(-1).any(-1)
    assert not relative_error(found.view_as(out)[real], out[real]) < FAULT_FLOOR
