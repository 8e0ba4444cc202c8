"""A draft's prompts through two graphs: what the same rows say node by node."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engine.torch.capture.test_target_pieces import RTOL, RTOL_16, WEIGHTS, Pieces, of_types
from tests.engine.torch.test_mixed import PAGE_SIZE, close, count_replays, open_target
from tests.tiny import build_tiny
from trt_eagle3.engine import capi
from trt_eagle3.engine.runtime.buckets import PICKED_ROWS, ROWS
from trt_eagle3.engine.torch import session as session_module
from trt_eagle3.engine.torch.session import TorchSession

TABLE_LEN = 4

open_draft = partial(open_target, graph="draft")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("engines"), engine={"backend": "torch"})


def open_captured(
    bundle: Path, caches: dict[str, Tensor], recorder: Pieces | None = None, most: int = 128
) -> TorchSession:
    session = open_draft(bundle, caches)
    graphs = session._new_draft_pieces(recorder or Pieces(), TABLE_LEN)
    assert graphs is not None
    graphs.capture(most, lambda: True)
    session._draft_pieces = graphs
    return session


def prompts(
    session: TorchSession, counts: tuple[int, ...], past: tuple[int, ...], pages: list[list[int]]
) -> dict[str, Tensor]:
    """Segments with ``counts`` rows each, of which the last ones are read, over ``pages``."""
    draw, width, batch = torch.Generator().manual_seed(sum(counts)), max(counts), len(counts)
    hidden = session._inputs["features"].shape[2]
    assert isinstance(hidden, int)
    return {
        "inputs_embeds": torch.randn(batch, width, hidden, generator=draw),
        "features": torch.randn(batch, width, hidden, generator=draw),
        "position_ids": torch.randint(0, 500, (3, batch, width), generator=draw).int(),
        "past_lengths": torch.tensor(past, dtype=torch.int32),
        "query_lengths": torch.tensor(counts, dtype=torch.int32),
        "page_table": torch.tensor([p + [0] * (TABLE_LEN - len(p)) for p in pages]).int(),
        "tree_mask": torch.ones(width, width, dtype=torch.bool).tril().expand(batch, -1, -1),
        "logit_rows": torch.tensor([[n - 1] for n in counts], dtype=torch.int32),
    }


def asked(session: TorchSession) -> list[dict[str, Tensor]]:
    """Two prompts, then three, one of which goes on; the first two segments of one; one more."""
    return [
        prompts(session, (21, 40), (0, 7), [[1, 2], [4, 5, 6]]),
        prompts(session, (15, 9, 12), (0, 21, 0), [[7], [1, 2], [8]]),
        prompts(session, (30, 17), (0, 30), [[9, 10, 11], [9, 10, 11]]),
        prompts(session, (64,), (0,), [[3, 1, 2, 11]]),
    ]


def differences(captured: TorchSession, plain: TorchSession, caches: dict[str, Tensor]) -> set[str]:
    """What the two say otherwise, page 0 of the caches, which takes padding, left out."""
    found = set()
    for inputs in asked(plain):
        got, want = captured.run_prompt(inputs), plain.run_prompt(inputs)
        assert got.keys() == want.keys()
        for name in want:
            assert got[name].shape == want[name].shape
            if not close(got[name], want[name], RTOL):
                found.add(name)
    for state in plain.states:
        rows = [caches[f"of {id(s)} {state.name}"][PAGE_SIZE:] for s in (captured, plain)]
        if not close(rows[0], rows[1], RTOL):
            found.add(state.name)
    return found


def test_two_graphs_say_what_the_nodes_say(bundle: Path) -> None:
    caches: dict[str, Tensor] = {}
    plain, recorder = open_draft(bundle, caches), Pieces()
    captured = open_captured(bundle, caches, recorder)
    graphs = captured._draft_pieces
    assert graphs is not None
    before = recorder.replayed
    assert differences(captured, plain, caches) == set()
    # one of few rows is captured whole
    assert recorder.replayed - before == 2 * (len(asked(plain)) - 1)


@pytest.mark.parametrize(("forgotten", "missing"), [(1, "k_cache.0"), (2, "logits")])
def test_a_graph_that_is_left_out_is_noticed(bundle: Path, forgotten: int, missing: str) -> None:
    caches: dict[str, Tensor] = {}
    plain = open_draft(bundle, caches)
    captured = open_captured(bundle, caches, Pieces(forgotten))
    assert missing in differences(captured, plain, caches)


def test_rows_of_padding_change_nobodys_pages(bundle: Path) -> None:
    caches: dict[str, Tensor] = {}
    captured = open_captured(bundle, caches)
    captured.run_prompt(prompts(captured, (5, 20), (3, 0), [[4], [5, 6]]))
    for state in captured.states:
        kept, found = caches[state.name], caches[f"of {id(captured)} {state.name}"]
        written = [*range(4 * PAGE_SIZE + 3, 4 * PAGE_SIZE + 8)]
        written += range(5 * PAGE_SIZE, 5 * PAGE_SIZE + 20)
        same = [i for i in range(PAGE_SIZE, len(kept)) if i not in written]
        assert torch.equal(found[same], kept[same])
        assert not torch.equal(found[written], kept[written])


@pytest.mark.parametrize("why", ["rows", "sequences", "table", "not captured", "on the device"])
def test_what_no_graph_holds_runs_node_by_node(bundle: Path, why: str) -> None:
    plain = open_draft(bundle, {})
    captured = open_captured(bundle, {}, most=64)
    graphs = captured._draft_pieces
    assert graphs is not None
    batch = {"rows": 2, "sequences": PICKED_ROWS.limit + 1, "not captured": 3}.get(why, 2)
    width = {"rows": ROWS.limit, "sequences": 1, "not captured": 40}.get(why, 20)
    inputs = prompts(plain, (width,) * batch, (0,) * batch, [[0]] * batch)
    if why == "table":
        inputs["page_table"] = inputs["page_table"][:, :2]
    if why == "on the device":
        inputs["past_lengths"] = inputs["past_lengths"].to("meta")
    assert not graphs.fit(inputs)
    assert graphs.fit(prompts(plain, (20, 20), (0, 0), [[1, 2], [3, 4]]))


def test_capture_ends_where_there_is_no_room(bundle: Path) -> None:
    session = open_draft(bundle, {})
    graphs = session._new_draft_pieces(Pieces(), TABLE_LEN)
    assert graphs is not None
    room = iter([True, True, False])
    assert graphs.capture(256, lambda: next(room)) == 2
    assert not graphs.fit(prompts(session, (20, 20), (0, 0), [[1, 2], [3, 4]]))
    assert graphs.fit(prompts(session, (100, 120), (0, 0), [[0], [0]]))


def test_caches_that_are_bound_anew_forget_the_graphs(bundle: Path) -> None:
    captured = open_captured(bundle, {})
    state = captured.states[0]
    captured.bind(state.name, captured._bound[state.name].clone())
    assert captured._draft_pieces is None


def test_a_target_has_none(bundle: Path) -> None:
    session = open_target(bundle, {})
    assert session._new_draft_pieces(Pieces(), TABLE_LEN) is None


@pytest.mark.gpu
@pytest.mark.parametrize("weights", WEIGHTS)
def test_graphs_on_cuda_say_what_the_nodes_say(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not capi.available():
        pytest.skip("no CUDA device, or the kernel library is not built: make plugins")
    # of fewer rows than segments have, attention would write while others of the prompt read
    monkeypatch.setitem(session_module._MIN_UNREAD_ROWS, "cuda", 1)
    engine = {"backend": "torch", "device": "cuda", "dtype": "bfloat16"}
    bundle, caches = build_tiny(tmp_path, engine=engine | WEIGHTS[weights]), dict[str, Tensor]()
    nodes, graphs = (open_draft(bundle, caches, device="cuda") for _ in range(2))
    assert graphs.capture_rows(512, TABLE_LEN, lambda: True) == 12
    replayed = count_replays(monkeypatch)
    for inputs in asked(nodes)[:3]:
        typed = of_types(nodes, inputs)
        found, expected = graphs.run_prompt(typed), nodes.run_prompt(typed)
        for name, want in expected.items():
            assert close(found[name].float(), want.float(), RTOL_16), name
    assert len(replayed) == 6
    for state in nodes.states:
        got, want = (caches[f"of {id(s)} {state.name}"][PAGE_SIZE:] for s in (graphs, nodes))
        assert close(got.float(), want.float(), RTOL_16)
