"""INT4 of hybrids: layers of linear attention, gated attention, and shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.calibration.conftest import Forward, forward, scaled_target, text_prompts
from tests.calibration.test_run import divergence, relative_error
from tests.families.gates import failed, validate_pair
from tests.families.qwen3_5.random_pair import save_hybrid, save_hybrid_draft
from tests.families.random_pairs import config_of
from tests.hybrid import save_qwen3_5_moe_text, save_qwen3_5_text
from tests.tiny import QUESTIONS
from trt_eagle3.calibration.activations import RowStatistics, inputs_of_layer
from trt_eagle3.calibration.prompt_rows import encode_prompts
from trt_eagle3.calibration.prompts import CalibrationPrompts
from trt_eagle3.calibration.run import calibrate
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.checkpoint.tensor_index import read_tensor
from trt_eagle3.engine.builder.calibration import Calibration, ChannelScales, folds_of_layer
from trt_eagle3.engine.builder.weight_quantiser import quantise_target
from trt_eagle3.families.registry import family_of, read_target
from trt_eagle3.parity.record.workload import draw_image
from trt_eagle3.parity.reference.dequantise import read_values
from trt_eagle3.pipeline import build
from trt_eagle3.prompts.prompt_file import Question

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "linear_value_head_dim": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "num_experts": 4,
}
"""Rows of groups of 32 and of 64; four layers, of which the third attends."""
KINDS = {"dense": save_qwen3_5_text, "moe": save_qwen3_5_moe_text}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LOUD = 8.0
"""What some channels of every norm are multiplied with, as large models have them."""


@dataclass(frozen=True)
class Hybrid:
    """A random target, and what calibration finds on some prompts."""

    spec: TargetCheckpoint
    prompts: CalibrationPrompts
    calibration: Calibration
    dense: Forward
    rows: Mapping[str, Tensor]

    def int4(self, file: Path, calibration: Calibration | None) -> Forward:
        """Quantised by the build."""
        made = quantise_target(self.spec, "int4", file, calibration=calibration)
        return forward(made, self.prompts)

    def layer_errors(self, found: Forward) -> list[float]:
        """Of each layer's output."""
        return [relative_error(*p) for p in zip(found.layers, self.dense.layers, strict=True)]


def save(folder: Path, kind: str, dtype: torch.dtype) -> TargetCheckpoint:
    model = KINDS[kind](folder, **SHAPE)
    drawn = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("layernorm.weight"):
            loud = torch.randperm(len(parameter), generator=drawn)[:4]
            parameter.data[loud] = (1 + parameter.data[loud]) * LOUD - 1
        elif name.endswith("linear_attn.norm.weight"):
            parameter.data[:2] *= LOUD
    model.to(dtype).save_pretrained(folder)
    return read_target(folder)


def rows_of(spec: TargetCheckpoint, prompts: CalibrationPrompts) -> dict[str, Tensor]:
    """By weight, but for the experts', what it is multiplied with."""
    reference = family_of(spec).reference(spec, torch.float32, "cpu")
    given, found = encode_prompts(reference, prompts), {}
    for layer in reference.layers():
        traced = [prompt.step(layer) for prompt in given]
        for name, weights in inputs_of_layer(spec.layers[layer.index], layer.index).items():
            own = [weight for weight in weights if ".experts." not in weight]
            found |= dict.fromkeys(own, torch.cat([tensors[name] for tensors in traced]))
    return found


@pytest.fixture(scope="module", params=[("dense", "float32"), ("moe", "bfloat16")], ids="-".join)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    kind, dtype = request.param
    folder = tmp_path_factory.mktemp(kind)
    spec, prompts = save(folder / "target", kind, DTYPES[dtype]), text_prompts(8, 64)
    found = calibrate(spec, prompts, "cpu", folder)
    return Hybrid(spec, prompts, found, forward(spec, prompts), rows_of(spec, prompts))


def test_calibrated_hybrid_errs_less_than_data_free(hybrid: Hybrid, tmp_path: Path) -> None:
    free = hybrid.int4(tmp_path / "free", None)
    ours = hybrid.int4(tmp_path / "calibrated", hybrid.calibration)
    errors = list(zip(hybrid.layer_errors(ours), hybrid.layer_errors(free), strict=True))
    assert all(own < 0.9 * other for own, other in errors), errors
    kl = [divergence(found.logits, hybrid.dense.logits) for found in (ours, free)]
    assert kl[0] < 0.9 * kl[1], kl


def test_scales_alone_change_no_layer_of_a_hybrid(hybrid: Hybrid, tmp_path: Path) -> None:
    """But for the last bits of what stays 16-bit behind a norm that holds no powers of two."""
    scales = hybrid.calibration.scales
    folds = [f for i, own in enumerate(hybrid.spec.layers) for f in folds_of_layer(own, i)]
    assert {fold.producer for fold in folds} == scales.by_producer.keys()
    assert all(len(own.unique()) > 4 for own in scales.by_producer.values())
    found = forward(scaled_target(hybrid.spec, scales, tmp_path / "scaled"), hybrid.prompts)
    most = {"F32": (1e-9, 1e-9), "BF16": (5e-5, 1e-3)}[hybrid.spec.tensors["norm.weight"].dtype]
    errors = hybrid.layer_errors(found)
    assert errors[0] < most[0]
    assert max(errors) < most[1], errors


