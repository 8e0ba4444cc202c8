"""The probe names what servers have read wrongly of block drafts.

The "target" has the distribution that the draft itself predicts, read one way. Every other way is
worse.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.drafts.block.files import Geometry, write
from tests.probe.conftest import Asked, ask, questions
from tests.tiny import TARGET, build_tiny
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.drafts.block.manifest import BlockLayer
from trt_eagle3.families.registry import read_target
from trt_eagle3.probe.interpretation import alternatives
from trt_eagle3.probe.result import _overrides
from trt_eagle3.probe.score import Scorer
from trt_eagle3.probe.search import search
from trt_eagle3.spec import RopeSpec

CAUSAL = BlockLayer(causal=True, window=16), BlockLayer(causal=False, window=0)
TRUTHS: dict[str, dict[str, Any]] = {
    "layer ids one lower": {"aux_layers": (0, 2, 4)},
    "rows that predict the next token": {"shift": "next", "anchor_row": True},
    "a causal layer": {"layers": CAUSAL},
    "windows from the anchor": {"window_rule": "anchor"},
    "another theta": {"rope.base": 1e4},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """The tiny target with a random DFlash draft that has a sliding layer; chains of one token."""
    folder = tmp_path_factory.mktemp("probe")
    spec = read_target(TARGET)
    vocab = spec.vocab_size
    geometry = Geometry(
        spec.hidden_size, vocab=vocab, draft_vocab=vocab, target_layers=spec.num_layers
    )
    write(
        folder / "draft",
        "z-lab",
        geometry,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=16,
        use_sliding_window=True,
        is_causal=False,
        nested={"mask_token_id": vocab - 1, "target_layer_ids": [1, 3, 5]},
    )
    built = build_tiny(folder, draft=folder / "draft", speculation={"steps": 1})
    return ask(LoadedBundle.open(built), questions(2), folder, max_tokens=14)


def test_every_reading_is_offered(pair: Asked) -> None:
    assert set(alternatives(pair.manifest, pair.bundle.spec)) == {
        *("aux offset", "deepstack", "shift", "causal", "window rule", "rope base")
    }


@pytest.mark.parametrize("trap", TRUTHS)
def test_trap_is_named(trap: str, pair: Asked, tmp_path: Path) -> None:
    truth = TRUTHS[trap]
    fields = {name: value for name, value in truth.items() if not name.startswith("rope.")}
    if "rope.base" in truth:
        fields["rope"] = RopeSpec.plain(16, truth["rope.base"])
    manifest = replace(pair.manifest, **fields)
    recordings = [
        replace(r, target_probs=pair.scorer.blocks(manifest, r)[1][:, 0].softmax(dim=-1))
        for r in pair.recordings
    ]
    found = search(Scorer(pair.bundle, recordings, tmp_path), pair.manifest, pair.bundle.spec)
    assert dict(found.best.changes) == truth
    assert found.scores[found.best].divergence == pytest.approx(0, abs=1e-4)
    overrides = _overrides(found.best, pair.manifest)
    assert overrides.keys() == {"rope" if name == "rope.base" else name for name in truth}


def test_blocks_cover_every_token_of_longer_chains(pair: Asked, tmp_path: Path) -> None:
    recording = pair.recordings[0]
    scorer = Scorer(pair.bundle, [recording], tmp_path)
    scorer.num_steps = 4
    rows, logits = scorer.blocks(pair.manifest, recording)
    assert (rows[1:] - rows[:-1]).max() == 2
    assert logits.shape[:2] == (len(rows), 4)
    assert len(scorer.score(pair.manifest).token_ce) == len(recording.target_probs)
