"""FusedMoe's kernels against its definition in float64, over sizes and routings that break
tilings.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.plugins.moe_case import (
    KINDS,
    ROUTINGS,
    MoeCase,
    draw_experts,
    draw_logits,
    reference_moe,
)
from tests.plugins.overlap import check_overlap
from tests.plugins.test_linear import worst_error
from trt_eagle3.engine import capi
from trt_eagle3.engine.torch.moe import Fp8Experts, fused_moe

pytestmark = pytest.mark.gpu

# One rounding of y and one of each inner value, each at most half a unit in the last place.
TOLERANCE = {torch.bfloat16: 1.5 * 2**-8, torch.float16: 1.5 * 2**-11}
# E, H, I, k: the checkpoint's geometry with fewer experts, and sizes that break tilings
PACKED_SHAPES = [(16, 256, 128, 2), (20, 2048, 768, 8), (8, 384, 1536, 3)]
DENSE_SHAPES = [
    (4, 16, 8, 1),
    (9, 48, 24, 4),
    (128, 64, 32, 8),
    (20, 2048, 768, 8),
    (6, 176, 296, 3),
]
ROWS = (1, 2, 6, 8, 9, 16, 17, 33, 64)


def run(case: MoeCase, x: Tensor, logits: Tensor, top_k: int, *, renormalise: int = 1) -> Tensor:
    """By the kernel for few rows; its output and workspace hold NaN before."""
    torch.use_deterministic_algorithms(mode=True)  # fills what is not written yet
    try:
        return case.gate_up.mixture(case.down, x, logits, top_k, renormalise)
    except NotImplementedError:
        pytest.skip("no kernel for these sizes on this chip")
    finally:
        torch.use_deterministic_algorithms(mode=False)


def draw(
    rows: int, experts: int, hidden: int, routing: str, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, hidden, device=device).to(dtype)
    return x, draw_logits(routing, rows, experts, dtype, device)


def check(
    case: MoeCase, rows: int, routing: str, top_k: int, dtype: torch.dtype, renormalise: int
) -> None:
    experts, hidden, _ = case.down_values.shape
    x, logits = draw(rows, experts, hidden, routing, dtype, case.down_values.device)
    reference = reference_moe(x, logits, case, top_k, renormalise=bool(renormalise))
    error = worst_error(run(case, x, logits, top_k, renormalise=renormalise), reference)
    assert error < TOLERANCE[dtype], f"{rows} rows, {routing}: {error:.2e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", DENSE_SHAPES, ids=str)
def test_dense_experts_match_float64(
    shape: tuple[int, int, int, int], dtype: torch.dtype, cuda: torch.device
) -> None:
    case = draw_experts("dense", *shape[:3], dtype, cuda)
    for rows in ROWS:
        for routing in ROUTINGS:
            check(case, rows, routing, shape[3], dtype, renormalise=rows % 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", PACKED_SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS[1:])
def test_packed_experts_match_float64(
    kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype, cuda: torch.device
) -> None:
    case = draw_experts(kind, *shape[:3], dtype, cuda)
    for rows in ROWS:
        for routing in ROUTINGS[:3]:
            check(case, rows, routing, shape[3], dtype, renormalise=rows % 2)


@pytest.mark.parametrize("rows", [16, 33])
@pytest.mark.parametrize("kind", ["fp8 channel", "int4 64 zeros"])
def test_units_of_fewer_rows_match_float64(kind: str, rows: int, cuda: torch.device) -> None:
    """Few rows an expert, and shared memory for three slots of a ring only without rooms for 8."""
    case = draw_experts(kind, 128, 256, 128, torch.bfloat16, cuda)
    check(case, rows, "random", 8, torch.bfloat16, renormalise=1)


@pytest.mark.parametrize(("experts", "top_k"), [(512, 10), (200, 16), (128, 8), (3, 3), (33, 1)])
def test_any_number_of_experts_is_routed(experts: int, top_k: int, cuda: torch.device) -> None:
    case = draw_experts("dense", experts, 128, 64, torch.bfloat16, cuda)
    for rows in (1, 7, 40, 64):
        check(case, rows, "random", top_k, torch.bfloat16, renormalise=1)


@pytest.mark.parametrize(
    "fault", ["another expert", "a share", "x of another row", "gate for up", "a value"]
)
@pytest.mark.parametrize("kind", ["dense", "fp8 block", "int4 64 zeros"])
def test_planted_fault_is_caught(kind: str, fault: str, cuda: torch.device) -> None:
    case = draw_experts(kind, 16, 512, 256, torch.bfloat16, cuda)
    x, logits = draw(6, 16, 512, "random", torch.bfloat16, cuda)
    got, gate_up, down = run(case, x, logits, 4), case.gate_up_values, case.down_values
    if fault == "another expert":
        weakest = logits[0].float().topk(4).indices[-1]
        down = down.clone()
        down[weakest] = case.down_values[(weakest + 1) % 16]
    elif fault == "a share":
        logits = logits.clone()
        logits[2, logits[2].argmax()] += 0.25
    elif fault == "x of another row":
        x = x[[1, 0, 2, 3, 4, 5]]
    elif fault == "gate for up":
        gate_up = gate_up.roll(256, 1)
    else:
        got = got.clone()
        got[3, 100] += 0.1 * got[3].norm()
    changed = MoeCase(case.gate_up, case.down, gate_up, down)
    reference = reference_moe(x, logits, changed, 4, renormalise=True)
    assert not worst_error(got, reference) < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("routing", ["random", "ties"])
@pytest.mark.parametrize("kind", ["dense", "fp8 channel", "int4 128"])
def test_a_rows_bits_do_not_depend_on_the_others(
    kind: str, routing: str, cuda: torch.device
) -> None:
    """With dense experts among up to 64; with packed ones among up to 8, and among 9 to 64."""
    case = draw_experts(kind, 32, 2048, 768, torch.bfloat16, cuda)
    x, logits = draw(64, 32, 2048, routing, torch.bfloat16, cuda)
    whole, few = (run(case, x[:n], logits[:n], 8) for n in (64, 8))
    for first, end in ((0, 1), (2, 8), (1, 4), (7, 8), (3, 40), (20, 64)):
        part = run(case, x[first:end].contiguous(), logits[first:end].contiguous(), 8)
        same = few if kind != "dense" and end - first <= 8 else whole
        assert torch.equal(part, same[first:end]), (first, end)
    for _ in range(5):
        assert torch.equal(run(case, x, logits, 8), whole)


@pytest.mark.parametrize("kind", ["dense", "fp8 channel", "int4 128"])
@pytest.mark.parametrize("rows", [1, 6, 64])
def test_graph_replays_follow_the_routing(rows: int, kind: str, cuda: torch.device) -> None:
    """One captured graph, replayed over inputs that go through other experts."""
    case = draw_experts(kind, 32, 512, 256, torch.bfloat16, cuda)
    x, logits = draw(rows, 32, 512, "random", torch.bfloat16, cuda)
    run(case, x, logits, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = case.gate_up.mixture(case.down, x, logits, 4, 1)
    for routing in ROUTINGS:
        new_x, new_logits = draw(rows, 32, 512, routing, torch.bfloat16, cuda)
        x.copy_(new_x)
        logits.copy_(new_logits)
        got.fill_(torch.nan)
        graph.replay()
        assert torch.equal(got, run(case, new_x, new_logits, 4)), routing


@pytest.mark.parametrize("kind", ["dense", "fp8 channel", "int4 128"])
@pytest.mark.parametrize("rows", [1, 6, 16])
def test_overlapping_launches_compute_what_single_ones_do(
    rows: int, kind: str, cuda: torch.device
) -> None:
    """Each layer's logits and x are what the launch right before wrote."""
    cases = [draw_experts(kind, 16, 512, 256, torch.bfloat16, cuda) for _ in range(6)]
    router = (torch.randn(16, 512, device=cuda) * 0.1).bfloat16()
    x = torch.randn(rows, 512, device=cuda).bfloat16()

    def layer(x: Tensor, case: MoeCase) -> Tensor:
        logits = capi.linear(x, router, prefetch_safe=True)
        return case.gate_up.mixture(case.down, x, logits, 4, 1) * 3

    check_overlap(x, [partial(layer, case=case) for case in cases])


