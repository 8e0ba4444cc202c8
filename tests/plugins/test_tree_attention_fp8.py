"""TreeAttention over FP8 caches, against its definition in float64 on the numbers that the caches
hold.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.plugins.test_tree_attention import CASES, PLAIN, PROMPTS, TOLERANCE
from tests.plugins.tree_case import Case, Inputs, check_rows, draw, expected_cache, reference, run
from trt_eagle3.engine import capi
from trt_eagle3.engine.capi import AttentionPath
from trt_eagle3.graph.ops.kv_fp8 import decode, encode

pytestmark = pytest.mark.gpu

POISON = 0x7E  # 448, where no token lies


def narrowed(x: Inputs, case: Case, scales: Tensor) -> Inputs:
    """``x`` with FP8 caches; some of its keys and values are larger than a byte can hold."""
    held = torch.zeros(len(x.k_cache), dtype=torch.bool, device=x.q.device)
    for row, (past, _) in enumerate(case.lengths):
        held[x.slots(case, row)[: past + case.tail - case.num_new]] = True
    caches = [
        torch.where(held[:, None, None], encode(cache.nan_to_num(), scale), POISON)
        for cache, scale in zip((x.k_cache, x.v_cache), scales, strict=True)
    ]
    return replace(x, k_cache=caches[0].to(torch.uint8), v_cache=caches[1].to(torch.uint8))


def draw_scales(case: Case, device: torch.device) -> Tensor:
    """[2, Hkv], no two alike; 448 of the smallest is less than two deviations of a key."""
    count = case.heads[1]
    g = torch.Generator(device).manual_seed(count)
    return 0.003 * 8 ** torch.rand(2, count, generator=g, device=device)


def widened(x: Inputs, case: Case, scales: Tensor) -> Inputs:
    """What the op computes of ``x``: new keys and values rounded, caches as numbers."""
    count, dim = case.heads[1], case.head_dim
    rows = [
        decode(encode(new.view(-1, count, dim), scale), scale, torch.float32).flatten(1)
        for new, scale in zip((x.k, x.v), scales, strict=True)
    ]
    caches = [
        decode(cache, scale, torch.float32)
        for cache, scale in zip((x.k_cache, x.v_cache), scales, strict=True)
    ]
    return replace(x, k=rows[0], v=rows[1], k_cache=caches[0], v_cache=caches[1])


def expected_bytes(x: Inputs, case: Case, scales: Tensor) -> tuple[Tensor, Tensor]:
    count, dim = case.heads[1], case.head_dim
    rows = [
        encode(new.view(-1, count, dim), scale).flatten(1)
        for new, scale in zip((x.k, x.v), scales, strict=True)
    ]
    return expected_cache(case, replace(x, k=rows[0], v=rows[1]))


def check(case: Case, device: torch.device, **options: object) -> None:
    scales = draw_scales(case, device)
    drawn = draw(case, seed=zlib.crc32(str(case).encode()), device=device)
    x = narrowed(drawn, case, scales)
    wanted_k, wanted_v = expected_bytes(x, case, scales)
    wanted = reference(case, widened(x, case, scales))
    out = torch.full_like(x.q, torch.nan)
    torch.cuda.synchronize()
    try:
        run(case, x, out, kv_scales=scales, **options)
    except NotImplementedError:
        pytest.skip("no such path for this geometry")
    assert torch.equal(x.k_cache, wanted_k)
    assert torch.equal(x.v_cache, wanted_v)
    check_rows(case, out, wanted, TOLERANCE[case.dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("prefetch_safe", [False, True])
def test_tree_attention_fp8_matches_float64(
    case: Case, dtype: torch.dtype, prefetch_safe: bool, cuda: torch.device
) -> None:
    check(case.of(dtype), cuda, prefetch_safe=prefetch_safe)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_new", [1, 3, 4])
def test_tree_attention_fp8_of_a_crowd_matches_float64(
    num_new: int, dtype: torch.dtype, cuda: torch.device
) -> None:
    lengths = tuple((53 * i % 900, i % (num_new + 1)) for i in range(40))
    case = Case(lengths=lengths, num_new=num_new, tail=num_new + 2, heads=(32, 8), page_size=16)
    check(case.of(dtype), cuda, prefetch_safe=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES[::5] + PLAIN, ids=str)
def test_write_only_writes_bytes_and_nothing_else(
    case: Case, dtype: torch.dtype, cuda: torch.device
) -> None:
    case, scales = case.of(dtype), draw_scales(case, cuda)
    x = narrowed(draw(case, seed=3, device=cuda), case, scales)
    wanted_k, wanted_v = expected_bytes(x, case, scales)
    out = torch.full_like(x.q, torch.nan)
    run(case, x, out, kv_scales=scales, write_only=True)
    assert torch.equal(x.k_cache, wanted_k)
    assert torch.equal(x.v_cache, wanted_v)
    assert out.isnan().all()


@pytest.mark.parametrize("case", CASES[::3] + PLAIN, ids=str)
def test_tree_attention_fp8_in_float32_matches_float64(case: Case, cuda: torch.device) -> None:
    check(case.of(torch.float32), cuda)


@pytest.mark.parametrize("num_splits", [1, 2, 16])
@pytest.mark.parametrize("path", [AttentionPath.MMA, AttentionPath.WGMMA, AttentionPath.SIMPLE])
@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_tree_attention_fp8_on_every_path_matches_float64(
    case: Case, path: AttentionPath, num_splits: int, cuda: torch.device
) -> None:
    check(case, cuda, path=path, num_splits=num_splits, prefetch_safe=True)


@pytest.mark.parametrize("path", [AttentionPath.AUTO, AttentionPath.WGMMA, AttentionPath.PROMPT])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", PROMPTS, ids=str)
def test_tree_attention_fp8_of_prompts_matches_float64(
    case: Case, dtype: torch.dtype, path: AttentionPath, cuda: torch.device
) -> None:
    check(case.of(dtype), cuda, path=path, prefetch_safe=True)


@pytest.mark.parametrize("fault", ["kinds", "heads", "none"])
def test_tree_attention_fp8_with_another_scale_is_caught(fault: str, cuda: torch.device) -> None:
    case = Case(lengths=((1000, 16),), num_new=16, tail=16, heads=(32, 8))
    scales = draw_scales(case, cuda)
    x = narrowed(draw(case, seed=1, device=cuda), case, scales)
    wanted = reference(case, widened(x, case, scales))
    given = {"kinds": scales.flip(0), "heads": scales.roll(1, 1), "none": scales}[fault]
    out = run(case, x, torch.empty_like(x.q), kv_scales=given.contiguous())
    error = (out.view(wanted.shape).double() - wanted).norm() / wanted.norm()
    assert (error < TOLERANCE[case.dtype]) == (fault == "none")


def test_tree_attention_fp8_rows_do_not_depend_on_what_is_verified_beside_them(
    cuda: torch.device,
) -> None:
    """A chain's tokens one by one, and all at once: the same bytes, and nearly the same output."""
    case = Case(lengths=((900, 6),), num_new=6, tail=6, heads=(32, 8), chunk=True)
    scales = draw_scales(case, cuda)
    together = narrowed(draw(case, seed=2, device=cuda), case, scales)
    apart = replace(together, k_cache=together.k_cache.clone(), v_cache=together.v_cache.clone())
    out = run(case, together, torch.empty_like(together.q), kv_scales=scales).clone()
    for i in range(6):
        one = replace(case, lengths=((900 + i, 1),), num_new=1, tail=1)
        step = replace(
            apart,
            **{name: getattr(apart, name)[i : i + 1] for name in "qkv"},
            past_lengths=apart.past_lengths + i,
            query_lengths=torch.ones_like(apart.query_lengths),
            tree_mask=torch.ones(1, 1, 1, dtype=torch.bool, device=cuda),
        )
        got = run(one, step, torch.empty_like(step.q), kv_scales=scales)
        assert (got - out[i : i + 1]).norm() < 2 * TOLERANCE[case.dtype] * got.norm()
    assert torch.equal(apart.k_cache, together.k_cache)
    assert torch.equal(apart.v_cache, together.v_cache)


@pytest.mark.parametrize("words", [False, True])
def test_kv_move_moves_rows_of_bytes(words: bool, cuda: torch.device) -> None:
    g = torch.Generator(cuda).manual_seed(0)
    cache = torch.randint(256, (6, 80, 8, 128), generator=g, device=cuda).to(torch.uint8)
    cache = cache.view(torch.int32) if words else cache  # as TensorRT has them
    wanted = cache.clone()
    source, destination = torch.tensor([5, 9, 40, 79]), torch.tensor([4, 5, 6, 0])
    wanted[:, destination] = cache[:, source]
    capi.kv_move(cache, source, destination)
    assert torch.equal(cache, wanted)
