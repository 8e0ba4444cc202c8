"""VisionAttention against its definition in float64, over frames that break tilings."""

from __future__ import annotations

import zlib

import pytest
import torch
from torch import Tensor

from tests.plugins.vision_case import Case, Inputs, draw, reference
from trt_eagle3.engine import capi
from trt_eagle3.engine.capi import AttentionPath

pytestmark = pytest.mark.gpu

# ||out - reference|| / ||reference||, as in test_tree_attention.py: one rounding of the weights and
# one of the output; q and k may round the other way after a float32 rotation. float32: a thousand
# additions, and the rotation's rounding.
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 7e-4, torch.float32: 3e-6}
HALF = (torch.bfloat16, torch.float16)

CASES = [
    Case(frames=(1,)),
    Case(frames=(4,)),
    Case(frames=(8, 1, 7)),
    Case(frames=(64,)),
    Case(frames=(127, 129)),
    Case(frames=(128, 0, 192, 0)),  # tiles filled exactly; empty frames, as padding makes them
    Case(frames=(0, 0, 65)),
    Case(frames=(260, 36, 1028), heads=3),
    Case(frames=(1000, 1000, 1000, 4), heads=16),
    Case(frames=(5000,)),
    Case(frames=tuple(range(40)), heads=1),  # more frames than a warp has lanes
    Case(frames=(16,) * 70),
    Case(frames=(700, 33), heads=5, head_dim=64),
    Case(frames=(2049,), heads=4, head_dim=64),
    Case(frames=(700, 33), heads=5, head_dim=80),
    Case(frames=(2049,), heads=4, head_dim=80),
    Case(frames=(64,), heads=3, head_dim=128),
    Case(frames=(260, 0, 36, 65, 1), heads=5, head_dim=128),
    Case(frames=(1025,) * 3, heads=25, head_dim=128),
]
PLAIN = [
    Case(frames=(1,), head_dim=32),
    Case(frames=(300, 17, 5), head_dim=16, heads=3),
    Case(frames=(129,), head_dim=96),
    Case(frames=(200, 0, 3), head_dim=44),
]


PATHS = [path for path in AttentionPath if path != AttentionPath.PROMPT]  # that is TreeAttention's


def run(case: Case, x: Inputs, path: AttentionPath = AttentionPath.AUTO) -> Tensor:
    out = torch.full(
        (sum(case.frames), case.heads * case.head_dim),
        torch.nan,
        dtype=case.dtype,
        device=x.qkv.device,
    )
    try:
        return capi.vision_attention(
            *x.tensors(), num_heads=case.heads, scale=case.head_dim**-0.5, out=out, path=path
        )
    except NotImplementedError:
        pytest.skip("no such path on this chip")


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def check(case: Case, device: torch.device, path: AttentionPath = AttentionPath.AUTO) -> None:
    x = draw(case, zlib.crc32(str(case).encode()), device)
    got, wanted = run(case, x, path).double(), reference(case, x)
    assert distance(got, wanted) < TOLERANCE[case.dtype]
    # one wrong row is not diluted
    worst = ((got - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-3)).max()
    assert worst < 8 * TOLERANCE[case.dtype], f"{worst:.2e}"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_vision_attention_matches_float64(
    case: Case, dtype: torch.dtype, path: AttentionPath, cuda: torch.device
) -> None:
    check(case.of(dtype), cuda, path)


@pytest.mark.parametrize("case", CASES + PLAIN, ids=str)
def test_vision_attention_in_float32_matches_float64(case: Case, cuda: torch.device) -> None:
    check(case.of(torch.float32), cuda)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_vision_attention_of_an_odd_head_dim_matches_float64(
    case: Case, cuda: torch.device
) -> None:
    check(case, cuda)


@pytest.mark.parametrize("path", PATHS)
def test_vision_attention_frame_does_not_see_its_neighbour(
    path: AttentionPath, cuda: torch.device
) -> None:
    """Not even where the neighbour holds NaN and infinity: another's picture may not spoil this
    one.
    """
    case = Case(frames=(100, 37, 201))
    x = draw(case, 5, cuda)
    clean = run(case, x, path)
    x.qkv[100:137] = torch.tensor([torch.nan, torch.inf], dtype=case.dtype, device=cuda).repeat(
        x.qkv.shape[1] // 2
    )
    spoilt = run(case, x, path)
    assert torch.equal(clean[:100], spoilt[:100])
    assert torch.equal(clean[137:], spoilt[137:])


def test_vision_attention_is_the_same_ten_times(cuda: torch.device) -> None:
    case = Case(frames=(1500, 7, 900), heads=16)
    x = draw(case, 6, cuda)
    first = run(case, x)
    for _ in range(10):
        assert torch.equal(run(case, x), first)


@pytest.mark.parametrize("path", PATHS)
def test_vision_attention_of_large_scores_is_finite(
    path: AttentionPath, cuda: torch.device
) -> None:
    case = Case(frames=(300,))
    x = draw(case, 7, cuda)
    x.qkv.mul_(60)
    got, wanted = run(case, x, path), reference(case, x)
    assert torch.isfinite(got).all()
    # scores of thousands: what one rounding of q moves is no longer small
    assert distance(got, wanted) < 0.02


@pytest.mark.parametrize("path", PATHS)
def test_vision_attention_survives_any_frame_starts(
    path: AttentionPath, cuda: torch.device
) -> None:
    """An engine builder times kernels on inputs of any content."""
    case = Case(frames=(100, 100, 100, 100))
    x = draw(case, 8, cuda)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        x.frame_starts.copy_(
            torch.randint(-(2**31), 2**31 - 1, (5,), generator=generator, dtype=torch.int64).int()
        )
        run(case, x, path)
        x.frame_starts.copy_(torch.randint(-10, 500, (5,), generator=generator).int())
        run(case, x, path)
    torch.cuda.synchronize()


@pytest.mark.parametrize("fault", ["axis", "neighbour", "column", "order"])
def test_vision_attention_check_catches_a_planted_fault(fault: str, cuda: torch.device) -> None:
    case = Case(frames=(100, 156))
    x = draw(case, 9, cuda)
    wanted = reference(case, x)
    if fault == "axis":
        x.pair_axis.copy_(1 - x.pair_axis)
    elif fault == "neighbour":
        x.frame_starts[1] += 1
    elif fault == "column":
        x.rope_positions[1] += torch.arange(256, device=cuda) % 2
    else:
        x.qkv.copy_(torch.cat([x.qkv[1:2], x.qkv[:1], x.qkv[2:]]))
    assert distance(run(case, x), wanted) > 2 * TOLERANCE[case.dtype]