@pytest.mark.parametrize("rows", [65, 100, 129, 1000])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_many_rows_match_float64(routing: str, kind: str, rows: int, cuda: torch.device) -> None:
    check_many(kind, (32, 512, 256, 4), rows, routing, torch.bfloat16, cuda)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 128, 128, 3), (128, 2048, 768, 8), (40, 384, 1536, 2)])
@pytest.mark.parametrize("kind", ["dense", "fp8 channel", "fp8 block", "int4 128", "int4 32"])
def test_many_rows_of_any_sizes_match_float64(
    kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype, cuda: torch.device
) -> None:
    """Experts without a row, with some, and with more than a unit holds."""
    for rows in (65, 333):
        check_many(kind, shape, rows, "random", dtype, cuda)


def check_many(
    kind: str,
    shape: tuple[int, int, int, int],
    rows: int,
    routing: str,
    dtype: torch.dtype,
    cuda: torch.device,
) -> None:
    experts, hidden, width, top_k = shape
    case = draw_experts(kind, experts, hidden, width, dtype, cuda)
    x, logits = draw(rows, experts, hidden, routing, dtype, cuda)
    reference = reference_moe(x, logits, case, top_k, renormalise=True)
    # each expert's part is rounded, too
    error = worst_error(run(case, x, logits, top_k), reference)
    assert error < 2 * TOLERANCE[dtype], f"{rows} rows, {routing}: {error:.2e}"


