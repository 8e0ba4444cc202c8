"""Drawn inputs of ``GatedDelta``, and a float64 recurrence that follows every row's own path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trt_eagle3.graph.ops.gated_delta import L2_EPSILON, TREE_ROWS

__all__ = ["EPSILON", "FAULTS", "Case", "chain", "changed", "expected", "make_case", "take"]

EPSILON = 1e-6


@dataclass(frozen=True)
class Case:
    """Inputs by name, and the parents of the rows of each sequence (-1: the state)."""

    inputs: dict[str, Tensor]
    parents: list[list[int]]
    heads: tuple[int, int]

    @property
    def attributes(self) -> dict[str, Any]:
        """Of the op."""
        return {"num_k_heads": self.heads[0], "num_v_heads": self.heads[1], "epsilon": EPSILON}


def chain(count: int) -> list[int]:
    """Parents of a run of rows."""
    return list(range(-1, count - 1))


def make_case(
    parents: list[list[int]],
    certain: list[int],
    heads: tuple[int, int],
    width: int,
    seed: int,
    dims: tuple[int, int] = (6, 5),
    dtype: torch.dtype = torch.float32,
    entries: int = 5,
) -> Case:
    """``heads``: Hk, Hv. ``dims``: Dk, Dv. ``width``: W. ``entries``: twice the sequences or
    more.
    """
    g = torch.Generator().manual_seed(seed)
    (hk, hv), (dk, dv) = heads, dims
    channels, batch, new = 2 * hk * dk + hv * dv, len(parents), len(parents[0])
    mask = torch.zeros(batch, new, new, dtype=torch.bool)
    for b, above in enumerate(parents):
        for i, parent in enumerate(above):
            if parent >= 0:
                mask[b, i] = mask[b, parent]
            mask[b, i, i] = True
    order = torch.randperm(entries, generator=g).int()
    inputs = {
        "qkvz": torch.randn(batch * new, channels + hv * dv, generator=g).to(dtype),
        "ba": torch.randn(batch * new, 2 * hv, generator=g).to(dtype),
        "conv_weight": torch.randn(channels, 1, width, generator=g).to(dtype),
        "a_log": torch.randn(hv, generator=g) - 1,
        "dt_bias": torch.randn(hv, generator=g),
        "norm": torch.randn(dv, generator=g).to(dtype),
        "conv_state": torch.randn(entries, width - 1, channels, generator=g).to(dtype),
        "delta_state": torch.randn(entries, hv, dk, dv, generator=g),
        "state_reads": order[:batch],
        "state_writes": order[batch : 2 * batch],
        "certain": torch.tensor(certain, dtype=torch.int32),
        "tree_mask": mask,
    }
    return Case(inputs, parents, heads)


def expected(case: Case) -> dict[str, Tensor]:
    """One row after the other, each from its parent's state: ``out``, both states and the rows of
    both. What the op rounds to T on its way is rounded here.
    """
    dtype = case.inputs["qkvz"].dtype
    x = {n: t.double() if t.is_floating_point() else t for n, t in case.inputs.items()}
    (hk, hv), (batch, new, _) = case.heads, x["tree_mask"].shape
    dk, dv = x["delta_state"].shape[2:]
    channels, kept = x["conv_weight"].shape[0], min(new, TREE_ROWS)

    def rounded(t: Tensor) -> Tensor:
        return t if dtype == torch.float32 else t.to(dtype).double()

    rows, z = x["qkvz"].view(batch, new, -1).split([channels, hv * dv], dim=-1)
    b, a = x["ba"].view(batch, new, -1).chunk(2, dim=-1)
    out = torch.zeros(batch, new, hv, dv, dtype=torch.float64)
    delta_rows = torch.zeros(batch, new, hk * dk + hv * dv + 2 * hv, dtype=torch.float64)
    states, windows = x["delta_state"].clone(), x["conv_state"].clone()
    for s, above in enumerate(case.parents):
        read = int(x["state_reads"][s])
        start = (x["conv_state"][read], x["delta_state"][read])
        after: list[tuple[Tensor, Tensor]] = []
        for i, parent in enumerate(above):
            window, state = start if parent < 0 else after[parent]
            seen = torch.cat([window, rows[s, i : i + 1]])
            mixed = rounded((seen * x["conv_weight"][:, 0].T).sum(0))
            q, k, v = rounded(functional.silu(mixed)).split([hk * dk, hk * dk, hv * dv])
            unit = [t.view(hk, dk) for t in (q, k)]
            q, k = (t / (t.square().sum(-1, keepdim=True) + L2_EPSILON).sqrt() for t in unit)
            g = -x["a_log"].exp() * functional.softplus(a[s, i] + x["dt_bias"])
            beta = rounded(b[s, i].sigmoid())
            delta_rows[s, i] = torch.cat([k.flatten(), v, g, beta])
            q, k = (t.repeat_interleave(hv // hk, dim=0) for t in (q, k))
            state = state * g.exp()[:, None, None]
            missing = v.view(hv, dv) - torch.einsum("hkv,hk->hv", state, k)
            state = state + torch.einsum("h,hk,hv->hkv", beta, k, missing)
            out[s, i] = torch.einsum("hkv,hk->hv", state, q) * dk**-0.5
            after.append((seen[1:], state))
        certain = int(x["certain"][s])
        write = int(x["state_writes"][s])
        windows[write], states[write] = start if certain == 0 else after[certain - 1]
    out = rounded(out)
    unit = rounded(out / (out.square().mean(-1, keepdim=True) + EPSILON).sqrt())
    gated = rounded(unit * x["norm"]) * functional.silu(z.view(out.shape))
    return {
        "out": gated.view(batch * new, -1),
        "conv_state_out": windows,
        "delta_state_out": states,
        "conv_rows": rows[:, :kept],
        "delta_rows": delta_rows[:, :kept],
    }


def take(case: Case, rows: list[int]) -> Case:
    """The first sequence's ``rows`` as a chain that stays."""
    inputs = dict(case.inputs)
    for name in ("qkvz", "ba"):
        inputs[name] = inputs[name][rows]
    inputs["certain"] = torch.tensor([len(rows)], dtype=torch.int32)
    inputs["tree_mask"] = torch.ones(len(rows), len(rows), dtype=torch.bool).tril()[None]
    for name in ("state_reads", "state_writes"):
        inputs[name] = inputs[name][:1]
    return Case(inputs, [chain(len(rows))], case.heads)


