"""Linear attention by the gated delta rule, over the state of each sequence and a tree of new rows.

For every new row i: a causal convolution over its own path (silu after it), heads of q and k
normalised to length one, q times Dk^-1/2, ``beta = sigmoid(b)``,
``g = -exp(a_log) * softplus(a + dt_bias)``, and along the row's path

    S_i = exp(g_i) * (I - beta_i * k_i k_i^T) S_parent + beta_i * k_i v_i^T,    o_i = S_i^T q_i

(Yang et al. 2024, arXiv 2412.06464; transformers, ``models/qwen3_5``), then RMSNorm(o) * silu(z) by
heads. The new rows of a sequence are solved as one system. G_i is the sum of g along the path of i,
``D_ij = exp(G_i - G_j)`` if j is on the path of i (else 0), and S the state before the new rows:

    (I + beta * strict(D) * K K^T) U = beta * (V - exp(G) * K S),    O = exp(G) * Q S + D * Q K^T U

So a chain is a tree with triangular paths, and no state is stored per row.

A state is read at ``state_reads[b]`` and written at ``state_writes[b]``, which differ. The written
state is the one after the first ``certain[b]`` rows. A failed forward leaves the read state intact.
The op also returns the rows that advance the states along a path (``replay_delta``,
``replay_window``), for the first T = min(S, ``TREE_ROWS``) rows. More than ``TREE_ROWS`` rows must
be a chain.

Shapes: B sequences, S new rows of each, N = B * S, M masked tail, whose last S columns are the new
rows; Hk key heads of Dk, Hv value heads of Dv, Hv a multiple of Hk; C = 2 Hk Dk + Hv Dv channels of
q, k and v; W the convolution's width; E entries. qkvz T [N, C + Hv Dv]; ba T [N, 2 Hv]; conv_weight
T [C, 1, W], the last tap is the row's own; a_log, dt_bias float32 [Hv]; norm T [Dv]; conv_state T
[E, W - 1, C], the newest row last, before the convolution; delta_state float32 [E, Hv, Dk, Dv];
state_reads, state_writes, certain int32 [B]; tree_mask bool [B, S, M]; out T [N, Hv Dv]; conv_rows
T [B, T, C]; delta_rows float32 [B, T, Hk Dk + Hv Dv + 2 Hv]: k, v, g, beta. Outputs of padding rows
are undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trt_eagle3.graph.ops.gated_delta_kernel import KERNEL, gated_delta_call
from trt_eagle3.graph.ops.gated_delta_lowering import (
    L2_EPSILON,
    LOWERING,
    LOWERING_17,
    TREE_ROWS,
)
from trt_eagle3.graph.ops.op import Op, Shapes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "GATED_DELTA",
    "L2_EPSILON",
    "TREE_ROWS",
    "gated_delta",
    "replay_delta",
    "replay_window",
]

_CHUNK = 64  # rows of a chain that are solved as one system


def gated_delta(
    qkvz: Tensor,
    ba: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    conv_state: Tensor,
    delta_state: Tensor,
    state_reads: Tensor,
    state_writes: Tensor,
    certain: Tensor,
    tree_mask: Tensor,
    *,
    num_k_heads: int,
    num_v_heads: int,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ``out``, both states, updated in place, and the rows of both; see above for shapes."""
    import torch
    from torch.nn import functional

    batch, new, tail = tree_mask.shape
    channels, (key_dim, value_dim) = conv_weight.shape[0], delta_state.shape[2:]
    reads, writes = state_reads.long(), state_writes.long()
    paths = tree_mask[:, :, tail - new :]
    rows, z = qkvz.view(batch, new, -1).split([channels, num_v_heads * value_dim], dim=-1)
    extended = torch.cat([conv_state[reads], rows], dim=1)
    mixed = _convolved(extended, paths, conv_weight)
    q, k, v = mixed.float().split(
        [num_k_heads * key_dim, num_k_heads * key_dim, num_v_heads * value_dim], dim=-1
    )
    b, a = ba.view(batch, new, 2, num_v_heads).unbind(2)
    beta = b.sigmoid().float()
    g = -a_log.exp() * functional.softplus(a.float() + dt_bias)
    q, k = (_unit(x.unflatten(-1, (num_k_heads, key_dim))) for x in (q, k))
    v = v.unflatten(-1, (num_v_heads, value_dim))
    size = new if new <= TREE_ROWS else _CHUNK
    parts = (q * key_dim**-0.5, k, v, g, beta)
    mixed_values, state = _delta_rule(parts, delta_state[reads], certain.long(), paths, size)
    delta_rows = torch.cat([part[:, :TREE_ROWS].flatten(2) for part in (k, v, g, beta)], dim=-1)
    delta_state[writes] = state
    window = certain.long()[:, None] + torch.arange(extended.shape[1] - new, device=certain.device)
    conv_state[writes] = extended.gather(1, window[..., None].expand(-1, -1, channels))
    heads = mixed_values.to(qkvz.dtype).float()
    unit = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + epsilon)
    normed = (norm * unit.to(qkvz.dtype)).float()
    gated = normed * functional.silu(z.unflatten(-1, v.shape[2:]).float())
    out = gated.to(qkvz.dtype).view(batch * new, -1)
    return out, conv_state, delta_state, rows[:, :TREE_ROWS], delta_rows


