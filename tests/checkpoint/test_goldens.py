"""Drafts that the producers' own code wrote and ran: our reading, in plain PyTorch, computes what
they computed.

The files come from ``record_goldens.py``. A reading with one field changed must not.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoint.drafts import Geometry, target_spec
from tests.checkpoint.record_goldens import GOLDENS, HIDDEN, ROWS, TARGET_LAYERS, VOCAB
from trt_eagle3.checkpoint.convert import convert_draft
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.checkpoint.manifest import Eagle3Manifest
from trt_eagle3.checkpoint.tensor_index import read_tensor
from trt_eagle3.drafts.eagle3.reference import Eagle3Reference
from trt_eagle3.errors import UserError

FLOAT32 = 5e-6  # theirs is float32 throughout, ours float64; the worst seen is 1.6e-6
DEVIATION = 1e-3  # a wrong field changes outputs of order 1 by at least this

DOUBLE = {"first_norm": "double"}  # ModelOpt 0.47's own forward; servers run the single norm
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "angelslim": ("angelslim", {}),
    "angelslim-mrope": ("angelslim", {}),
    "modelopt": ("modelopt", DOUBLE),
    "modelopt-two-layers": ("modelopt", DOUBLE),
    "safeailab": ("safeailab", {}),
    "specforge-3.1": ("specforge", {}),
    "specforge-llama3": ("specforge", {}),
    "specforge-mrope": ("specforge", {}),
    "specforge-yarn": ("specforge", {}),
    "speculators-3.1": ("speculators", {}),
    "speculators-llama": ("speculators", {}),
    "speculators-qwen3": ("speculators", {}),
}
TARGET = target_spec(
    Geometry(
        hidden=HIDDEN,
        target_hidden=HIDDEN,
        vocab=VOCAB,
        draft_vocab=12,
        target_layers=TARGET_LAYERS,
    )
)


def _read(case: str, folder: Path, **changes: Any) -> Eagle3Manifest:
    return read_draft(GOLDENS / case, TARGET, {**CASES[case][1], **changes}, cache=folder)


def _deviation(manifest: Eagle3Manifest, case: str) -> tuple[float, float]:
    """How far logits and features are from the producer's, at most."""
    golden = load_file(GOLDENS / f"{case}.safetensors")
    draft = Eagle3Reference(
        manifest, {name: read_tensor(ref) for name, ref in manifest.tensors.items()}
    )
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
    features = draft.fuse(golden["aux"].double())
    logits, fed_back = draft.forward(golden["embeds"], features, golden["positions"], mask)

    def apart(ours: Tensor, theirs: Tensor) -> float:
        return float((ours - theirs.double()).abs().max())

    return apart(logits, golden["logits"]), apart(fed_back, golden["features"])


@pytest.mark.parametrize("case", CASES)
def test_our_reading_computes_what_the_producer_computes(case: str, tmp_path: Path) -> None:
    manifest = _read(case, tmp_path)
    assert manifest.producer == CASES[case][0]
    assert max(_deviation(manifest, case)) < FLOAT32


@pytest.mark.parametrize("case", CASES)
def test_a_copy_in_another_layout_computes_it_too(case: str, tmp_path: Path) -> None:
    manifest = read_draft(GOLDENS / case, TARGET, cache=tmp_path)
    for to in ("specforge", "speculators", "modelopt", "tensorrt-llm"):
        with contextlib.suppress(UserError):  # test_convert.py has what each layout refuses
            convert_draft(manifest, tmp_path / to, to)  # type: ignore[arg-type]
            assert _deviation(read_draft(tmp_path / to, TARGET), case) == _deviation(manifest, case)


WRONG: dict[str, Any] = {
    "residual": {"hidden": "normed", "normed": "hidden"},
    "first_norm": {"single": "double", "double": "single"},
    "rms_norm_eps": {1e-5: 1e-2},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("field", WRONG)
def test_one_wrong_field_is_seen(field: str, case: str, tmp_path: Path) -> None:
    right = getattr(_read(case, tmp_path), field)
    wrong = _read(case, tmp_path, **{field: WRONG[field][right]})
    assert _deviation(wrong, case)[0] > DEVIATION


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_feedback_is_seen_in_the_features_alone(case: str, tmp_path: Path) -> None:
    right = _read(case, tmp_path).feedback
    wrong = _read(
        case, tmp_path, feedback={"pre_norm": "post_norm", "post_norm": "pre_norm"}[right]
    )
    logits, features = _deviation(wrong, case)
    assert logits < FLOAT32
    assert features > DEVIATION


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_rope_is_seen(case: str, tmp_path: Path) -> None:
    right = _read(case, tmp_path).rope
    rope = {"layout": right.layout, "kind": "default", "base": 100.0}
    assert _deviation(_read(case, tmp_path, rope=rope), case)[0] > DEVIATION


@pytest.mark.parametrize("case", ["angelslim-mrope", "specforge-mrope"])
def test_a_wrong_mrope_layout_is_seen(case: str, tmp_path: Path) -> None:
    right = _read(case, tmp_path).rope.layout
    wrong = {"chunked": "interleaved", "interleaved": "chunked"}[right]
    assert _deviation(_read(case, tmp_path, rope={"layout": wrong}), case)[0] > DEVIATION


def test_reading_leaves_goldens_as_they_are(tmp_path: Path) -> None:
    shutil.copytree(GOLDENS / "safeailab", tmp_path / "draft")
    before = sorted(entry.name for entry in (tmp_path / "draft").iterdir())
    read_draft(tmp_path / "draft", TARGET, cache=tmp_path / "cache")
    assert sorted(entry.name for entry in (tmp_path / "draft").iterdir()) == before
