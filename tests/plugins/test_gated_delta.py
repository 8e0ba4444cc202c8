"""GatedDelta's kernels, and those that commit accepted rows, against a float64 recurrence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.graph.ops.gated_delta_case import (
    FAULTS,
    Case,
    chain,
    changed,
    expected,
    make_case,
    take,
)
from trt_eagle3.engine import capi
from trt_eagle3.graph.ops import OPS
from trt_eagle3.parity.metrics import relative_error

pytestmark = pytest.mark.gpu

# Largest difference over the largest value. The reference rounds where the kernel does; what is
# left is float32 sums in another order and, in 16 bits, values that round to the other side.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
FAULT_FLOOR = 4  # times the tolerance of float32
# Hk, Hv; Dk, Dv; W: the checkpoints', and sizes that leave lanes, warps and blocks without work
GEOMETRIES = (
    ((2, 4), (128, 128), 4),
    ((1, 3), (64, 36), 2),
    ((1, 1), (4, 4), 5),
    ((2, 2), (100, 68), 3),
)
BUSHY = [-1, 0, 0, 1, 1, 2, 5, 3, 3]
BLOCKS = (0, 1, 2, 4)  # of a head


def tree(count: int, seed: int) -> list[int]:
    """Parents of a random tree that begins with a run of two."""
    g = torch.Generator().manual_seed(seed)
    return [-1, 0, *(int(torch.randint(i, (1,), generator=g)) for i in range(2, count))][:count]


def by_kernel(case: Case, device: torch.device, **settings: int) -> dict[str, Tensor]:
    """What the kernel writes, over NaN, of copies of the inputs; on the CPU."""
    inputs = [x.to(device, copy=True) for x in case.inputs.values()]
    torch.use_deterministic_algorithms(mode=True)  # fills what is not written yet
    try:
        found = capi.gated_delta(*inputs, **case.attributes, **settings)
    finally:
        torch.use_deterministic_algorithms(mode=False)
    return dict(zip(OPS["GatedDelta"].outputs[""], (x.cpu() for x in found), strict=True))


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, str]:
    """Largest relative error, and of what."""
    return max((relative_error(found[n].double(), x), n) for n, x in wanted.items())


def check(case: Case, device: torch.device, **settings: int) -> None:
    error, name = worst(by_kernel(case, device, **settings), expected(case))
    dtype = case.inputs["qkvz"].dtype
    assert error < TOLERANCE[dtype], f"{name}: {error:.2e}, {dtype}, {settings}"


def check_captured(first: Case, second: Case, device: torch.device) -> None:
    """A launch captured over the inputs of ``first`` gives, with those of ``second`` in the same
    buffers, what ``second`` gives alone.
    """
    inputs = [x.to(device, copy=True) for x in first.inputs.values()]
    capi.gated_delta(*inputs, **first.attributes)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = capi.gated_delta(*inputs, **first.attributes)
    for static, x in zip(inputs, second.inputs.values(), strict=True):
        static.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    alone = by_kernel(second, device)
    for name, x in zip(alone, found, strict=True):
        assert torch.equal(x.cpu(), alone[name]), name


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "dims", "width"), GEOMETRIES)
def test_trees_follow_their_paths(
    heads: tuple[int, int],
    dims: tuple[int, int],
    width: int,
    dtype: torch.dtype,
    cuda: torch.device,
) -> None:
    for count in (1, 2, 6, 9, 33, 64):
        parents = [tree(count, seed) for seed in (1, 2)]
        certain = [min(count, 2), 1]
        check(make_case(parents, certain, heads, width, count, dims, dtype), cuda)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("count", [1, 5, 31, 64, 65, 128, 150])
def test_chains_go_through_the_state(count: int, dtype: torch.dtype, cuda: torch.device) -> None:
    for certain in ([count, 0], [count // 2 + 1, 1]):
        case = make_case([chain(count)] * 2, certain, (2, 4), 4, count, (128, 128), dtype)
        check(case, cuda)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("rows", [1, 7, 32, 64])
def test_blocks_and_chunks_change_nothing(blocks: int, rows: int, cuda: torch.device) -> None:
    case = make_case([chain(97)] * 2, [97, 40], (1, 2), 4, 3, (128, 128))
    check(case, cuda, blocks_per_head=blocks, chunk_rows=rows)


def test_masked_tail_begins_with_columns_that_are_not_of_the_new_rows(cuda: torch.device) -> None:
    case = make_case([BUSHY], [1], (1, 2), 4, 0)
    mask = torch.ones(1, len(BUSHY), len(BUSHY) + 3, dtype=torch.bool)
    mask[..., 3:] = case.inputs["tree_mask"]
    if case.inputs["delta_state"].shape[-1] % 4:
        case = make_case([BUSHY], [1], (1, 2), 4, 0, (8, 12))
    check(changed(case, tree_mask=mask), cuda)


def test_entries_that_nobody_writes_stay(cuda: torch.device) -> None:
    case = make_case([BUSHY] * 2, [1, 1], (2, 4), 4, 3, (128, 128), torch.bfloat16)
    found = by_kernel(case, cuda)
    for name in ("conv_state", "delta_state"):
        kept = [e for e in range(5) if e not in case.inputs["state_writes"].tolist()]
        assert torch.equal(found[f"{name}_out"][kept], case.inputs[name][kept])


def test_same_inputs_give_the_same_bits(cuda: torch.device) -> None:
    case = make_case([tree(17, 0)] * 2, [1, 2], (2, 4), 4, 3, (128, 128), torch.bfloat16)
    first, second = by_kernel(case, cuda), by_kernel(case, cuda)
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_padding_may_share_the_entry_that_it_writes(cuda: torch.device) -> None:
    """Two sequences of padding write one entry; the third is as it is alone."""
    case = make_case([BUSHY] * 3, [1, 1, 1], (1, 2), 4, 5, (128, 128), entries=8)
    writes = case.inputs["state_writes"].clone()
    writes[1] = writes[0]
    found, wanted = by_kernel(changed(case, state_writes=writes), cuda), expected(case)
    entry = int(writes[2])
    for name in ("conv_state_out", "delta_state_out"):
        assert relative_error(found[name][entry].double(), wanted[name][entry]) < 1e-5
    assert relative_error(found["out"].double(), wanted["out"]) < 1e-5


KERNEL_FAULTS: dict[str, Callable[[Case], Case]] = {
    **FAULTS,
    "heads of the norm swapped": lambda c: changed(c, norm=c.inputs["norm"].roll(64)),
}


@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_fault_is_caught(fault: str, cuda: torch.device) -> None:
    case = make_case([[-1, 0, 0, 1], [-1, 0, 1, 0]], [1, 2], (2, 4), 4, 7, (128, 128))
    error, _ = worst(by_kernel(KERNEL_FAULTS[fault](case), cuda), expected(case))
    assert error > FAULT_FLOOR * TOLERANCE[torch.float32]


def committed(
    found: dict[str, Tensor], entries: Tensor, path: Tensor, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Both states of two layers alike after ``commit_window`` and ``commit_delta``."""
    both: list[Tensor] = []
    for kind, commit in (("conv", capi.commit_window), ("delta", capi.commit_delta)):
        state, rows = (
            torch.stack([found[f"{kind}_{name}"]] * 2).to(device) for name in ("state_out", "rows")
        )
        commit(state, rows, entries.to(device), path.to(device))
        assert torch.equal(state[0], state[1])
        both.append(state[1].cpu())
    return both[0], both[1]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "dims", "width"), GEOMETRIES)
