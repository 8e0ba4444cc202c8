"""TensorRT engines of a random pair of each family hold every check of ``validate``, on a GPU.

pytest -m trt tests/engine/trt -k families -n 4
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families.drawn_pairs import PAIRS, DrawnPair, draw_mixture, draw_pair
from tests.families.gates import failed
from tests.families.random_pairs import config_of
from tests.parity.conftest import OPTIONAL, ask_few_options, without
from trt_eagle3.engine.trt.folder import EngineFolder
from trt_eagle3.families.registry import read_target
from trt_eagle3.multimodal import Video
from trt_eagle3.parity.checks import sampling as sampling_check
from trt_eagle3.parity.record import options
from trt_eagle3.parity.record.engine import RecordingEngine
from trt_eagle3.parity.record.workload import Case, draw_image
from trt_eagle3.parity.reference.sources import read_sources
from trt_eagle3.parity.run import Validation
from trt_eagle3.pipeline import build
from trt_eagle3.prompts.prompt_file import Question

pytestmark = [pytest.mark.trt, pytest.mark.gpu]

DENSE = (
    *("deepseek_vl", "deepseek_vl_hybrid", "internvl", "llama", "qwen2", "qwen2_5_vl"),
    *("qwen3", "qwen3_5", "qwen3_vl"),
)
HYBRIDS = ("qwen3_5", "qwen3_5_moe")
CASES = [
    *((family, "eagle3", "float16") for family in PAIRS),
    *((family, "eagle3", "float32") for family in DENSE),
    *((family, kind, "float16") for family in HYBRIDS for kind in ("mtp", "block")),
    ("qwen3_next", "mtp", "float16"),
]
TEXTS = (Question("What is 12 plus 30?"), Question("Why is the sky blue? Explain it to a child."))
FRAMES = [draw_image(40 + step, (24, 24)) for step in range(4)]
IMAGES = (
    Question("What is this?", [draw_image(1, (40, 64))]),
    Question("What moves?", [draw_image(2, (24, 40))], videos=[Video(FRAMES, fps=2.0)]),
)
RESIDUAL = {"float32": "compute", "float16": "float32"}
HIDDEN_INSIDE = {"target.layer_steps", "target.layers"}
"""Checks that need tensors from inside an engine."""
CHANCE = {"draft.tokens"}
"""Checks of a random block draft in float16 that the torch session does not always hold either."""


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As the tiny pair's validation in ``tests/parity/test_clean.py``: every check, with few draws
    and sets of options.
    """
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    pytest.importorskip("tensorrt")
    ask_few_options(monkeypatch)
    some = {name: sampling_check._SETTINGS[name] for name in ("all filters", "penalties")}
    with monkeypatch.context() as patch:
        patch.setattr(sampling_check, "_DRAWS", 250)
        patch.setattr(sampling_check, "_SETTINGS", some)
        patch.setattr(options, "NUM_CASES", 1)
        yield


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where bundles lie beside each other, and share what was timed."""
    return tmp_path_factory.mktemp("engines")


def built(pair: DrawnPair, kind: str, dtype: str, engines: Path) -> Path:
    """The pair's bundle, with the first kernels that will do: timing them takes minutes."""
    sections: dict[str, Any] = {
        "name": f"{pair.target.parent.name}_{kind}_{dtype}",
        "engine": {
            "prefill_chunk": 64,
            "backend": "tensorrt",
            "dtype": dtype,
            "residual": RESIDUAL[dtype],
            "tensorrt": {"optimization_level": 0},
        },
        "limits": {"max_seq_len": 512, "max_visual_tokens": 256, "max_batch_size": 2},
    }
    if kind == "block":
        sections["speculation"] = {"steps": 5}
    draft = Path(pair.drafts[kind])
    return build(config_of(pair.target, draft, engines, **sections)).path


def check(
    bundle: Path, pair: DrawnPair, *, whole: bool = True, chance: Collection[str] = ()
) -> Mapping[str, Any]:
    """Every check that applies; returns what was recorded.

    ``whole``: with those of files, batches, sampling and options, which take longest. ``chance``:
    checks that may fail.
    """
    engine = RecordingEngine(bundle)
    questions = IMAGES[: 2 if pair.videos else 1] if pair.multimodal else TEXTS
    left_out = () if whole else without(*OPTIONAL)
    cases = [Case(str(i), "drawn", question) for i, question in enumerate(questions)]
    found = Validation(engine, left_out=left_out).run(cases, 8, *read_sources(engine))
    assert set(failed(found)) <= set(chance), found.diagnosis
    skipped = {name for name, m in found.recorder.items() if m.status == "skipped"}
    assert skipped <= HIDDEN_INSIDE | {"target.top1", "batch.acceptance", *left_out}, skipped
    recorded: Mapping[str, Any] = found.recorder
    return recorded


@pytest.mark.parametrize(("family", "kind", "dtype"), CASES)
def test_engines_of_every_family_hold_every_check(
    family: str, kind: str, dtype: str, engines: Path, tmp_path: Path
) -> None:
    pair = draw_pair(family, tmp_path)
    chance = CHANCE if (kind, dtype) == ("block", "float16") else ()
    bundle = built(pair, kind, dtype, engines)
    whole = (kind, dtype) == ("eagle3", "float16")
    found = check(bundle, pair, whole=whole, chance=chance)
    wanted = {"tokens.plain", "tokens.speculative", "target.logits_l2", "draft.logits"}
    for name in wanted | ({"vision.embeds"} if pair.multimodal else set()):
        assert found[name].taken, name


@pytest.mark.parametrize(
    ("kind", "plugin"),
    [
        ("fp8", "FusedMoeFp8"),
        ("w4a16-asymmetric", "FusedMoeInt4"),
    ],
)
def test_engines_of_families_with_packed_experts_hold_every_check(
    kind: str, plugin: str, engines: Path, tmp_path: Path
) -> None:
    pair = draw_mixture(tmp_path, kind)
    bundle = built(pair, "eagle3", "float16", engines)
    inspection = json.loads((bundle / "target" / "inspection.json").read_text())
    layers = read_target(pair.target).num_layers
    profiles = len(inspection["profiles"])
    assert inspection["plugins"][plugin] in {layers, layers * profiles}
    check(bundle, pair, whole=False)
    assert EngineFolder(bundle / "target").intermediates, "router logits, which validate reads"