def changed(case: Case, **inputs: Tensor) -> Case:
    """``case`` with other inputs, and what is expected of it as before."""
    return replace(case, inputs={**case.inputs, **inputs})


def _ungated(case: Case) -> Case:
    """Every channel of z where SiLU is 1."""
    qkvz = case.inputs["qkvz"].clone()
    qkvz[:, case.inputs["conv_weight"].shape[0] :] = 1.2784645
    return changed(case, qkvz=qkvz)


def _wholly_written(case: Case) -> Case:
    """Every beta 1."""
    ba = case.inputs["ba"].clone()
    ba[:, : case.heads[1]] = 100.0
    return changed(case, ba=ba)


FAULTS: dict[str, Callable[[Case], Case]] = {
    "convolution off by a row": lambda c: changed(
        c, conv_weight=c.inputs["conv_weight"].roll(1, dims=2)
    ),
    "state of another sequence": lambda c: changed(c, state_reads=c.inputs["state_reads"].roll(1)),
    "a row too few stays": lambda c: changed(c, certain=c.inputs["certain"] - 1),
    "a row too many stays": lambda c: changed(c, certain=c.inputs["certain"] + 1),
    "decay forgotten": lambda c: changed(c, a_log=c.inputs["a_log"] - 100),
    "output gate forgotten": _ungated,
    "beta forgotten": _wholly_written,
    "sibling seen": lambda c: changed(c, tree_mask=torch.ones_like(c.inputs["tree_mask"]).tril()),
}
"""Each makes of a case one that a wrong implementation would compute instead."""