@pytest.mark.parametrize("fault", ["another expert", "x of another row", "gate for up", "a tile"])
@pytest.mark.parametrize("kind", ["dense", "fp8 block", "int4 64 zeros"])
def test_planted_fault_among_many_rows_is_caught(kind: str, fault: str, cuda: torch.device) -> None:
    case = draw_experts(kind, 16, 512, 256, torch.bfloat16, cuda)
    x, logits = draw(100, 16, 512, "random", torch.bfloat16, cuda)
    got, gate_up, down = run(case, x, logits, 4), case.gate_up_values, case.down_values
    if fault == "another expert":
        weakest = logits[0].float().topk(4).indices[-1]
        down = down.clone()
        down[weakest] = case.down_values[(weakest + 1) % 16]
    elif fault == "x of another row":
        x = x.roll(1, 0)
    elif fault == "gate for up":
        gate_up = gate_up.roll(256, 1)
    else:
        got = got.clone()
        got[8:16, 128:136] = got[:8, 128:136]
    changed = MoeCase(case.gate_up, case.down, gate_up, down)
    reference = reference_moe(x, logits, changed, 4, renormalise=True)
    assert not worst_error(got, reference) < 4 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("kind", ["dense", "fp8 block", "int4 128"])
def test_a_rows_bits_among_many_do_not_depend_on_the_others(kind: str, cuda: torch.device) -> None:
    """However a prompt is cut into chunks."""
    case = draw_experts(kind, 32, 2048, 768, torch.bfloat16, cuda)
    x, logits = draw(1500, 32, 2048, "random", torch.bfloat16, cuda)
    whole = run(case, x, logits, 8)
    for first, end in ((0, 65), (100, 300), (64, 1400)):
        part = run(case, x[first:end].contiguous(), logits[first:end].contiguous(), 8)
        assert torch.equal(part, whole[first:end]), (first, end)
    for _ in range(5):
        assert torch.equal(run(case, x, logits, 8), whole)


@pytest.mark.parametrize("kind", ["dense", "fp8 channel"])
def test_overlapping_launches_over_many_rows_compute_what_single_ones_do(
    kind: str, cuda: torch.device
) -> None:
    cases = [draw_experts(kind, 16, 512, 256, torch.bfloat16, cuda) for _ in range(4)]
    router = (torch.randn(16, 512, device=cuda) * 0.1).bfloat16()
    x = torch.randn(90, 512, device=cuda).bfloat16()

    def layer(x: Tensor, case: MoeCase) -> Tensor:
        return case.gate_up.mixture(case.down, x, x @ router.T, 4, 1) * 3

    check_overlap(x, [partial(layer, case=case) for case in cases])