def test_norms_stored_less_one_hold_their_scales(hybrid: Hybrid, tmp_path: Path) -> None:
    scaled = scaled_target(hybrid.spec, hybrid.calibration.scales, tmp_path / "scaled")
    for end, offset in (("input_layernorm", 1.0), ("linear_attn.norm", 0.0)):
        name = f"layers.0.{end}.weight"
        own = hybrid.calibration.scales.rows(name)
        assert own is not None
        found, dense = (read_tensor(s.tensors[name]).float() for s in (scaled, hybrid.spec))
        torch.testing.assert_close((found + offset) * own, dense + offset, rtol=1e-6, atol=1e-6)


class Forgetful(ChannelScales):
    """The planted fault: the columns of weights with this ending are not multiplied."""

    end = ""

    def columns(self, name: str) -> Tensor | None:
        return None if name.endswith(self.end) else super().columns(name)


class WithoutTheOne(ChannelScales):
    """The planted fault: norms are divided as they are stored."""

    def scaled(self, name: str, values: Tensor) -> Tensor:
        rows = self.rows(name)
        if rows is None or values.ndim > 1:
            return super().scaled(name, values)
        return values / rows


FORGOTTEN = ("in_proj_a.weight", "in_proj_b.weight", "mlp.gate.weight", "shared_expert_gate.weight")
FAULTS = {end: type(end, (Forgetful,), {"end": end}) for end in FORGOTTEN}


def test_scales_that_a_reader_of_a_norm_lacks_change_layers(hybrid: Hybrid, tmp_path: Path) -> None:
    names = hybrid.spec.tensors
    faults = [WithoutTheOne, *(f for e, f in FAULTS.items() if any(n.endswith(e) for n in names))]
    for fault in faults:
        scales = fault(hybrid.spec, hybrid.calibration.scales.by_producer)
        found = forward(
            scaled_target(hybrid.spec, scales, tmp_path / fault.__name__), hybrid.prompts
        )
        assert hybrid.layer_errors(found)[0] > 1e-3, fault.__name__


def product_errors(hybrid: Hybrid, file: Path, calibration: Calibration | None) -> dict[str, float]:
    """Of each weight's product with the rows that it is multiplied with in the 16-bit target."""
    made = quantise_target(hybrid.spec, "int4", file, calibration=calibration)
    scales = calibration.scales if calibration else ChannelScales(hybrid.spec)
    errors = {}
    for name, x in hybrid.rows.items():
        dense, found = (read_values(s.tensors[name]).float() for s in (hybrid.spec, made))
        rows, columns = scales.rows(name), scales.columns(name)
        found = found if rows is None else found * rows[:, None]
        found = found if columns is None else found / columns
        errors[name] = relative_error(x @ found.T, x @ dense.T)
    return errors


def test_products_err_less_than_data_free_and_more_made_of_other_channels(
    hybrid: Hybrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: a channel counts for the one beside it."""
    ours = product_errors(hybrid, tmp_path / "calibrated", hybrid.calibration)
    free = product_errors(hybrid, tmp_path / "free", None)
    count = RowStatistics.add
    monkeypatch.setattr(RowStatistics, "add", lambda own, x: count(own, x.roll(1, dims=-1)))
    found = calibrate(hybrid.spec, hybrid.prompts, "cpu", tmp_path)
    faulty = product_errors(hybrid, tmp_path / "faulty", found)
    for name, own in ours.items():
        assert own < 0.8 * free[name], name
        assert faulty[name] > free[name], name


def test_keys_and_values_are_those_of_the_layers_that_attend(hybrid: Hybrid) -> None:
    assert list(hybrid.calibration.kv_scales()) == [2]
    assert all(len(found) == 2 for found in hybrid.calibration.k_amax.values())


def test_every_gate_holds_of_a_calibrated_build(tmp_path: Path) -> None:
    """Of a mixture with a tower, on prompts with and without a picture."""
    text = {**SHAPE, "num_attention_heads": 2, "linear_value_head_dim": 32}
    del text["vocab_size"]
    model = save_hybrid(tmp_path / "target", moe=True, **text)
    save_hybrid_draft(tmp_path / "draft", model)
    engine = {"prefill_chunk": 64, "backend": "torch", "weights": "int4", "kv_dtype": "fp8"}
    config = config_of(tmp_path / "target", tmp_path / "draft", tmp_path, engine=engine)
    bundle = build(config, calibration=QUESTIONS).path
    asked = [Question("What is this?", [draw_image(1, (72, 100))])]
    found = validate_pair(bundle, asked, made_from=read_target(tmp_path / "target"))
    assert failed(found) == []
    assert found.recorder["weights.made"].taken
