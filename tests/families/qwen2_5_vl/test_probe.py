"""The probe names what is read wrongly of SpecForge's drafts for Qwen2.5-VL, for which users report
an acceptance length of 1.

The "target" says what the draft itself would say, read one way; every other way is worse.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.families.gates import questions
from tests.families.qwen2_5_vl.random_pair import save_qwen25, save_qwen25_draft
from tests.families.random_pairs import config_of
from tests.probe.conftest import Asked, ask
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.pipeline import build
from trt_eagle3.probe.score import Scorer
from trt_eagle3.probe.search import search
from trt_eagle3.spec import RopeSpec

TRAPS: dict[str, dict[str, Any]] = {
    "ids counted as states": {"aux_layers": (1, 2, 4)},
    "theta left out of the older key": {"rope.base": 1e4},
    "Qwen3-VL's sections": {"rope.layout": "interleaved"},
    "vision embeddings in the draft": {"image_rows": "vision"},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    folder = tmp_path_factory.mktemp("probe")
    save_qwen25_draft(folder / "draft", save_qwen25(folder / "target"))
    config = config_of(
        folder / "target", folder / "draft", folder / "engines", speculation={"steps": 1}
    )
    return ask(LoadedBundle.open(build(config).path), questions(24), folder, max_tokens=64)


def test_draft_is_read_as_specforge_trains_it(pair: Asked) -> None:
    manifest = pair.manifest
    assert manifest.producer == "specforge"
    assert manifest.aux_layers == (0, 1, 3)
    assert (manifest.rope.layout, manifest.rope.sections) == ("chunked", (2, 3, 3))
    assert (manifest.rope.base, manifest.positions, manifest.image_rows) == (1e6, "3d", "pad")


@pytest.mark.parametrize("trap", TRAPS)
def test_trap_is_named(trap: str, pair: Asked, tmp_path: Path) -> None:
    truth = TRAPS[trap]
    fields = {name: value for name, value in truth.items() if not name.startswith("rope.")}
    rope = pair.manifest.rope
    if "rope.base" in truth:
        fields["rope"] = RopeSpec.plain(16, truth["rope.base"], rope.layout, rope.sections)
    if "rope.layout" in truth:
        fields["rope"] = replace(rope, layout=truth["rope.layout"])
    manifest = replace(pair.manifest, **fields)
    recordings = [
        replace(r, target_probs=pair.scorer.chain(manifest, r)[:, 0].softmax(dim=-1))
        for r in pair.recordings
    ]
    found = search(Scorer(pair.bundle, recordings, tmp_path), pair.manifest, pair.bundle.spec)
    assert dict(found.best.changes) == truth
    assert found.scores[found.best].divergence == pytest.approx(0, abs=1e-4)