def test_many_rows_replay_with_another_routing(cuda: torch.device) -> None:
    case = draw_experts("dense", 32, 512, 256, torch.bfloat16, cuda)
    x, logits = draw(200, 32, 512, "random", torch.bfloat16, cuda)
    call = partial(fused_moe, gate_up=case.gate_up, down=case.down, top_k=4, renormalise=1)
    call(x, logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call(x, logits)
    for routing in ROUTINGS:
        new_x, new_logits = draw(200, 32, 512, routing, torch.bfloat16, cuda)
        x.copy_(new_x)
        logits.copy_(new_logits)
        got.fill_(torch.nan)
        graph.replay()
        assert torch.equal(got, call(new_x, new_logits)), routing


def test_many_rows_in_fp8_are_about_those_of_the_values(cuda: torch.device) -> None:
    case = draw_experts("fp8 channel", 32, 512, 256, torch.bfloat16, cuda)
    assert isinstance(case.gate_up, Fp8Experts)
    assert isinstance(case.down, Fp8Experts)
    weights = [
        Fp8Experts(w.codes, w.scale, fp8_activations=True) for w in (case.gate_up, case.down)
    ]
    x, logits = draw(300, 32, 512, "random", torch.bfloat16, cuda)
    got = fused_moe(x, logits, *weights, top_k=4, renormalise=1)
    reference = reference_moe(x, logits, case, 4, renormalise=True)
    assert 1e-3 < worst_error(got, reference) < 0.06  # e4m3 has four bits


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 1000])
def test_gathered_rows_lie_by_expert(rows: int, cuda: torch.device) -> None:
    x, logits = draw(rows, 40, 64, "ties", torch.bfloat16, cuda)
    experts, shares, places, counts = capi.route_rows(logits, top_k=5, renormalise=1)
    gathered, positions, ends = capi.gather_rows(x, experts, places, counts)

    wanted = torch.sort(logits.double(), dim=-1, descending=True, stable=True).indices[:, :5]
    assert torch.equal(experts.long(), wanted)
    assert torch.equal(ends.long(), torch.bincount(wanted.flatten(), minlength=40).cumsum(0))
    assert torch.equal(
        positions.flatten().sort().values.long(), torch.arange(rows * 5, device=cuda)
    )
    assert torch.equal(gathered[positions.long()], x[:, None].expand(-1, 5, -1))
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    assert bool((positions >= begins[wanted]).all())
    assert bool((positions < ends[wanted]).all())
    top = torch.softmax(logits.double(), -1).gather(1, wanted)
    assert torch.allclose(shares.double(), top / top.sum(-1, keepdim=True), rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 64, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 64, 20), (4, 24, 32), (17, 16, 8)], ids=["I", "H", "k"])
def test_sizes_that_no_kernel_takes_are_computed(
    shape: tuple[int, int, int], dtype: torch.dtype, rows: int, cuda: torch.device
) -> None:
    case = draw_experts("dense", *shape, dtype, cuda)
    top_k = 17 if shape[0] == 17 else 2
    x, logits = draw(rows, shape[0], shape[1], "random", dtype, cuda)
    got = fused_moe(x, logits, case.gate_up, case.down, top_k=top_k, renormalise=1)
    reference = reference_moe(x, logits, case, top_k, renormalise=True)
    assert worst_error(got, reference) < TOLERANCE.get(dtype, 1e-3)


def test_float32_and_too_many_rows_are_said(cuda: torch.device) -> None:
    case = draw_experts("dense", 4, 64, 32, torch.float32, cuda)
    x, logits = draw(3, 4, 64, "random", torch.float32, cuda)
    with pytest.raises(NotImplementedError):
        case.gate_up.mixture(case.down, x, logits, 2, 1)
    got = fused_moe(x, logits, case.gate_up, case.down, top_k=2, renormalise=1)
    assert worst_error(got, reference_moe(x, logits, case, 2, renormalise=True)) < 1e-3
    half = draw_experts("dense", 4, 64, 32, torch.float16, cuda)
    x, logits = draw(65, 4, 64, "random", torch.float16, cuda)
    with pytest.raises(NotImplementedError):
        half.gate_up.mixture(half.down, x, logits, 2, 1)
    got = fused_moe(x, logits, half.gate_up, half.down, top_k=2, renormalise=1)
    reference = reference_moe(x, logits, half, 2, renormalise=True)
    assert worst_error(got, reference) < TOLERANCE[torch.float16]
