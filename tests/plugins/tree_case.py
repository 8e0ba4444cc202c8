"""Random inputs of TreeAttention over a poisoned, scattered cache, and the op's definition in
float64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trt_eagle3.engine import capi

__all__ = ["Case", "Inputs", "check_rows", "draw", "expected_cache", "reference", "run"]


@dataclass(frozen=True)
class Case:
    """Sizes of one launch; ``lengths`` holds (past, real new tokens) per sequence.

    ``causal``: without a mask; ``chunk``: with the mask of a prompt's chunk, which is as causal.
    """

    lengths: tuple[tuple[int, int], ...]
    num_new: int
    tail: int
    heads: tuple[int, int] = (8, 2)
    head_dim: int = 128
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    chunk: bool = False
    window: int = 0
    anchor_window: int = 0

    def __str__(self) -> str:
        lengths = "_".join(f"{past}+{new}" for past, new in self.lengths)
        kind = "causal" if self.causal else "chunk" if self.chunk else f"tree{self.tail}"
        heads = f"{self.heads[0]}h{self.heads[1]}"
        if self.window or self.anchor_window:
            kind += f"-w{self.window}a{self.anchor_window}"
        sizes = f"D{self.head_dim}-p{self.page_size}-{str(self.dtype)[6:]}"
        return f"{lengths}-S{self.num_new}-{kind}-{heads}-{sizes}"

    def of(self, dtype: torch.dtype) -> Case:
        return replace(self, dtype=dtype)


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    past_lengths: Tensor
    query_lengths: Tensor
    page_table: Tensor
    tree_mask: Tensor
    scale: float

    def slots(self, case: Case, row: int) -> Tensor:
        """Cache slot of every place of a sequence."""
        pages = self.page_table[row].long()
        return (
            pages[:, None] * case.page_size + torch.arange(case.page_size, device=pages.device)
        ).flatten()


def draw(case: Case, seed: int, device: torch.device) -> Inputs:
    """Fresh inputs.

    NaN lies in page 0, in pages that nobody owns, and in every slot that holds no token.
    """
    g = torch.Generator(device).manual_seed(seed)
    batch, (hq, hkv), dim = len(case.lengths), case.heads, case.head_dim
    longest = max(past for past, _ in case.lengths) + case.tail
    pages = -(-longest // case.page_size) + 1
    total = batch * pages + 3
    order = torch.randperm(total - 1, generator=g, device=device) + 1  # page 0 belongs to nobody
    n = batch * case.num_new

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device).to(case.dtype)

    past = torch.tensor([p for p, _ in case.lengths], dtype=torch.int32, device=device)
    mask = torch.rand(batch, case.num_new, case.tail, generator=g, device=device) < 0.5
    own = torch.arange(case.num_new, device=device)
    mask[:, own, own + case.tail - case.num_new] = True  # a token sees itself
    for row, (_, new) in enumerate(case.lengths):
        mask[row, :, case.tail - case.num_new + new :] = False  # nobody sees padding
    if case.causal or case.chunk:
        ahead = case.tail - case.num_new
        columns = torch.arange(case.tail, device=device)
        mask = (columns[None] <= own[:, None] + ahead).expand(batch, -1, -1).contiguous()
    inputs = Inputs(
        q=normal(n, hq * dim) * 2,
        k=normal(n, hkv * dim),
        v=normal(n, hkv * dim),
        k_cache=torch.full(
            (total * case.page_size, hkv, dim), torch.nan, device=device, dtype=case.dtype
        ),
        v_cache=torch.full(
            (total * case.page_size, hkv, dim), torch.nan, device=device, dtype=case.dtype
        ),
        past_lengths=past,
        query_lengths=torch.tensor(
            [new for _, new in case.lengths], dtype=torch.int32, device=device
        ),
        page_table=order[: batch * pages].view(batch, pages).to(torch.int32).contiguous(),
        tree_mask=mask,
        scale=dim**-0.5,
    )
    for row, (length, _) in enumerate(case.lengths):
        held = inputs.slots(case, row)[: length + case.tail - case.num_new]
        inputs.k_cache[held] = normal(len(held), hkv, dim)
        inputs.v_cache[held] = normal(len(held), hkv, dim)
    return inputs


def run(case: Case, x: Inputs, out: Tensor, **options: object) -> Tensor:
    return capi.tree_attention(
        x.q, x.k, x.v, x.k_cache, x.v_cache, x.past_lengths, x.query_lengths, x.page_table,
        None if case.causal else x.tree_mask,
        tail=case.tail, page_size=case.page_size, scale=x.scale, out=out, window=case.window,
        anchor_window=case.anchor_window, **options,
    )  # fmt: skip


def expected_cache(case: Case, x: Inputs) -> tuple[Tensor, Tensor]:
    """The caches after the new tokens are written; every other byte as before."""
    k_cache, v_cache = x.k_cache.clone(), x.v_cache.clone()
    for row, (past, new) in enumerate(case.lengths):
        first = past + case.tail - case.num_new
        slots = x.slots(case, row)[first : first + new]
        tokens = slice(row * case.num_new, row * case.num_new + new)
        k_cache[slots] = x.k[tokens].view(new, *k_cache.shape[1:])
        v_cache[slots] = x.v[tokens].view(new, *v_cache.shape[1:])
    return k_cache, v_cache


def reference(case: Case, x: Inputs) -> Tensor:
    """float64 [B, S, Hq, D]: softmax(scale q k^T) v over [0, past) and the shown tail; 0 for
    padding.
    """
    (hq, hkv), dim = case.heads, case.head_dim
    k_cache, v_cache = expected_cache(case, x)
    out = torch.zeros(
        len(case.lengths), case.num_new, hq, dim, dtype=torch.float64, device=x.q.device
    )
    for row, (past, new) in enumerate(case.lengths):
        if new == 0:
            continue
        slots = x.slots(case, row)[: past + case.tail - case.num_new + new]
        k = k_cache[slots].double().repeat_interleave(hq // hkv, dim=1)
        v = v_cache[slots].double().repeat_interleave(hq // hkv, dim=1)
        q = x.q.view(-1, case.num_new, hq, dim)[row, :new].double()
        seen = torch.ones(new, len(slots), dtype=torch.bool, device=q.device)
        seen[:, past:] = x.tree_mask[row, :new, : len(slots) - past]
        place = torch.arange(len(slots), device=q.device)
        own = past + case.tail - case.num_new + torch.arange(new, device=q.device)[:, None]
        if case.window:
            seen &= (own - place).abs() < case.window
        if case.anchor_window:
            seen &= place >= past - case.anchor_window
        scores = torch.einsum("shd,khd->hsk", q, k) * x.scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[row, :new] = torch.einsum("hsk,khd->shd", weights, v)
    return out


def check_rows(case: Case, out: Tensor, wanted: Tensor, tolerance: float) -> None:
    """``out`` is ``wanted`` [B, S, Hq, D] as a whole and in each row by itself, which the others do
    not dilute; padding is 0.
    """
    got = out.view(wanted.shape).double()
    for row, (_, new) in enumerate(case.lengths):
        assert torch.all(got[row, new:] == 0)
    error = (got - wanted).norm() / wanted.norm()
    assert error < tolerance, f"{error:.2e}"
    worst = ((got - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-3)).max()
    assert worst < 8 * tolerance, f"{worst:.2e}"
