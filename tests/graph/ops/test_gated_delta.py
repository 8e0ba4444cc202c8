"""``GatedDelta`` against a float64 recurrence that follows every row's own path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tests.graph.ops.one_node import run_op
from tests.reference.compare import FAULT_FLOOR, FLOAT32_TOLERANCE
from trt_eagle3.graph.ops import OPS
from trt_eagle3.graph.ops.gated_delta import (
    L2_EPSILON,
    TREE_ROWS,
    gated_delta,
    replay_delta,
    replay_window,
)
from trt_eagle3.parity.metrics import relative_error

EPSILON = 1e-6
ENTRIES = 5
Run = Callable[..., dict[str, Tensor]]


@dataclass(frozen=True)
class Case:
    """Inputs by name, and the parents of the rows of each sequence (-1: the state)."""

    inputs: dict[str, Tensor]
    parents: list[list[int]]
    heads: tuple[int, int]


def make_case(
    parents: list[list[int]], certain: list[int], heads: tuple[int, int], width: int, seed: int
) -> Case:
    g = torch.Generator().manual_seed(seed)
    (hk, hv), (dk, dv) = heads, (6, 5)
    channels, batch, new = 2 * hk * dk + hv * dv, len(parents), len(parents[0])
    mask = torch.zeros(batch, new, new, dtype=torch.bool)
    for b, above in enumerate(parents):
        for i, parent in enumerate(above):
            if parent >= 0:
                mask[b, i] = mask[b, parent]
            mask[b, i, i] = True
    order = torch.randperm(ENTRIES, generator=g).int()
    inputs = {
        "qkvz": torch.randn(batch * new, channels + hv * dv, generator=g),
        "ba": torch.randn(batch * new, 2 * hv, generator=g),
        "conv_weight": torch.randn(channels, 1, width, generator=g),
        "a_log": torch.randn(hv, generator=g) - 1,
        "dt_bias": torch.randn(hv, generator=g),
        "norm": torch.randn(dv, generator=g),
        "conv_state": torch.randn(ENTRIES, width - 1, channels, generator=g),
        "delta_state": torch.randn(ENTRIES, hv, dk, dv, generator=g),
        "state_reads": order[:batch],
        "state_writes": order[batch : 2 * batch],
        "certain": torch.tensor(certain, dtype=torch.int32),
        "tree_mask": mask,
    }
    return Case(inputs, parents, heads)


def by_torch(inputs: dict[str, Tensor], **attributes: Any) -> dict[str, Tensor]:
    found = gated_delta(*(x.clone() for x in inputs.values()), **attributes)
    return dict(zip(OPS["GatedDelta"].outputs[""], found, strict=True))


def by_lowering(inputs: dict[str, Tensor], **attributes: Any) -> dict[str, Tensor]:
    return run_op("GatedDelta", "", inputs, **attributes)


RUNS: dict[str, Run] = {"torch": by_torch, "lowering": by_lowering}


def computed(run: Run, case: Case) -> dict[str, Tensor]:
    hk, hv = case.heads
    return run(case.inputs, num_k_heads=hk, num_v_heads=hv, epsilon=EPSILON)


def expected(case: Case) -> dict[str, Tensor]:
    """One row after the other, each from its parent's state; the written entries."""
    x = {n: t.double() if t.is_floating_point() else t for n, t in case.inputs.items()}
    (hk, hv), (batch, new, _) = case.heads, x["tree_mask"].shape
    dk, dv = x["delta_state"].shape[2:]
    channels = x["conv_weight"].shape[0]
    rows, z = x["qkvz"].view(batch, new, -1).split([channels, hv * dv], dim=-1)
    b, a = x["ba"].view(batch, new, -1).chunk(2, dim=-1)
    out = torch.zeros(batch, new, hv, dv, dtype=torch.float64)
    states, windows = x["delta_state"].clone(), x["conv_state"].clone()
    for s, above in enumerate(case.parents):
        read = int(x["state_reads"][s])
        start = (x["conv_state"][read], x["delta_state"][read])
        after: list[tuple[Tensor, Tensor]] = []
        for i, parent in enumerate(above):
            window, state = start if parent < 0 else after[parent]
            seen = torch.cat([window, rows[s, i : i + 1]])
            mixed = functional.silu((seen * x["conv_weight"][:, 0].T).sum(0))
            q, k, v = mixed.split([hk * dk, hk * dk, hv * dv])
            unit = [t.view(hk, dk) for t in (q, k)]
            q, k = (t / (t.square().sum(-1, keepdim=True) + L2_EPSILON).sqrt() for t in unit)
            q, k = (t.repeat_interleave(hv // hk, dim=0) for t in (q, k))
            g = -x["a_log"].exp() * functional.softplus(a[s, i] + x["dt_bias"])
            state = state * g.exp()[:, None, None]
            missing = v.view(hv, dv) - torch.einsum("hkv,hk->hv", state, k)
            state = state + torch.einsum("h,hk,hv->hkv", b[s, i].sigmoid(), k, missing)
            out[s, i] = torch.einsum("hkv,hk->hv", state, q) * dk**-0.5
            after.append((seen[1:], state))
        certain = int(x["certain"][s])
        write = int(x["state_writes"][s])
        windows[write], states[write] = start if certain == 0 else after[certain - 1]
    unit = out / (out.square().mean(-1, keepdim=True) + EPSILON).sqrt()
    gated = unit * x["norm"] * functional.silu(z.view(out.shape))
    return {
        "out": gated.view(batch * new, -1),
        "conv_state_out": windows,
        "delta_state_out": states,
    }


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(relative_error(found[name].double(), x) for name, x in wanted.items())


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch, new = draw(st.integers(1, 2)), draw(st.integers(1, 9))
    parents = [[-1, *(draw(st.integers(0, i - 1)) for i in range(1, new))] for _ in range(batch)]
    chains = [next((i for i, p in enumerate(above) if p != i - 1), new) for above in parents]
    certain = [draw(st.integers(0, chain)) for chain in chains]
    heads = draw(st.sampled_from([(1, 1), (2, 4), (1, 3)]))
    return make_case(parents, certain, heads, draw(st.integers(2, 5)), draw(st.integers(0, 99)))


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@settings(max_examples=20)
@given(case=cases())
def test_every_row_follows_its_path(run: Run, case: Case) -> None:
    assert worst(computed(run, case), expected(case)) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_long_chains_go_through_the_state(run: Run) -> None:
    new = 2 * TREE_ROWS + 7
    parents = [list(range(-1, new - 1))] * 2
    case = make_case(parents, [new, TREE_ROWS + 3], (2, 4), 4, 0)
    wanted = expected(case)
    found = computed(run, case)
    assert worst(found, wanted) < FLOAT32_TOLERANCE
    assert found["delta_rows"].shape[1] == found["conv_rows"].shape[1] == TREE_ROWS


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_entries_that_nobody_writes_stay(run: Run) -> None:
    case = make_case([[-1, 0, 0]], [1], (2, 4), 4, 3)
    found = computed(run, case)
    write = int(case.inputs["state_writes"][0])
    for name in ("conv_state", "delta_state"):
        kept = [e for e in range(ENTRIES) if e != write]
        assert torch.equal(found[f"{name}_out"][kept], case.inputs[name][kept])


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("path", [(0,), (0, 1), (0, 2, 4), (0, 1, 3)])
def test_replay_of_a_path_is_the_state_after_it(run: Run, path: tuple[int, ...]) -> None:
    parents = [-1, 0, 0, 1, 2, 1]
    case = make_case([parents], [1], (2, 4), 4, 5)
    found = computed(run, case)
    write = int(case.inputs["state_writes"][0])
    rows, counts = torch.tensor([list(path[1:]) or [0]]), torch.tensor([len(path) - 1])
    window, state = (
        replay(found[f"{name}_state_out"][[write]], found[f"{name}_rows"][[[0]], rows], counts)
        for replay, name in ((replay_window, "conv"), (replay_delta, "delta"))
    )
    chain = list(path)
    alone = take(case, chain)
    wanted = expected(alone)
    assert relative_error(state[0].double(), wanted["delta_state_out"][write]) < FLOAT32_TOLERANCE
    assert relative_error(window[0].double(), wanted["conv_state_out"][write]) < FLOAT32_TOLERANCE


def take(case: Case, rows: list[int]) -> Case:
    """The first sequence's ``rows`` as a chain that stays."""
    inputs = dict(case.inputs)
    for name in ("qkvz", "ba"):
        inputs[name] = inputs[name][rows]
    inputs["certain"] = torch.tensor([len(rows)], dtype=torch.int32)
    inputs["tree_mask"] = torch.ones(len(rows), len(rows), dtype=torch.bool).tril()[None]
    return Case(inputs, [list(range(-1, len(rows) - 1))], case.heads)


FAULTS: dict[str, Callable[[Case], Case]] = {
    "convolution off by a row": lambda c: changed(
        c, conv_weight=c.inputs["conv_weight"].roll(1, dims=2)
    ),
    "state of another sequence": lambda c: changed(c, state_reads=c.inputs["state_reads"].roll(1)),
    "a row too few stays": lambda c: changed(c, certain=c.inputs["certain"] - 1),
    "a row too many stays": lambda c: changed(c, certain=c.inputs["certain"] + 1),
    "decay forgotten": lambda c: changed(c, a_log=c.inputs["a_log"] - 100),
    "sibling seen": lambda c: changed(c, tree_mask=torch.ones_like(c.inputs["tree_mask"]).tril()),
}


def changed(case: Case, **inputs: Tensor) -> Case:
    return replace(case, inputs={**case.inputs, **inputs})


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault: str) -> None:
    case = make_case([[-1, 0, 0, 1], [-1, 0, 1, 0]], [1, 2], (2, 4), 4, 7)
    found = computed(by_torch, FAULTS[fault](case))
    assert worst(found, expected(case)) > FAULT_FLOOR * FLOAT32_TOLERANCE
