"""Graphs cut for the ranks of several devices: together they compute what the whole graph does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor

from tests.ranks import ThreadCollectives, on_each_rank
from tests.tiny import MIXTURE, ROOT, build_tiny
from trt_eagle3.engine.torch.session import TorchSession
from trt_eagle3.graph import shard
from trt_eagle3.graph.weights import external_weights
from trt_eagle3.sharding import Range, Shard

HYBRID = ROOT / "examples/tiny_hybrid"
PAIRS = {"dense": None, "experts": MIXTURE, "gated delta": HYBRID}
NUM_ROWS, BATCH = 7, 2
TOLERANCE = 1e-4  # of logits up to 18, summed in another order


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, folder in PAIRS.items():
        pair = {} if folder is None else {"target": folder / "target", "draft": folder / "draft"}
        made[name] = build_tiny(
            tmp_path_factory.mktemp("pair"), engine={"backend": "torch"}, **pair
        )
    return made


def run(bundle: Path, collectives: ThreadCollectives | None = None) -> dict[str, Tensor]:
    """A prompt's rows through the target, from empty states."""
    file = bundle / "target/model.onnx"
    session = TorchSession(file, bundle, collectives=collectives)
    numbers = torch.Generator().manual_seed(1)
    rows = torch.arange(NUM_ROWS, dtype=torch.int32)
    known = {
        "position_ids": rows.expand(3, BATCH, -1),
        "past_lengths": torch.zeros(BATCH, dtype=torch.int32),
        "query_lengths": torch.full((BATCH,), NUM_ROWS, dtype=torch.int32),
        "page_table": torch.tensor([[1], [2]], dtype=torch.int32),
        "tree_mask": torch.ones(BATCH, NUM_ROWS, NUM_ROWS, dtype=torch.bool).tril(),
        "logit_rows": rows.expand(BATCH, -1),
        "state_reads": torch.zeros(BATCH, dtype=torch.int32),
        "state_writes": torch.tensor([2, 3], dtype=torch.int32),
        "certain": torch.full((BATCH,), NUM_ROWS, dtype=torch.int32),
    }
    states = {s.name: torch.zeros(48 if s.kind == "paged" else 4, *s.shape) for s in session.states}
    inputs = {}
    for name, needed in session._inputs.items():
        if name in states:
            continue
        sizes = {"batch": BATCH, "seq": NUM_ROWS}
        shape = [sizes.get(str(size), size) for size in needed.shape]
        made = known.get(name)
        inputs[name] = torch.randn(*shape, generator=numbers) if made is None else made
    return session.run({**inputs, **states})


def errors(bundle: Path, size: int) -> list[float]:
    """The largest error of each rank's logits and aux hidden states."""
    expected = run(bundle)
    found = on_each_rank(size, lambda collectives: run(bundle, collectives))
    names = ("logits", "aux_hidden_states")
    return [max(float((out[n] - expected[n]).abs().max()) for n in names) for out in found]


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("name", PAIRS)
def test_ranks_together_compute_the_whole_graph(
    bundles: dict[str, Path], name: str, size: int
) -> None:
    assert max(errors(bundles[name], size)) < TOLERANCE


def test_all_ranks_get_the_same_bits(bundles: dict[str, Path]) -> None:
    first, *others = on_each_rank(4, lambda collectives: run(bundles["dense"], collectives))
    assert all(torch.equal(first["logits"], other["logits"]) for other in others)


def test_layer_has_two_sums_with_a_shared_expert_too(bundles: dict[str, Path]) -> None:
    for name, num_layers in (("dense", 8), ("experts", 6), ("gated delta", 8)):

        def count(collectives: ThreadCollectives, name: str = name) -> int:
            run(bundles[name], collectives)
            return collectives.num_sums

        assert on_each_rank(2, count) == [2 * num_layers] * 2


def test_scales_of_an_fp8_cache_are_those_of_the_ranks_heads(tmp_path: Path) -> None:
    bundle = build_tiny(tmp_path, engine={"backend": "torch", "kv_dtype": "fp8"})
    model = onnx.load(bundle / "target/model.onnx", load_external_data=False)
    names = [n.input[9] for n in model.graph.node if n.op_type == "TreeAttention"]
    by_head = np.array([[1, 2], [3, 4]], dtype=np.float32)
    for proto in model.graph.initializer:
        if proto.name in names:
            proto.CopyFrom(numpy_helper.from_array(by_head, proto.name))
    for rank in range(2):
        made, _ = shard.shard_graph(model, external_weights(model), Shard(rank, 2))
        own = {p.name: p for p in made.graph.initializer}
        nodes = [node for node in made.graph.node if node.op_type == "TreeAttention"]
        found = [numpy_helper.to_array(own[node.input[9]]) for node in nodes]
        assert len(found) == len(names)
        assert all(np.array_equal(f, by_head[:, rank : rank + 1]) for f in found)


def _no_sum(collectives: ThreadCollectives, x: Tensor) -> Tensor:
    return collectives._exchanged(x)[collectives.shard.rank]


def _sum_twice(collectives: ThreadCollectives, x: Tensor) -> Tensor:
    return 2 * torch.stack(collectives._exchanged(x)).sum(0)


def _swapped(right: Callable[..., None]) -> Callable[..., None]:
    def swapped(sharding: shard._Sharding, product: object, columns: Range) -> None:
        width = columns[1] - columns[0]
        other = 1 - sharding._shard.rank
        right(sharding, product, (other * width, (other + 1) * width))

    return swapped


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a sum is missing": lambda m: m.setattr(ThreadCollectives, "all_reduce", _no_sum),
    "a sum is taken twice": lambda m: m.setattr(ThreadCollectives, "all_reduce", _sum_twice),
    "a shard is another rank's": lambda m: m.setattr(
        shard._Sharding, "_take_inputs", _swapped(shard._Sharding._take_inputs)
    ),
    "logits are in another order": lambda m: m.setattr(
        ThreadCollectives,
        "all_gather",
        lambda collectives, x: torch.cat(collectives._exchanged(x)[::-1], dim=-1),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_changes_what_ranks_compute(
    bundles: dict[str, Path], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[fault](monkeypatch)
    assert min(errors(bundles["dense"], 2)) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("size", "heads", "expected"),
    [
        (2, (8, 2), [((0, 4), (0, 1)), ((4, 8), (1, 2))]),
        (4, (8, 2), [((0, 2), (0, 1)), ((2, 4), (0, 1)), ((4, 6), (1, 2)), ((6, 8), (1, 2))]),
        (2, (6, 3), [None, None]),
        (4, (6, 2), [None] * 4),
    ],
)
def test_heads_of_ranks(
    size: int, heads: tuple[int, int], expected: list[tuple[Range, Range] | None]
) -> None:
    assert [Shard(rank, size).heads(*heads) for rank in range(size)] == expected


@pytest.mark.parametrize(
    ("count", "block", "expected"),
    [
        (96, 1, [(0, 24), (24, 48), (48, 72), (72, 96)]),
        (96, 16, [(0, 16), (16, 48), (48, 64), (64, 96)]),
        (96, 32, [(0, 24), (24, 48), (48, 72), (72, 96)]),  # fewer blocks than ranks
        (3, 1, [None] * 4),
    ],
)
def test_widths_of_ranks_begin_at_blocks(
    count: int, block: int, expected: list[Range | None]
) -> None:
    assert [Shard(rank, 4).width(count, block) for rank in range(4)] == expected
