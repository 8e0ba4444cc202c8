"""Forwards captured in pieces: what the same rows say node by node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.engine.torch.test_mixed import close, open_target, part, parts
from tests.tiny import build_tiny, build_tiny_moe
from trt_eagle3.decode.speculation.verify import LogitsForm
from trt_eagle3.engine import capi
from trt_eagle3.engine.runtime.buckets import CAPTURED_AT_RUN, ROWS
from trt_eagle3.engine.torch import session as session_module
from trt_eagle3.engine.torch.program import Values
from trt_eagle3.engine.torch.session import TorchSession

RTOL = 3e-5  # of the largest value: float32 sums of other shapes
RTOL_16 = 3e-2  # likewise in bfloat16, whose rounding is 4e-3, over eight layers


class Piece:
    """Stands for a CUDA graph: runs its work again, over the memory that it had."""

    def __init__(self, recorder: Pieces, work: Callable[[], Values], made: Values) -> None:
        self._recorder, self._work, self._made = recorder, work, dict(made)

    def replay(self) -> None:
        self._recorder.replayed += 1
        if self._recorder.forgets == self._recorder.replayed:
            return
        for name, value in self._work().items():
            made = self._made[name]
            if isinstance(made, Tensor) and made.data_ptr() != value.data_ptr():
                made.copy_(value)


class Pieces:
    """Records on the CPU, as ``PieceRecorder`` does on CUDA; ``forgets``: which replay is left
    out.
    """

    def __init__(self, forgets: int | None = None) -> None:
        self.recorded = self.replayed = 0
        self.forgets = forgets

    @contextmanager
    def recording(self) -> Iterator[None]:
        yield

    def record(self, work: Callable[[], Values]) -> tuple[Piece, Values]:
        self.recorded += 1
        made = work()
        return Piece(self, work, made), made


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("engines"), engine={"backend": "torch"})


def open_captured(
    bundle: Path, caches: dict[str, Tensor], recorder: Pieces | None = None
) -> TorchSession:
    """The tiny target, its forwards captured at once."""
    session = open_target(bundle, caches)
    graphs = session._new_target_pieces(recorder or Pieces())
    graphs.capture(128, lambda: True)
    session._target_pieces = graphs
    return session


def of_types(session: TorchSession, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.to(session._inputs[name].dtype) for name, x in inputs.items()}


def ask(session: TorchSession, asked: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    reduced: list[Any] = [None, LogitsForm.TOKENS.reduction][: len(asked)]
    return session.run_mixed(asked, reduced)


def same(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> bool:
    """Padding of prompts, which means nothing, is the last row of the first one."""
    return all(
        set(got) == set(want)
        and close(got["logits"].float(), want["logits"].float(), RTOL)
        and close(got["aux_hidden_states"][:, :20], want["aux_hidden_states"][:, :20], RTOL)
        for got, want in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("min_unread", [1, 10_000], ids=["wanted rows", "all rows"])
def test_captured_pieces_say_what_the_nodes_say(
    bundle: Path, min_unread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 83 rows, padded to 96: two prompts and three steps; then the steps first, and others."""
    monkeypatch.setitem(session_module._MIN_UNREAD_ROWS, "cpu", min_unread)
    caches: dict[str, Tensor] = {}
    plain, recorder = open_target(bundle, caches), Pieces()
    captured = open_captured(bundle, caches, recorder)
    prompts, steps = parts(plain)
    others = part(plain, (70,), (0,), [[6, 7, 8, 9, 10]], [[69]])
    for asked in ([prompts, steps], [steps], [others, steps], [prompts, steps]):
        before = recorder.replayed
        assert same(ask(captured, asked), ask(plain, asked))
        assert recorder.replayed - before == len(captured._target_pieces.split.pieces)  # type: ignore[union-attr]
    for state in plain.states:
        got, want = (caches[f"of {id(s)} {state.name}"] for s in (captured, plain))
        assert close(got, want, RTOL)


