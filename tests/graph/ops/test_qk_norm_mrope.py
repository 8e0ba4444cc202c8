"""QKNormMRope's reference lowering against ``tests/reference/ops.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.graph.ops.one_node import FAR_POSITION, GQA, SEEDS, run_op
from tests.reference import ops
from tests.reference.compare import FAULT_FLOOR, FLOAT32_TOLERANCE
from trt_eagle3.parity.metrics import relative_error
from trt_eagle3.parity.ops import pair_axis


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
