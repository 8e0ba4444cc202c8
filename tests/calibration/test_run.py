"""Calibrated INT4 against data-free INT4, and scales that leave the target as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.calibration.conftest import Forward, forward
from trt_eagle3.calibration.prompt_rows import encode_prompts
from trt_eagle3.calibration.prompts import CalibrationPrompts
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.checkpoint.tensor_index import open_file, read_tensor
from trt_eagle3.engine.builder.calibration import Calibration
from trt_eagle3.engine.builder.weight_quantiser import (
    is_quantised_here,
    quantise_target,
    read_channel_scales,
)
from trt_eagle3.families.registry import family_of
from trt_eagle3.parity.reference.dequantise import read_values


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Mean over rows of the squared error over the row's square."""
    change = (found - expected).square().sum(dim=-1)
    return float((change / expected.square().sum(dim=-1)).mean())


def divergence(found: Tensor, expected: Tensor) -> float:
    """Mean of KL(expected || found) of a row, in nats."""
    p, q = expected.double().log_softmax(dim=-1), found.double().log_softmax(dim=-1)
    return float((p.exp() * (p - q)).sum(dim=-1).mean())


def disagreement(found: Tensor, expected: Tensor) -> float:
    return float((found.argmax(dim=-1) != expected.argmax(dim=-1)).double().mean())


def test_calibrated_int4_errs_less_than_data_free_on_prompts_it_has_not_seen(
    target: TargetCheckpoint,
    calibration: Calibration,
    heldout: CalibrationPrompts,
    tmp_path: Path,
) -> None:
    dense = forward(target, heldout)

    def made(name: str, found: Calibration | None) -> Forward:
        file = tmp_path / f"{name}.safetensors"
        return forward(quantise_target(target, "int4", file, calibration=found), heldout)

    free, calibrated = made("free", None), made("calibrated", calibration)
    errors = [
        [relative_error(f.layers[index], expected) for f in (calibrated, free)]
        for index, expected in enumerate(dense.layers)
    ]
    for index, (ours, theirs) in enumerate(errors):
        assert ours < theirs, f"layer {index}: {ours:.4f}, data-free {theirs:.4f}"
    assert sum(ours for ours, _ in errors) < 0.6 * sum(theirs for _, theirs in errors)
    ours, theirs = (divergence(f.logits, dense.logits) for f in (calibrated, free))
    assert ours < 0.8 * theirs, f"KL {ours:.4f}, data-free {theirs:.4f}"
    ours, theirs = (disagreement(f.logits, dense.logits) for f in (calibrated, free))
    assert ours < theirs, f"other best tokens {ours:.4f}, data-free {theirs:.4f}"


def test_scales_alone_change_no_layer(
    target: TargetCheckpoint, calibration: Calibration, heldout: CalibrationPrompts, tmp_path: Path
) -> None:
    dense = {n: read_tensor(ref).float() for n, ref in target.tensors.items()}
    scaled = {n: calibration.scales.scaled(n, t) for n, t in dense.items()}
    changed = [n for n in dense if not torch.equal(dense[n], scaled[n])]
    assert len(changed) > 7 * target.num_layers  # of seven projections and two norms each
    file = tmp_path / "scaled.safetensors"
    save_file({target.tensors[n].name: t for n, t in scaled.items()}, file)
    index = open_file(file)
    tensors = {n: index[ref.name] for n, ref in target.tensors.items()}
    found, expected = forward(replace(target, tensors=tensors), heldout), forward(target, heldout)
    assert max(map(relative_error, found.layers, expected.layers)) < 1e-9


def test_scaled_norms_hold_their_scales_without_rounding(
    target: TargetCheckpoint, calibration: Calibration, tmp_path: Path
) -> None:
    file = tmp_path / "made.safetensors"
    made = quantise_target(target, "int4", file, calibration=calibration)
    assert made.quantisation is not None
    assert made.quantisation.provenance.endswith("int4, calibrated")
    scales = read_channel_scales(target, file)
    for name in ("layers.0.input_layernorm.weight", "layers.3.post_attention_layernorm.weight"):
        own = scales.rows(name)
        assert own is not None
        assert not torch.equal(own, torch.ones_like(own))
        stored, dense = (read_tensor(s.tensors[name]).float() for s in (made, target))
        torch.testing.assert_close(stored * own, dense, rtol=1e-6, atol=0)


def test_made_weights_are_near_the_scaled_ones_and_all_else_is_the_same(
    target: TargetCheckpoint, calibration: Calibration, tmp_path: Path
) -> None:
    file = tmp_path / "made.safetensors"
    made = quantise_target(target, "int4", file, head=True, calibration=calibration)
    for name, ref in target.tensors.items():
        dense = calibration.scales.scaled(name, read_tensor(ref).float())
        found = read_values(made.tensors[name]).float()
        if is_quantised_here(name, head=True):
            assert 0 < (found - dense).norm() / dense.norm() < 0.25, name
        else:
            torch.testing.assert_close(found, dense, rtol=1e-6, atol=0, msg=name)


def test_largest_keys_and_values_are_those_of_the_cache(
    target: TargetCheckpoint, calibration: Calibration, prompts: CalibrationPrompts
) -> None:
    reference = family_of(target).reference(target, torch.float32, "cpu")
    rows = encode_prompts(reference, prompts)
    layer = next(reference.layers())
    traced = [prompt.step(layer) for prompt in rows]
    k = torch.cat([t["layers.0.self_attn.k"] for t in traced]).unflatten(1, (2, 64))
    torch.testing.assert_close(calibration.k_amax[0], k.abs().amax(dim=(0, 2)))
    v = torch.cat([t["layers.0.self_attn.v"] for t in traced])
    v = v / calibration.scales.by_producer["layers.0.self_attn.v_proj.weight"]
    torch.testing.assert_close(calibration.v_amax[0], v.unflatten(1, (2, 64)).abs().amax((0, 2)))
    for found in (calibration.k_amax, calibration.v_amax):
        assert list(found) == list(range(target.num_layers))
        assert all(own.shape == (2,) for own in found.values())