def test_prompts_without_steps_go_through_them_too(bundle: Path) -> None:
    caches: dict[str, Tensor] = {}
    plain, recorder = open_target(bundle, caches), Pieces()
    captured = open_captured(bundle, caches, recorder)
    prompts, _ = parts(plain)
    assert same([captured.run_prompt(prompts)], [plain.run_prompt(prompts)])
    assert recorder.replayed
    short = part(plain, (30,), (0,), [[1, 2]], [[29]])
    before = recorder.replayed
    captured.run_prompt(short)  # one of few rows is captured whole
    assert recorder.replayed == before


@pytest.mark.parametrize("piece", [1, 4, 8])
def test_a_piece_that_is_left_out_is_noticed(bundle: Path, piece: int) -> None:
    caches: dict[str, Tensor] = {}
    plain, captured = open_target(bundle, caches), open_captured(bundle, caches, Pieces(piece))
    asked = parts(plain)
    assert not same(ask(captured, asked), ask(plain, asked))


def test_rows_that_come_again_are_captured_without_being_asked(bundle: Path) -> None:
    session, recorder = open_target(bundle, {}), Pieces()
    session._target_pieces = session._new_target_pieces(recorder)
    asked = parts(session)
    for _ in range(CAPTURED_AT_RUN - 1):
        ask(session, asked)
    assert not recorder.recorded
    ask(session, asked)
    assert recorder.recorded == recorder.replayed == len(session._target_pieces.split.pieces)
    ask(session, asked)
    assert recorder.recorded == recorder.replayed // 2


def test_capture_ends_where_there_is_no_room(bundle: Path) -> None:
    session = open_target(bundle, {})
    graphs = session._new_target_pieces(Pieces())
    room = iter([True, True, False])
    assert graphs.capture(256, lambda: next(room)) == 2
    assert graphs.capture(256, lambda: True) == 8
    for count in (300, ROWS.limit + 1):
        rows = [part(session, (count,), (0,), [[1]], [[0]])]
        assert graphs.run(rows, {}, picked=False) is None


WEIGHTS: dict[str, dict[str, str]] = {
    "bfloat16": {},
    "fp8": {"weights": "fp8"},
    "fp8-fp8": {"weights": "fp8", "activations": "fp8"},
    "int8-int8": {"weights": "int8", "activations": "int8"},
    "int4": {"weights": "int4"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("build", [build_tiny, build_tiny_moe], ids=["dense", "mixture"])
def test_graphs_say_in_every_type_of_weights_what_the_nodes_say(
    weights: str, build: Callable[..., Path], tmp_path: Path
) -> None:
    """Up to 512 rows, which go through other products than few do."""
    if not capi.available():
        pytest.skip("no CUDA device, or the kernel library is not built: make plugins")
    engine = {"backend": "torch", "device": "cuda", "dtype": "bfloat16", **WEIGHTS[weights]}
    bundle, caches = build(tmp_path, engine=engine), dict[str, Tensor]()
    nodes, graphs = (open_target(bundle, caches, device="cuda") for _ in range(2))
    nodes._target_pieces = None
    assert graphs.capture_rows(512, 0, lambda: True) == 12
    pages = [[*range(1, 9)], [*range(9, 12), *[0] * 5]]
    for counts in ((9,), (120, 33), (120, 40)):
        past = (0,) * len(counts)
        asked = part(nodes, counts, past, pages[: len(counts)], [[n - 1] for n in counts])
        steps = part(nodes, (1, 1), (3, 15), [[9, 0], [10, 11]], [[0]] * 2)
        both = [of_types(nodes, inputs) for inputs in (asked, steps)]
        found, expected = graphs.run_mixed(both, [None] * 2), nodes.run_mixed(both, [None] * 2)
        for got, want in zip(found, expected, strict=True):
            assert close(got["logits"], want["logits"], RTOL_16)
