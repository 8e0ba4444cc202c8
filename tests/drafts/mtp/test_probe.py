"""The probe names what servers have read wrongly of MTP heads.

The "target" says what the head itself would say, read one way; every other way is worse.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.drafts.mtp.head import add_head
from tests.families.gates import questions
from tests.families.qwen3_5.random_pair import save_hybrid
from tests.families.random_pairs import config_of
from tests.probe.conftest import Asked, ask
from trt_eagle3.checkpoint.tensor_index import read_tensor
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.drafts.mtp.manifest import MtpManifest
from trt_eagle3.pipeline import build
from trt_eagle3.probe.interpretation import alternatives
from trt_eagle3.probe.record import NORM, ProbeRecording
from trt_eagle3.probe.score import Scorer
from trt_eagle3.probe.search import search
from trt_eagle3.prompts.prompt_file import Question

TRAPS: dict[str, dict[str, Any]] = {
    "hidden state before the norm": {"hidden": "raw"},
    "halves of fc exchanged": {"concat": "hidden_first"},
    "norm without the one": {"norm_offset": 0.0},
    "pad embeddings at image rows": {"image_rows": "pad"},
    "vision rows one late": {"image_rows_rotated": False},
    "positions one late": {"position_shift": 1},
    "positions counted": {"positions": "linear"},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    folder = tmp_path_factory.mktemp("probe")
    save_hybrid(folder / "target", moe=False)
    add_head(folder / "target")
    config = config_of(folder / "target", Path("mtp"), folder / "engines", speculation={"steps": 1})
    return ask(LoadedBundle.open(build(config).path), questions(24), folder, max_tokens=24)


@pytest.fixture(scope="module")
def steps(pair: Asked, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """Two steps of a chain: the first does not tell what is fed back."""
    folder = tmp_path_factory.mktemp("steps")
    target = Path(pair.bundle.record.config.target.checkpoint)
    config = config_of(target, Path("mtp"), folder / "engines", speculation={"steps": 2})
    asked = [Question("Why is the sky blue?"), Question("Count to twenty.")]
    return ask(LoadedBundle.open(build(config).path), asked, folder, max_tokens=24)


def test_every_reading_is_offered_and_recorded(pair: Asked) -> None:
    factors = alternatives(pair.manifest, pair.bundle.spec)
    assert set(factors) == {
        *("hidden state", "image rows", "positions", "position shift", "halves of fc"),
        *("feedback", "norms"),
    }
    assert all(NORM in recording.states for recording in pair.recordings)


@pytest.mark.parametrize("trap", TRAPS)
def test_trap_is_named(trap: str, pair: Asked, tmp_path: Path) -> None:
    truth = TRAPS[trap]
    manifest = replace(pair.manifest, **truth)
    recordings = [
        replace(r, target_probs=pair.scorer.chain(manifest, r)[:, 0].softmax(dim=-1))
        for r in pair.recordings
    ]
    found = search(Scorer(pair.bundle, recordings, tmp_path), pair.manifest, pair.bundle.spec)
    assert dict(found.best.changes) == truth
    assert found.scores[found.best].divergence == pytest.approx(0, abs=1e-4)


def fed_back(asked: Asked, manifest: MtpManifest, recording: ProbeRecording) -> ProbeRecording:
    """A target whose hidden states behind the prompt are those that ``manifest`` feeds back, and
    which says what the head says: so every depth of a chain says the same of a token.
    """
    scorer, states = asked.scorer, recording.states[NORM].clone()
    weight = read_tensor(manifest.tensors["pre_fc_norm_hidden.weight"]) + manifest.norm_offset
    start = len(recording.prompt.token_ids)
    found = replace(recording, states={**recording.states, NORM: states})
    for _ in recording.target_probs:  # each time one row more is right
        _, features = scorer._true_rows(manifest, scorer._runner(manifest), found)
        states[start:] = features / weight
    return replace(found, target_probs=scorer.chain(manifest, found)[:, 0].softmax(dim=-1))


@pytest.mark.parametrize("truth", [{"feedback": "pre_norm"}, {}])
def test_planted_feedback_is_found(truth: dict[str, Any], steps: Asked, tmp_path: Path) -> None:
    manifest = replace(steps.manifest, **truth)
    assert isinstance(manifest, MtpManifest)
    recordings = [fed_back(steps, manifest, recording) for recording in steps.recordings]
    found = search(Scorer(steps.bundle, recordings, tmp_path), steps.manifest, steps.bundle.spec)
    print(
        found.best,
        found.scores[found.best].divergence,
        {k: v.divergence for k, v in found.scores.items()},
    )
    assert dict(found.best.changes) == truth
    assert found.scores[found.best].divergence == pytest.approx(0, abs=1e-4)
