"""Prompt rows: what target and draft get of a prefill, and that captured graphs of prompts change
no draft.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.decode.heldout import heldout, request_of
from tests.decode.pair import NUM_PAGES, PAGE_SIZE
from tests.decode.scheduling import pair, prompts
from tests.engine.torch.capture.test_target_pieces import Pieces
from tests.tiny import build_tiny
from trt_eagle3 import LLM
from trt_eagle3.decode.forward.prompt_rows import PromptRows
from trt_eagle3.decode.forward.segment import Segment
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.speculation.eagle import EagleDrafter
from trt_eagle3.engine.torch.capture.draft_pieces import DraftPieces
from trt_eagle3.engine.torch.session import TorchSession


def rows() -> PromptRows:
    """The first 9 rows of a prompt of 17, its last 8, and another's 9, which are all."""
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    long, short = pair().sequence(prompts()[3], pool), pair().sequence(prompts()[0], pool)
    segments = [Segment(long, 0, 9, is_last=False), Segment(long, 9, 8), Segment(short, 0, 9)]
    return PromptRows.of(segments, 9, torch.device("cpu"))


def test_every_segment_has_the_row_after_it_too() -> None:
    found, (long, short) = rows(), (prompts()[3], prompts()[0])
    assert found.ids.shape == (3, 10)
    assert found.positions.shape == (3, 3, 10)
    assert torch.equal(found.ids[0], long.token_ids[:10])
    assert torch.equal(found.positions[:, 0], long.positions(0, 10))
    # the answer's first token is unknown, its position is not
    assert found.ids[1].tolist() == [*long.token_ids[9:].tolist(), 0, 0]
    assert torch.equal(found.positions[:, 1, :9], long.positions(9, 18))
    assert found.ids[2].tolist() == [*short.token_ids.tolist(), 0]
    assert torch.equal(found.positions[:, 2], short.positions(0, 10))


@pytest.mark.parametrize("width", [9, 12])
def test_some_segments_are_cut_or_padded_to_a_width(width: int) -> None:
    whole = rows()
    found = whole.only([2, 0], width)
    assert found.segments == [whole.segments[2], whole.segments[0]]
    assert found.ids.shape == (2, width + 1)
    assert torch.equal(found.ids[:, :10], whole.ids[[2, 0]])
    assert torch.equal(found.positions[..., :10], whole.positions[:, [2, 0]])
    narrow = found.only([1], 8)
    assert torch.equal(narrow.ids, whole.ids[:1, :9])


def answers_of(path: Path, *, captured: bool) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Tokens of the held-out questions, six of them admitted at once, and what was accepted."""
    bundle = replace(LoadedBundle.open(path), fixed_shapes=True)
    with LLM(bundle, prefix_cache=False) as engine:
        core = engine._started()
        if captured:
            drafter = bundle.decoder.drafter
            assert isinstance(drafter, EagleDrafter)
            session = drafter.runner._draft
            assert isinstance(session, TorchSession)
            assert core.pool.table_len is not None
            graphs = session._new_draft_pieces(Pieces(), core.pool.table_len)
            assert graphs is not None
            graphs.capture(512, lambda: True)
            session._draft_pieces = graphs
        requests = [request_of(example) for example in heldout()[:18]]
        found = [
            answer.finish()
            for i in range(0, len(requests), 6)
            for answer in core.submit_together(requests[i : i + 6], engine)
        ]
    return [(answer.token_ids, answer.accepted_lengths) for answer in found]


def test_captured_graphs_of_prompts_change_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft over other rows would show in what is accepted."""
    engine, limits = {"backend": "torch"}, {"max_batch_size": 6}
    path = build_tiny(tmp_path, engine=engine, limits=limits)
    expected = answers_of(path, captured=False)
    ran, run = list[bool](), DraftPieces.run
    monkeypatch.setattr(DraftPieces, "run", lambda *args: ran.append(True) or run(*args))
    assert answers_of(path, captured=True) == expected
    assert len(ran) >= 3

    def without_the_last(self: DraftPieces, inputs: dict[str, torch.Tensor]) -> object:
        earlier = inputs["logit_rows"] - 1
        return run(self, inputs | {"logit_rows": earlier.clamp(min=0)})

    monkeypatch.setattr(DraftPieces, "run", without_the_last)
    wrong = answers_of(path, captured=True)
    assert [tokens for tokens, _ in wrong] == [tokens for tokens, _ in expected]
    assert wrong != expected
