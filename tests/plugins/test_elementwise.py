"""QKNormMRope, AddRmsNorm, SiluMul and the KV move against their definitions in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.plugins.overlap import check_overlap
from trt_eagle3.engine import capi

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# One rounding of the output to 8, 11 or 24 bits (few values can all be unlucky); float32 also a few
# roundings inside.
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 1e-6}


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def ref_rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    x = x.double()
    if weight is None:
        return x
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight.double()


def ref_turn(x: Tensor, angles: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [8, 111, 4096, 2560, 5120, 12288, 40000])
@pytest.mark.parametrize("rows", [1, 16, 77])
@pytest.mark.parametrize("with_residual", [False, True])
def test_add_rms_norm_matches_float64(
    rows: int, hidden: int, dtype: torch.dtype, with_residual: bool, cuda: torch.device
) -> None:
    x, residual = (torch.randn(rows, hidden, device=cuda).to(dtype) for _ in range(2))
    weight = torch.randn(hidden, device=cuda).to(dtype)
    total = x + residual if with_residual else x
    out = (torch.full_like(x, torch.nan), torch.full_like(x, torch.nan) if with_residual else None)
    y, total_got = capi.add_rms_norm(
        x, weight, residual if with_residual else None, epsilon=1e-6, out=out
    )
    if total_got is not None:
        assert torch.equal(total_got, total)
    assert distance(y, ref_rms_norm(total, weight, 1e-6)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [8, 111, 1024, 1152, 4608, 8192, 12288])
@pytest.mark.parametrize("rows", [1, 77])
@pytest.mark.parametrize("with_residual", [False, True])
def test_add_layer_norm_matches_float64(
    rows: int, hidden: int, dtype: torch.dtype, with_residual: bool, cuda: torch.device
) -> None:
    # a mean to take off
    x, residual = (torch.randn(rows, hidden, device=cuda).add(3).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(hidden, device=cuda).to(dtype) for _ in range(2))
    total = x + residual if with_residual else x
    out = (torch.full_like(x, torch.nan), torch.full_like(x, torch.nan) if with_residual else None)
    y, total_got = capi.add_layer_norm(
        x, weight, bias, residual if with_residual else None, epsilon=1e-6, out=out
    )
    if total_got is not None:
        assert torch.equal(total_got, total)
    wanted = torch.nn.functional.layer_norm(
        total.double(), (hidden,), weight.double(), bias.double(), 1e-6
    )
    assert distance(y, wanted) < TOLERANCE[dtype]
    assert distance(y, wanted - bias.double()) > 10 * TOLERANCE[dtype]


def test_add_layer_norm_may_write_over_its_inputs(cuda: torch.device) -> None:
    x, residual = (torch.randn(9, 1152, device=cuda).bfloat16() for _ in range(2))
    weight, bias = (torch.randn(1152, device=cuda).bfloat16() for _ in range(2))
    y, total = capi.add_layer_norm(x, weight, bias, residual, epsilon=1e-6)
    capi.add_layer_norm(x, weight, bias, residual, epsilon=1e-6, out=(x, residual))
    assert total is not None
    assert torch.equal(x, y)
    assert torch.equal(residual, total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [8, 111, 2048, 12288, 40000])
@pytest.mark.parametrize(
    ("x_is_wide", "with_residual"), [(True, False), (False, True), (True, True)]
)
def test_add_rms_norm_keeps_a_float32_residual_stream(
    hidden: int, dtype: torch.dtype, x_is_wide: bool, with_residual: bool, cuda: torch.device
) -> None:
    x = torch.randn(19, hidden, device=cuda).to(torch.float32 if x_is_wide else dtype)
    # no float16 holds it
    residual = torch.randn(19, hidden, device=cuda) * 3e5 if with_residual else None
    weight = torch.randn(hidden, device=cuda).to(dtype)
    y, total = capi.add_rms_norm(x, weight, residual, epsilon=1e-6)
    wanted = x.float() if residual is None else x.float() + residual
    assert y.dtype == dtype
    assert total is None or torch.equal(total, wanted)
    assert distance(y, ref_rms_norm(wanted, weight, 1e-6)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("heads", [(7, 1), (32, 8)])
@pytest.mark.parametrize("tokens", [(1, 1), (2, 19), (2, 131), (5, 207)])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("prefetch_safe", [False, True])
def test_qk_norm_mrope_matches_float64_up_to_position_262143(
    tokens: tuple[int, int],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    with_norm: bool,
    prefetch_safe: bool,
    cuda: torch.device,
) -> None:
    (batch, seq), (hq, hkv), n = tokens, heads, tokens[0] * tokens[1]
    qkv = torch.randn(n, (hq + 2 * hkv) * head_dim, device=cuda).to(dtype)
    positions = torch.randint(0, 262144, (3, batch, seq), dtype=torch.int32, device=cuda)
    positions[:, 0, 0] = torch.tensor([200000, 262143, 0], dtype=torch.int32)
    inv_freq = 5e6 ** (-torch.arange(0, head_dim, 2, device=cuda).float() / head_dim)
    axis = torch.randint(0, 3, (head_dim // 2,), dtype=torch.int32, device=cuda)
    norms = [torch.randn(head_dim, device=cuda).to(dtype) if with_norm else None for _ in range(2)]
    shapes = (hq * head_dim, hkv * head_dim, hkv * head_dim)
    out = tuple(torch.full((n, width), torch.nan, device=cuda, dtype=dtype) for width in shapes)
    torch.cuda.synchronize()  # prefetch_safe
    q, k, v = capi.qk_norm_mrope(
        qkv, positions, inv_freq, axis, *norms, num_heads=hq, num_kv_heads=hkv,
        head_dim=head_dim, epsilon=1e-6, prefetch_safe=prefetch_safe, out=(out[0], out[1], out[2]),
    )  # fmt: skip
    # the angle is the float32 product, as in transformers; its sine and cosine are exact
    angles = (positions.view(3, n)[axis.long()].T.float() * inv_freq).double()
    q_in, k_in, v_in = qkv.split(shapes, dim=-1)
    wanted_q = ref_turn(ref_rms_norm(q_in.view(n, hq, head_dim), norms[0], 1e-6), angles)
    wanted_k = ref_turn(ref_rms_norm(k_in.view(n, hkv, head_dim), norms[1], 1e-6), angles)
    assert distance(q.view(n, hq, head_dim), wanted_q.double()) < TOLERANCE[dtype]
    assert distance(k.view(n, hkv, head_dim), wanted_k.double()) < TOLERANCE[dtype]
    assert torch.equal(v, v_in)


# of more than 16 tokens `linear` takes weights of 64 MiB and more
@pytest.mark.parametrize(("tokens", "inner"), [(1, 512), (6, 512), (40, 32768)])
def test_qk_norm_mrope_beside_other_launches_computes_what_it_does_alone(
    tokens: int, inner: int, cuda: torch.device
) -> None:
    """Each reads as qkv what the product right before wrote, and positions before that ends."""
    if tokens > 16 and torch.cuda.get_device_capability(cuda) != (9, 0):
        pytest.skip("products of more than 16 tokens have a kernel on Hopper alone")
    weights = [torch.randn(1024, inner, device=cuda).bfloat16() * inner**-0.5 for _ in range(8)]
    positions = torch.randint(0, 9000, (3, 1, tokens), dtype=torch.int32, device=cuda)
    inv_freq = 5e6 ** (-torch.arange(0, 64, 2, device=cuda).float() / 64)
    axis = torch.randint(0, 3, (32,), dtype=torch.int32, device=cuda)
    norm, x = torch.randn(64, device=cuda).bfloat16(), torch.randn(tokens, inner, device=cuda)

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        wide = x if x.shape[1] == inner else x.repeat(1, inner // x.shape[1])
        qkv = capi.linear(wide, weight, prefetch_safe=True)
        return capi.qk_norm_mrope(
            qkv, positions, inv_freq, axis, norm, norm, num_heads=8, num_kv_heads=4,
            head_dim=64, epsilon=1e-6, prefetch_safe=True,
        )[0]  # fmt: skip

    check_overlap(x.bfloat16(), [partial(layer, weight=weight) for weight in weights])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 111, 12288])
def test_silu_mul_matches_float64(width: int, dtype: torch.dtype, cuda: torch.device) -> None:
    gate_up = torch.randn(19, 2 * width, device=cuda).to(dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    out = capi.silu_mul(gate_up, torch.full((19, width), torch.nan, device=cuda, dtype=dtype))
    assert distance(out, gate / (1 + (-gate).exp()) * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "moves"), [(1, 1), (1, 16), (3, 7), (2, 300), (1, 2048)])
def test_kv_move_reads_all_rows_before_it_writes_any(
    batch: int, moves: int, dtype: torch.dtype, cuda: torch.device
) -> None:
    page_size, pages = 16, 140
    cache = torch.randn(6, (batch * pages + 1) * page_size, 2, 64, device=cuda).to(dtype)
    table = (torch.randperm(batch * pages, device=cuda) + 1).view(batch, pages).to(torch.int32)
    # a permutation of overlapping rows: any order of row-by-row copies would be wrong
    rows = torch.stack(
        [torch.randperm(pages * page_size, device=cuda)[:moves] for _ in range(batch)]
    )
    to = torch.stack([row[torch.randperm(moves, device=cuda)] for row in rows])
    skipped = torch.rand(batch, moves, device=cuda) < 0.2
    source = torch.where(skipped, -1, rows).to(torch.int32)

    def slots(row: Tensor) -> Tensor:
        return torch.gather(table.long(), 1, row // page_size) * page_size + row % page_size

    wanted = cache.clone()
    wanted[:, slots(to)[~skipped]] = cache[:, slots(rows)[~skipped]]
    capi.kv_move(cache, source, to.to(torch.int32), table, page_size=page_size)
    assert torch.equal(cache, wanted)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_kv_move_takes_int64_slots_over_the_engine_s_buffer(where: str, cuda: torch.device) -> None:
    # keys and values, layers, slots, Hkv, D
    cache = torch.randn(2, 5, 300, 2, 64, device=cuda).to(torch.bfloat16)
    slots = torch.randperm(300)
    # half of each is in the other
    source, destination = slots[:40].to(where), slots[20:60].to(where)
    wanted = cache.clone()
    wanted[:, :, destination.to(cuda)] = cache[:, :, source.to(cuda)]
    capi.kv_move(cache, source, destination)
    assert torch.equal(cache, wanted)


def test_kv_move_without_a_page_table_takes_slots(cuda: torch.device) -> None:
    cache = torch.randn(4, 50, 1, 8, device=cuda)
    wanted = cache.clone()
    wanted[:, [3, 4, 5]] = cache[:, [4, 3, 49]]
    source = torch.tensor([[4, 3, 49, -1]], dtype=torch.int32, device=cuda)
    destination = torch.tensor([[3, 4, 5, 6]], dtype=torch.int32, device=cuda)
    capi.kv_move(cache, source, destination)
    assert torch.equal(cache, wanted)
