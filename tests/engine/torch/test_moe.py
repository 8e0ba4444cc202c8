"""Which experts the kernels of ``FusedMoe`` are asked for; no GPU needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.torch.test_packed import values_of
from tests.plugins.moe_case import KINDS, draw_experts, draw_logits, reference_moe
from trt_eagle3.engine import capi
from trt_eagle3.engine.torch.moe import Fp8Experts, fused_moe
from trt_eagle3.engine.torch.packed import Fp8Weight

CPU = torch.device("cpu")
ROUTED = "by a kernel"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of dense experts says that it was called."""

    def called(*_args: Any, **_kwargs: Any) -> Tensor:
        raise AssertionError(ROUTED)

    monkeypatch.setattr(capi, "fused_moe", called)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("sizes", [(16, 16, 8, 1), (16, 48, 24, 16), (512, 16, 8, 2)], ids=str)
def test_sizes_that_the_kernels_take_go_to_them(sizes: tuple[int, int, int, int]) -> None:
    experts, hidden, width, top_k = sizes
    case = draw_experts("dense", experts, hidden, width, torch.bfloat16, CPU)
    x, logits = torch.randn(3, hidden).bfloat16(), torch.randn(3, experts).bfloat16()
    with pytest.raises(AssertionError, match=ROUTED):
        fused_moe(x, logits, case.gate_up, case.down, top_k=top_k, renormalise=1)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize(
    "sizes",
    [(4, 64, 20, 2), (4, 24, 32, 2), (4, 40, 20, 2), (513, 16, 8, 2), (17, 16, 8, 17)],
    ids=["I", "H", "both", "E", "k"],
)
def test_other_sizes_go_through_stock_operations(
    sizes: tuple[int, int, int, int], rows: int
) -> None:
    experts, hidden, width, top_k = sizes
    case = draw_experts("dense", experts, hidden, width, torch.float32, CPU)
    x = torch.randn(rows, hidden)
    logits = draw_logits("random", rows, experts, torch.float32, CPU)
    got = fused_moe(x, logits, case.gate_up, case.down, top_k=top_k, renormalise=1)
    reference = reference_moe(x, logits, case, top_k, renormalise=True)
    torch.testing.assert_close(got.double(), reference, rtol=1e-4, atol=1e-5)


def test_more_experts_of_a_row_than_kernels_take_go_through_stock_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = draw_experts("fp8 channel", 17, 128, 128, torch.float32, CPU)
    values = {id(case.gate_up): case.gate_up_values, id(case.down): case.down_values}
    monkeypatch.setattr(Fp8Experts, "dense", lambda self, dtype: values[id(self)].to(dtype))
    x, logits = torch.randn(3, 128), torch.randn(3, 17)
    got = fused_moe(x, logits, case.gate_up, case.down, top_k=17, renormalise=1)
    reference = reference_moe(x, logits, case, 17, renormalise=True)
    torch.testing.assert_close(got.double(), reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("fp8")])
def test_fp8_experts_are_unpacked_with_every_form_of_scales(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unpack(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        assert len(scale) in {len(codes), -(-len(codes) // 128)}, "rows that the kernel takes"
        return values_of(Fp8Weight(codes, scale)).to(dtype)

    monkeypatch.setattr(capi, "unpack_fp8", unpack)
    case = draw_experts(kind, 3, 256, 128, torch.bfloat16, CPU)
    for experts, values in ((case.gate_up, case.gate_up_values), (case.down, case.down_values)):
        torch.testing.assert_close(experts.dense(torch.float32), values.float())
