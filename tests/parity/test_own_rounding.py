"""Tolerances of targets that amplify rounding: by what PyTorch errs by in the engine's type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.families import gates
from tests.families.gates import failed, validate_pair
from tests.parity.conftest import LIMITS, TREE
from tests.parity.evidence import recorder_of
from tests.parity.fault import gives
from tests.parity.planting import Tensors, plant_in
from tests.tiny import build_tiny
from trt_eagle3.parity.checks import thresholds
from trt_eagle3.parity.checks.own_rounding import own_steps
from trt_eagle3.parity.metrics import RowErrors, row_errors
from trt_eagle3.parity.record.engine import RecordingEngine
from trt_eagle3.parity.reference.rounded_activations import ROUNDED
from trt_eagle3.parity.reference.sources import read_sources
from trt_eagle3.parity.reference.target import load_reference
from trt_eagle3.prompts.prompt_file import Question

STEP, LOGITS = "target.layer_steps", "target.logits_l2"


def holds(check: str, ours: float, theirs: float, dtype: str = "bfloat16", **set_: float) -> bool:
    """Whether a tensor of such errors holds where PyTorch errs by ``theirs``."""
    m = recorder_of(dtype, **set_)[check]
    m.add_rows(
        RowErrors("a", "layers.0.output", torch.full((20,), ours)),
        own=lambda _: torch.full((20,), theirs),
    )
    (taken,) = m.taken
    assert (taken.bound is None) == (taken.detail == "")
    return not m.failures


@pytest.mark.parametrize("check", [STEP, LOGITS])
def test_three_times_pytorchs_own_error_is_allowed_and_no_more(check: str) -> None:
    assert holds(check, 0.29, 0.1)
    assert not holds(check, 0.31, 0.1)
    assert not holds(check, 0.25, 0.01), "the tolerance stays where PyTorch is exact"
    assert holds(check, 0.05, 0.0)


def test_error_of_another_row_is_allowed_never() -> None:
    assert not holds(LOGITS, 0.36, 1.0)
    assert not holds(STEP, 0.36, 1.0)
    assert not holds("options.logprobs", 3.1, 9.0)
    assert holds("options.logprobs", 2.9, 1.0)


def test_pytorch_that_overflows_allows_nothing() -> None:
    assert not holds(LOGITS, 0.2, torch.inf, "float16")
    m = recorder_of("float16")["target.logits_cosine"]
    overflown = torch.tensor([-1.0], dtype=torch.float64)
    m.add_cosines(RowErrors("a", "logits", torch.tensor([0.95])), own=lambda _: overflown)
    assert m.failures


def test_tolerance_that_the_user_set_is_kept() -> None:
    assert not holds(LOGITS, 0.2, 0.1, logits_l2=0.15)


def test_float32_is_held_to_float32s_own_error() -> None:
    assert holds("target.layers", 1.1e-4, 4e-5, "float32")
    assert not holds("target.layers", 1.3e-4, 4e-5, "float32")


def test_cosines_are_held_to_the_square() -> None:
    m = recorder_of("bfloat16")["target.logits_cosine"]
    for cosine in (0.983, 0.981):
        rows = RowErrors("a", "logits", torch.tensor([cosine]))
        m.add_cosines(rows, own=lambda _: torch.tensor([0.998], dtype=torch.float64))
    assert [x.value for x in m.failures] == [pytest.approx(0.981)]


ASKED = [Question("Why is the sky blue?")]


@pytest.fixture
def strict_layers(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Tolerances that no engine in bfloat16 holds."""

    def plant() -> None:
        for name in ("layer_step", "layer_output", "logits_l2", "aux"):
            known = thresholds.THRESHOLDS[name]
            values = dict.fromkeys(known.values, 1e-3)
            monkeypatch.setitem(
                thresholds.THRESHOLDS,  # type: ignore[arg-type]
                name,
                thresholds.Threshold(known.metric, known.better, values, known.origin),
            )

    return plant


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = {"backend": "torch", "dtype": "bfloat16", "weights": "fp8", "kv_dtype": "fp8"}
    folder = tmp_path_factory.mktemp("rounding")
    return build_tiny(folder, speculation=TREE, limits=LIMITS, engine=engine)


def test_sound_engine_holds_by_what_pytorch_errs_by(
    bundle: Path, strict_layers: Callable[[], None]
) -> None:
    strict_layers()
    found = validate_pair(bundle, ASKED)
    assert failed(found) == []
    worst = found.recorder[STEP].worst
    assert worst is not None
    assert worst.bound is not None
    assert own_steps(found.evidence) is not None


def _tripled(_: Tensors, outputs: Tensors) -> Tensors:
    """One aux row of a prompt is three times as large."""
    values = outputs["aux_hidden_states"].clone()
    if values.shape[1] > 12:
        values[:, 10] *= 3
    return {**outputs, "aux_hidden_states": values}


def test_spoilt_row_is_out_of_it(
    bundle: Path,
    strict_layers: Callable[[], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strict_layers()
    planted = plant_in(bundle, tmp_path, monkeypatch)
    gives("target", _tripled)(planted)
    monkeypatch.setattr(gates, "RecordingEngine", lambda _: planted.engine())
    assert failed(validate_pair(planted.bundle, ASKED)) == ["target.aux", "draft.aux"]


@pytest.mark.parametrize(("activations", "step"), [("int8", 1 / 127), ("fp8", 1 / 14)])
def test_rounded_rows_err_by_half_a_step_each_by_its_own_scale(
    activations: str, step: float
) -> None:
    x = (
        torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
        * torch.logspace(-3, 3, 7)[:, None]
    )
    x[3] = 0.0
    found = ROUNDED[activations](x)
    assert torch.equal(found[3], x[3])
    most = x.abs().amax(dim=1, keepdim=True)
    assert ((found - x).abs() <= 0.5001 * step * most).all()
    assert (found - x).norm() > 0.1 * step * x.norm(), "not rounded"


def test_only_products_with_quantised_weights_read_rounded_rows(bundle: Path) -> None:
    spec, _ = read_sources(RecordingEngine(bundle))
    reference = load_reference(spec, torch.float32, "cpu")
    hidden = torch.randn(5, reference.hidden_size, generator=torch.Generator().manual_seed(0))
    rope = reference.rope(torch.arange(5).expand(3, -1))
    (layer,) = reference.layers([0])
    exact = layer(hidden, rope)
    reference.activations = "fp8"
    (layer,) = reference.layers([0])
    assert 1e-3 < float(row_errors(layer(hidden, rope), exact).max()) < 0.2
