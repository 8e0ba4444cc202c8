"""A planted truth: the "target" says what the draft itself would say, read one way; every other
interpretation is worse.

So every factor can be tried, whatever a trained draft happens to feel of it. One step: deeper ones
cannot all agree with one distribution per token.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.decode.bundle import config_of, save_pair
from tests.probe.conftest import Asked, ask
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.pipeline import build
from trt_eagle3.probe.score import Scorer
from trt_eagle3.probe.search import search
from trt_eagle3.prompts.bundled import bundled_questions
from trt_eagle3.spec import RopeSpec

LIMITS = {"max_seq_len": 1000, "max_visual_tokens": 500}

TRUTHS: dict[str, dict[str, Any]] = {
    "aux_layers": {"aux_layers": (1, 3, 5)},
    "aux_pre_deepstack": {"aux_pre_deepstack": False},
    "image_rows": {"image_rows": "vision"},
    "image_rows_rotated": {"image_rows": "vision", "image_rows_rotated": False},
    "positions": {"positions": "linear"},
    "position_shift": {"position_shift": 1},
    "rope.base": {"rope.base": 1e6},
    "rope.layout": {"rope.layout": "interleaved", "rope.sections": (2, 1, 1), "positions": "3d"},
    "residual": {"residual": "normed"},
    "first_norm": {"first_norm": "double"},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """A random pair with the whole target tapped; its prefill is chunked (32 rows)."""
    folder = tmp_path_factory.mktemp("random")
    save_pair(folder, text={"max_position_embeddings": LIMITS["max_seq_len"]})
    bundle = LoadedBundle.open(
        build(config_of(folder, speculation={"steps": 1}, limits=LIMITS)).path
    )
    text, *_, images, video = bundled_questions()
    return ask(bundle, [text, images, video], folder, max_tokens=24)


@pytest.mark.parametrize("field", TRUTHS)
def test_planted_truth_is_found(field: str, pair: Asked, tmp_path: Path) -> None:
    truth = TRUTHS[field]
    fields = {name: value for name, value in truth.items() if not name.startswith("rope.")}
    if field == "rope.base":
        fields["rope"] = RopeSpec.plain(8, 1e6)
    if field == "rope.layout":
        fields["rope"] = RopeSpec.plain(8, 1e4, "interleaved", (2, 1, 1))
    manifest = replace(pair.manifest, **fields)
    recordings = [
        replace(r, target_probs=pair.scorer.chain(manifest, r)[:, 0].softmax(dim=-1))
        for r in pair.recordings
    ]
    found = search(Scorer(pair.bundle, recordings, tmp_path), pair.manifest, pair.bundle.spec)
    assert dict(found.best.changes) == truth
    assert found.scores[found.best].divergence == pytest.approx(0, abs=1e-4)