@pytest.mark.parametrize("path", [(0,), (0, 1), (0, 2, 5, 6), (0, 1, 3, 7)])
def test_commit_is_the_state_after_the_path(
    path: tuple[int, ...],
    heads: tuple[int, int],
    dims: tuple[int, int],
    width: int,
    dtype: torch.dtype,
    cuda: torch.device,
) -> None:
    case = make_case([BUSHY] * 2, [1, 1], heads, width, 5, dims, dtype)
    found = by_kernel(case, cuda)
    moves = torch.full((2, 5), -1, dtype=torch.int32)
    moves[0, : len(path) - 1] = torch.tensor(path[1:], dtype=torch.int32)
    window, state = committed(found, case.inputs["state_writes"], moves, cuda)
    wanted = expected(take(case, list(path)))
    write = int(case.inputs["state_writes"][0])
    assert (
        relative_error(state[write].double(), wanted["delta_state_out"][write])
        < 2 * (TOLERANCE[dtype])
    )
    assert torch.equal(window[write].double(), wanted["conv_state_out"][write])
    others = [e for e in range(5) if e != write]
    assert torch.equal(state[others], found["delta_state_out"][others])
    assert torch.equal(window[others], found["conv_state_out"][others])


@pytest.mark.parametrize("wrong", [(2, 5), (2, 5, 6, 7), (1, 5, 6), (5, 2, 6)])
def test_commit_of_other_rows_is_caught(wrong: tuple[int, ...], cuda: torch.device) -> None:
    case = make_case([BUSHY], [1], (2, 4), 4, 5, (128, 128))
    moves = torch.tensor([[*wrong, -1]], dtype=torch.int32)
    window, state = committed(by_kernel(case, cuda), case.inputs["state_writes"], moves, cuda)
    wanted = expected(take(case, [0, 2, 5, 6]))
    write = int(case.inputs["state_writes"][0])
    error = relative_error(state[write].double(), wanted["delta_state_out"][write])
    assert error > FAULT_FLOOR * TOLERANCE[torch.float32]
    assert not torch.equal(window[write].double(), wanted["conv_state_out"][write])


def test_captured_launches_follow_their_inputs(cuda: torch.device) -> None:
    """A replay reads the entries, counts and rows that stand in the buffers then."""
    first, second = (
        make_case([tree(6, seed)] * 2, certain, (2, 4), 4, seed, (128, 128), torch.bfloat16)
        for seed, certain in ((1, [1, 2]), (2, [2, 1]))
    )
    check_captured(first, second, cuda)


@pytest.mark.parametrize(("dims", "width"), [((132, 128), 4), ((128, 6), 4), ((8, 8), 9)])
def test_sizes_without_a_kernel_are_refused(
    dims: tuple[int, int], width: int, cuda: torch.device
) -> None:
    case = make_case([[-1, 0]], [1], (1, 1), width, 0, dims)
    with pytest.raises(NotImplementedError, match="no kernel for these arguments"):
        by_kernel(case, cuda)


def test_session_falls_back_where_there_is_no_kernel(cuda: torch.device) -> None:
    from trt_eagle3.engine.torch.recurrent import gated_delta

    case = make_case([BUSHY], [1], (1, 1), 4, 0, (6, 5))
    inputs: list[Any] = [x.to(cuda, copy=True) for x in case.inputs.values()]
    names = OPS["GatedDelta"].outputs[""]
    found = dict(zip(names, gated_delta(*inputs, **case.attributes), strict=True))
    error, name = worst({n: x.cpu() for n, x in found.items()}, expected(case))
    assert error < 1e-4, name  # stock products of float32 may be of fewer bits
