"""One forward over prompts and sequences that decode: what each says in a forward of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tiny import ROOT, build_tiny, build_tiny_moe
from trt_eagle3.decode.speculation.verify import LogitsForm
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine import capi
from trt_eagle3.engine.torch import session as session_module
from trt_eagle3.engine.torch.session import TorchSession

# float32 sums of other shapes, of the largest value; in an FP8 cache one may be rounded otherwise
RTOL, RTOL_FP8 = 3e-5, 1e-3
PAGE_SIZE, NUM_PAGES = 16, 12
PROMPTS, STEPS = (21, 40), (1, 1, 1)


def open_target(
    bundle: Path,
    caches: dict[str, Tensor],
    *intermediates: str,
    device: str = "cpu",
    graph: str = "target",
) -> TorchSession:
    """The tiny target, or its draft, over a copy of ``caches``; those it lacks are drawn."""
    session = TorchSession(bundle / graph / "model.onnx", bundle, intermediates, device)
    draw = torch.Generator().manual_seed(0)
    for state in session.states:
        shape = (NUM_PAGES * PAGE_SIZE, *state.shape)
        drawn = torch.randn(shape, generator=draw).to(dtype_named(state.dtype).torch)
        if state.dtype == "uint8":
            drawn = torch.randint(0, 120, shape, generator=draw).to(torch.uint8)
        kept = caches.setdefault(state.name, drawn)
        tensor = kept.clone().to(device)
        session.bind(state.name, tensor)
        session.bind(state.output_name, tensor)
        caches[f"of {id(session)} {state.name}"] = tensor
    return session


def part(
    session: TorchSession,
    counts: tuple[int, ...],
    past: tuple[int, ...],
    pages: list[list[int]],
    rows: list[list[int]],
) -> dict[str, Tensor]:
    """Inputs of sequences with ``counts`` new tokens each, padded, over ``pages``."""
    draw, width, batch = torch.Generator().manual_seed(sum(past)), max(counts), len(counts)
    shapes = {name: i.shape for name, i in session._inputs.items()}
    hidden = shapes["inputs_embeds"][2]
    levels = shapes["deepstack_embeds"][0]
    assert isinstance(hidden, int)
    assert isinstance(levels, int)
    return {
        "inputs_embeds": torch.randn(batch, width, hidden, generator=draw),
        "deepstack_embeds": torch.randn(levels, batch, width, hidden, generator=draw),
        "position_ids": torch.randint(0, 500, (3, batch, width), generator=draw).int(),
        "past_lengths": torch.tensor(past, dtype=torch.int32),
        "query_lengths": torch.tensor(counts, dtype=torch.int32),
        "page_table": torch.tensor(pages, dtype=torch.int32),
        "tree_mask": torch.ones(width, width, dtype=torch.bool).tril().expand(batch, -1, -1),
        "logit_rows": torch.tensor(rows, dtype=torch.int32),
    }


def parts(session: TorchSession) -> list[dict[str, Tensor]]:
    """Chunks of two prompts, one of them padded, and a row of each of three that decode."""
    return [
        part(session, PROMPTS, (0, 7), [[1, 2, 3], [4, 5, 6]], [[n - 1] for n in PROMPTS]),
        part(session, STEPS, (3, 15, 30), [[7, 0], [8, 9], [10, 11]], [[0]] * 3),
    ]


def close(got: Tensor, want: Tensor, rtol: float = RTOL_FP8) -> bool:
    return bool((got - want).abs().max() <= rtol * want.abs().max())


def count_replays(patch: pytest.MonkeyPatch) -> list[torch.cuda.CUDAGraph]:
    """The graphs that are replayed from now on."""
    found: list[torch.cuda.CUDAGraph] = []
    replay = torch.cuda.CUDAGraph.replay
    patch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: (found.append(graph), replay(graph))
    )
    return found


@pytest.fixture(scope="module", params=["float32", "fp8", "mixture"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = {"backend": "torch", **({"kv_dtype": "fp8"} if request.param == "fp8" else {})}
    build = build_tiny_moe if request.param == "mixture" else build_tiny
    return build(tmp_path_factory.mktemp("engines"), engine=engine)


@pytest.mark.parametrize(
    ("device", "captured"),
    [
        ("cpu", False),
        pytest.param("cuda", False, marks=pytest.mark.gpu),
        pytest.param("cuda", True, marks=pytest.mark.gpu),
    ],
    ids=["cpu", "cuda", "captured"],
)
@pytest.mark.parametrize("min_unread", [1, 10_000], ids=["wanted rows", "all rows"])
def test_parts_say_what_each_says_alone(
    bundle: Path, min_unread: int, device: str, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the last layer computed for the rows that are read, or for all."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setitem(session_module._MIN_UNREAD_ROWS, device, min_unread)
    caches: dict[str, Tensor] = {}
    alone, mixed = open_target(bundle, caches), open_target(bundle, caches, device=device)
    rtol = RTOL if alone.states[0].dtype == "float32" else RTOL_FP8
    assert mixed.capabilities.mixes
    prompts, steps = parts(alone)
    if captured:
        if not capi.available():
            pytest.skip("the kernel library is not built: make plugins")
        assert mixed.capture_rows(512, 0, lambda: True) == 12
        assert mixed._target_pieces is not None
        count, replayed = len(mixed._target_pieces.split.pieces), count_replays(monkeypatch)
    expected = [
        alone.run_prompt(prompts),
        alone.run_reduced(steps, {"logits": LogitsForm.TOKENS.reduction}),
    ]
    found = mixed.run_mixed([prompts, steps], [None, LogitsForm.TOKENS.reduction])
    assert [set(f) for f in found] == [set(e) for e in expected]
    assert not captured or len(replayed) == count
    found = [{name: x.cpu() for name, x in f.items()} for f in found]
    assert close(found[0]["logits"], expected[0]["logits"], rtol)
    assert found[0]["logits"].dtype == torch.float32
    assert torch.equal(found[1]["logits"], expected[1]["logits"])
    for counts, got, want in zip((PROMPTS, STEPS), found, expected, strict=True):
        for i, count in enumerate(counts):  # padding means nothing
            rows = (x["aux_hidden_states"][i, :count] for x in (got, want))
            assert close(*rows, rtol)
    for state in alone.states:
        written = (caches[f"of {id(s)} {state.name}"][PAGE_SIZE:] for s in (mixed, alone))
        got, want = (x.cpu().float() for x in written)
        assert not torch.equal(want, caches[state.name][PAGE_SIZE:].float())
        assert (
            close(got, want, rtol)
            if state.dtype != "uint8"
            else (got != want).float().mean() < 1e-3
        )


def test_order_and_number_of_parts_are_anything(bundle: Path) -> None:
    caches: dict[str, Tensor] = {}
    alone, mixed = open_target(bundle, caches), open_target(bundle, caches)
    prompts, steps = parts(alone)
    expected = [alone.run(x)["logits"] for x in (steps, prompts)]
    found = mixed.run_mixed([steps, prompts], [None, None])
    assert all(close(x["logits"], want) for x, want in zip(found, expected, strict=True))
    caches.clear()
    (only,) = open_target(bundle, caches).run_mixed([steps], [None])
    assert close(only["logits"], open_target(bundle, caches).run(steps)["logits"])


def test_graph_of_which_more_is_asked_or_that_is_no_target_does_not_mix(bundle: Path) -> None:
    assert not open_target(bundle, {}, "layers.0.output").capabilities.mixes
    for graph in ("draft", "fuse", "vision"):
        assert not TorchSession(bundle / graph / "model.onnx", bundle).capabilities.mixes


def test_target_with_recurrent_states_does_not_mix(tmp_path: Path) -> None:
    """Whose short convolutions and gated deltas want rows by sequence."""
    hybrid = build_tiny(
        tmp_path,
        target=ROOT / "examples/tiny_hybrid/target",
        draft=None,
        engine={"backend": "torch"},
    )
    assert not TorchSession(hybrid / "target" / "model.onnx", hybrid).capabilities.mixes
