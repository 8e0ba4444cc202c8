"""Linear against its definition in float64, over sizes that break tilings."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.plugins.overlap import check_overlap
from trt_eagle3.engine import capi

pytestmark = pytest.mark.gpu

# ||y - reference|| / ||reference||: one rounding of the output, at most half a unit in the last
# place of each value (2^-8 or 2^-11 of it), and 1 % of that for the sums in float32.
TOLERANCE = {torch.bfloat16: 1.01 * 2**-8, torch.float16: 1.01 * 2**-11}
SHAPES = [  # N, K
    (1, 32),
    (7, 64),  # fewer rows than a tile
    (100, 160),  # no multiple of a tile, nor of a span
    (512, 1024),
    (333, 2560),  # spans that do not go round all warps
    (6144, 4096),
    (4096, 12288),
    (5120, 25600),
    (32000, 4096),
    (9001, 4096),  # no multiple of anything, and enough for products of 17 and more tokens
]


def draw(
    rows: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    n, k = shape
    torch.manual_seed(rows * n + k)
    x, weight = (
        torch.randn(rows, k, device=device).to(dtype),
        torch.randn(n, k, device=device).to(dtype),
    )
    torch.cuda.synchronize()  # settled
    return x, weight


def run(x: Tensor, weight: Tensor, *, prefetch_safe: bool = True) -> Tensor:
    out = torch.full((len(x), len(weight)), torch.nan, device=x.device, dtype=x.dtype)
    try:
        return capi.linear(x, weight, prefetch_safe=prefetch_safe, out=out)
    except NotImplementedError:
        pytest.skip("no kernel for these sizes on this chip")


def worst_error(y: Tensor, reference: Tensor) -> float:
    """``||y - reference|| / ||reference||``, or an eighth of the worst value's: one wrong value
    is not diluted.
    """
    difference, n = y.double() - reference, reference.shape[1]
    worst = (difference.abs() / reference.norm(dim=-1, keepdim=True)).max() * n**0.5
    return float(torch.maximum(difference.norm() / reference.norm(), worst / 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 33, 64])
@pytest.mark.parametrize("prefetch_safe", [False, True])
def test_linear_matches_float64(
    rows: int, shape: tuple[int, int], dtype: torch.dtype, prefetch_safe: bool, cuda: torch.device
) -> None:
    x, weight = draw(rows, shape, dtype, cuda)
    error = worst_error(run(x, weight, prefetch_safe=prefetch_safe), x.double() @ weight.double().T)
    assert error < TOLERANCE[dtype], f"{error:.2e}"


@pytest.mark.parametrize(
    "fault", ["a wrong value", "a row not written", "columns left out", "x of another token"]
)
def test_planted_fault_is_caught(fault: str, cuda: torch.device) -> None:
    x, weight = draw(8, (512, 1024), torch.bfloat16, cuda)
    got, other = run(x, weight), x.clone()
    if fault == "a wrong value":
        got[3, 100] += 0.05 * got[3].norm()
    elif fault == "a row not written":
        got[:, 17] = torch.nan
    elif fault == "columns left out":
        other[:, -32:] = 0
    else:
        other[[0, 1]] = other[[1, 0]]
    error = worst_error(got, other.double() @ weight.double().T)
    assert not error < 10 * TOLERANCE[torch.bfloat16]


def test_linear_of_a_token_does_not_depend_on_the_others(cuda: torch.device) -> None:
    for shape, most, fewer in (
        ((6144, 4096), 16, (1, 3, 8, 9)),
        ((4096, 12288), 8, (1, 3, 6)),
        ((64, 8192), 16, (9, 12)),
        ((4096, 12288), 16, (9, 12)),  # x of more than 8 tokens does not fit
        ((4096, 12288), 64, (17, 33)),
        ((24576, 4096), 64, (17, 33)),
    ):
        x, weight = draw(most, shape, torch.bfloat16, cuda)
        together = run(x, weight)
        for rows in fewer:
            assert torch.equal(run(x[:rows].contiguous(), weight), together[:rows])


@pytest.mark.parametrize("rows", [6, 16, 64])
def test_linear_gives_the_same_bits_on_ten_runs(rows: int, cuda: torch.device) -> None:
    x, weight = draw(rows, (4096, 12288), torch.bfloat16, cuda)
    first = run(x, weight)
    for _ in range(9):
        assert torch.equal(run(x, weight), first)


@pytest.mark.parametrize(("rows", "width"), [(6, 4096), (33, 6144), (33, 9216)])
def test_a_chain_of_launches_that_overlap_gives_what_one_by_one_gives(
    rows: int, width: int, cuda: torch.device
) -> None:
    """Each launch reads what the one before writes, and its own settled weight early."""
    x, _ = draw(rows, (16, width), torch.bfloat16, cuda)
    weights = [
        torch.randn(width, width, device=cuda).to(torch.bfloat16) / width**0.5 for _ in range(12)
    ]
    torch.cuda.synchronize()

    check_overlap(
        x, [partial(capi.linear, weight=weight, prefetch_safe=True) for weight in weights]
    )


def test_linear_says_what_it_does_not_compute(cuda: torch.device) -> None:
    x = torch.zeros(2, 40, device=cuda, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError):
        capi.linear(x, x)  # K is no multiple of 32
    with pytest.raises(NotImplementedError):
        capi.linear(x[:, :32].float().contiguous(), x[:, :32].float().contiguous())
    with pytest.raises(NotImplementedError):
        capi.linear(torch.zeros(65, 32, device=cuda, dtype=torch.bfloat16), x[:, :32].contiguous())
    with pytest.raises(NotImplementedError):  # x does not fit beside, and K is no multiple of 128
        capi.linear(
            *(torch.zeros(rows, 25632, device=cuda, dtype=torch.bfloat16) for rows in (16, 1))
        )
    with pytest.raises(ValueError, match="weight: expected"):
        capi.linear(x, torch.zeros(3, 32, device=cuda, dtype=torch.bfloat16))