def replay_window(window: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """Return a convolution's windows ``[..., W - 1, C]`` after ``counts`` int64 [n] more rows.

    The rows are the first of ``rows`` ``[..., n, K, C]``.
    """
    import torch

    extended = torch.cat([window, rows], dim=-2)
    place = counts[:, None] + torch.arange(window.shape[-2], device=counts.device)
    return extended.gather(-2, place[..., None].expand(window.shape))


def replay_delta(state: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """Return the states float32 ``[..., n, Hv, Dk, Dv]`` after ``counts`` int64 [n] more rows.

    The rows are the first of ``rows`` float32 ``[..., n, K, Hk Dk + Hv Dv + 2 Hv]``, applied in
    order.
    """
    heads, key_dim, value_dim = state.shape[-3:]
    key_width = rows.shape[-1] - heads * (value_dim + 2)
    k, v, g, beta = rows.split([key_width, heads * value_dim, heads, heads], dim=-1)
    k = k.unflatten(-1, (-1, key_dim))
    k = k.repeat_interleave(heads // k.shape[-2], dim=-2)
    v = v.unflatten(-1, (heads, value_dim))
    for i in range(rows.shape[-2]):
        stays = (i < counts)[:, None]
        key = k[..., i, :, :, None]
        decayed = state * (g[..., i, :] * stays).exp()[..., None, None]
        missing = v[..., i, :, :] - (decayed * key).sum(-2)
        step = (beta[..., i, :] * stays)[..., None]
        state = decayed + key * (missing * step)[..., None, :]
    return state


def _unit(x: Tensor) -> Tensor:
    import torch

    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPSILON)


def _convolved(extended: Tensor, paths: Tensor, weight: Tensor) -> Tensor:
    """Compute T [B, S, C]: silu of the convolution of each row over the last rows of its path.

    ``extended`` T [B, W - 1 + S, C]: the state's rows, then the new ones.
    """
    import torch
    from torch.nn import functional

    batch, new = paths.shape[:2]
    before = extended.shape[1] - new
    row = torch.arange(new, device=paths.device)
    ancestors = torch.where(paths & (row < row[:, None]), row, -1)
    parents = ancestors.amax(-1) + before  # the state's newest row if there is no ancestor
    old = (torch.arange(before, device=paths.device) - 1).clamp(min=0).expand(batch, -1)
    parents = torch.cat([old, parents], dim=1)
    place = (row + before).expand(batch, -1)
    taps = weight[:, 0].float()
    total = extended[:, before:].float() * taps[:, -1]
    for tap in range(before - 1, -1, -1):
        place = parents.gather(1, place)
        seen = extended.gather(1, place[..., None].expand(-1, -1, extended.shape[2]))
        total = total + seen.float() * taps[:, tap]
    return functional.silu(total.to(extended.dtype))


def _delta_rule(
    parts: Sequence[Tensor], state: Tensor, certain: Tensor, paths: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Return outputs float32 [B, S, Hv, Dv] and the states after the first ``certain`` rows.

    The states are [B, Hv, Dk, Dv].

    Args:
        parts: q, k, v, g, beta of [B, S] rows.
        size: rows solved as one system. Each system starts from the state after the one before.
    """
    import torch

    found, after = [], state
    new = paths.shape[1]
    for start in range(0, new, size):
        stop = min(start + size, new)
        some = [x[:, start:stop] for x in parts]
        out, state_after = _solved(some, state, paths[:, start:stop, start:stop])
        found.append(out)
        here = (certain > start) & (certain <= stop)
        now = state_after((certain - start).clamp(1, stop - start))
        after = torch.where(here[:, None, None, None], now, after)
        if stop < new:
            state = state_after(torch.full_like(certain, stop - start))
    return torch.cat(found, dim=1), after


def _solved(
    parts: Sequence[Tensor], state: Tensor, paths: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Compute ``_delta_rule`` of one system of rows, by the equations above.

    The returned function gives the states after the first ``counts`` [B] rows, 1 or more each.
    """
    import torch

    q, k, v, g, beta = parts
    ratio = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(ratio, dim=2).transpose(1, 2) for x in (q, k))
    v, g, beta = v.transpose(1, 2), g.transpose(1, 2), beta.transpose(1, 2)[..., None]
    row = torch.arange(paths.shape[1], device=paths.device)
    on_path = (paths & (row <= row[:, None]))[:, None]
    total = (on_path.to(g.dtype) @ g[..., None])[..., 0]
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~on_path, -torch.inf).exp()
    grown = total.exp()[..., None]
    u = torch.linalg.solve_triangular(
        beta * decay * (k @ k.mT),
        beta * (v - grown * (k @ state)),
        upper=False,
        unitriangular=True,
    )
    out = grown * (q @ state) + (decay * (q @ k.mT)) @ u

    def state_after(counts: Tensor) -> Tensor:
        last = (counts - 1)[:, None, None].expand(-1, total.shape[1], -1)
        end = total.gather(2, last)
        stays = (row < counts[:, None])[:, None]
        left = (end - total).masked_fill(~stays, -torch.inf).exp()[..., None]
        after: Tensor = end.exp()[..., None] * state + (left * k).mT @ u
        return after

    return out.transpose(1, 2), state_after


_STATES = ("conv_state", "delta_state")
_ENTRIES = ("state_reads", "state_writes", "certain")

_CHANNELS, _MAX_CHANNELS, _TAPS = 4, 128, (2, 8)


def _plugin_refuses(attributes: Mapping[str, Any], shapes: Shapes, compute: int) -> str:
    del attributes, compute
    for size in map(int, shapes["delta_state"][2:]):
        if size % _CHANNELS or size > _MAX_CHANNELS:
            return (
                f"linear heads have {size} channels, expected a multiple of {_CHANNELS}, at most "
                f"{_MAX_CHANNELS}"
            )
    taps, (least, most) = int(shapes["conv_weight"][2]), _TAPS
    return "" if least <= taps <= most else f"expected {least} to {most} taps, got {taps}"


GATED_DELTA = Op(
    inputs={
        "": (
            *("qkvz", "ba", "conv_weight", "a_log", "dt_bias", "norm"),
            *_STATES,
            *_ENTRIES,
            "tree_mask",
        )
    },
    outputs={"": ("out", "conv_state_out", "delta_state_out", "conv_rows", "delta_rows")},
    attributes={"": ("num_k_heads", "num_v_heads", "epsilon")},
    float_attributes=("epsilon",),
    types={
        **dict.fromkeys(("a_log", "dt_bias"), "float32"),
        **dict.fromkeys(("delta_state", "delta_state_out", "delta_rows"), "float32"),
        **dict.fromkeys(_ENTRIES, "int32"),
        "tree_mask": "bool",
    },
    lowering={"": LOWERING},
    lowering_17={"": LOWERING_17},
    torch_function=gated_delta,
    kernel=KERNEL,
    kernel_call=gated_delta_call,
    plugin="GatedDelta",
    plugin_refuses=_plugin_refuses,
    plugin_attributes=("prefetch_safe",),
)
