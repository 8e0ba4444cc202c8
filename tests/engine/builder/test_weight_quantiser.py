"""Weights that a build quantises: how far they are from the 16-bit ones, and what stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.quantised import fp8_channel, save_quantised
from tests.tiny import DRAFT, TARGET, build_tiny
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.checkpoint.quantised.weight import QuantisedRef
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.checkpoint.tensor_index import read_tensor
from trt_eagle3.config import EngineConfig
from trt_eagle3.decode.llm import LLM
from trt_eagle3.engine.builder.weight_quantiser import SCHEMES, is_quantised_here, quantise_target
from trt_eagle3.engine.bundle.weight_locations import FileLocations
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import read_target
from trt_eagle3.parity.reference.dequantise import read_values

# relative L2 error of a weight: e4m3 has 4 significant bits; a step of int8 is 1 / 127 of the row's
# largest value, of int4 1 / 7.5 of the group's
ERRORS = {"fp8": 0.03, "int8": 0.012, "int4": 0.13}


@pytest.fixture(scope="module")
def target() -> TargetCheckpoint:
    return read_target(TARGET)


@pytest.mark.parametrize("weights", SCHEMES)
def test_made_weights_are_near_the_checkpoints_and_all_else_is_the_same(
    weights: str, target: TargetCheckpoint, tmp_path: Path
) -> None:
    made = quantise_target(target, weights, tmp_path / "made.safetensors")
    assert made.quantisation is not None
    assert sum(made.quantisation.weights.values()) == 7 * target.num_layers
    for name, ref in target.tensors.items():
        found, dense = read_values(made.tensors[name]), read_tensor(ref)
        if is_quantised_here(name):
            error = float((found - dense.float()).norm() / dense.float().norm())
            assert 0 < error < ERRORS[weights], name
            assert isinstance(made.tensors[name], QuantisedRef)
        else:
            assert torch.equal(found, dense), name


def test_made_tied_head_stands_beside_the_token_table(
    target: TargetCheckpoint, tmp_path: Path
) -> None:
    tied = {**target.tensors, "lm_head.weight": target.tensors["embed_tokens.weight"]}
    spec = replace(target, tensors=tied, tied_head=True)
    made = quantise_target(spec, "int8", tmp_path / "made.safetensors", head=True)
    table, head = (read_values(made.tensors[f"{n}.weight"]) for n in ("embed_tokens", "lm_head"))
    assert torch.equal(table, read_tensor(target.tensors["embed_tokens.weight"]))
    assert 0 < (head - table.float()).norm() / table.float().norm() < ERRORS["int8"]


def test_scale_of_int4_is_better_than_that_of_the_largest_value(
    target: TargetCheckpoint, tmp_path: Path
) -> None:
    name = "layers.2.mlp.down_proj.weight"
    made = quantise_target(target, "int4", tmp_path / "made.safetensors")
    dense = read_tensor(target.tensors[name]).float()
    groups = dense.unflatten(1, (-1, 64))
    scale = groups.abs().amax(dim=-1, keepdim=True) / 7
    plain = ((groups / scale).round().clamp(-8, 7) * scale).flatten(1)
    searched = read_values(made.tensors[name])
    assert (searched - dense).norm() < 0.97 * (plain - dense).norm()


def test_target_that_is_quantised_already_is_refused(tmp_path: Path) -> None:
    source = save_quantised(tmp_path / "source", "int8")
    with pytest.raises(UserError, match=r"int4: .*source is quantised already \(compressed-"):
        build_tiny(tmp_path, target=source, engine={"weights": "int4"})
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_bundle_of_a_quantised_head_that_a_draft_shares_is_loaded(tmp_path: Path) -> None:
    source = save_quantised(tmp_path / "source", "fp8-channel", ignore=["re:.*visual.*"])
    file = source / "model.safetensors"
    tensors = load_file(file)
    head = fp8_channel(tensors.pop("lm_head.weight").float())
    save_file(tensors | {f"lm_head.{name}": tensor for name, tensor in head.items()}, file)
    spec = read_target(source)
    assert isinstance(spec.tensors["lm_head.weight"], QuantisedRef)
    own = read_draft(DRAFT, spec)
    shared = {**own.tensors, "lm_head.weight": spec.tensors["lm_head.weight"]}
    locations = FileLocations(spec, replace(own, tensors=shared), reference=False)
    assert "lm_head.weight" not in locations.draft_tensors()
    assert "d2t" in locations.draft_tensors()
    with LLM(build_tiny(tmp_path, target=source, draft=None)) as llm:
        assert llm.generate("What do you see?", max_tokens=4).token_ids


def test_rows_that_cannot_be_cut_into_groups_are_refused(
    target: TargetCheckpoint, tmp_path: Path
) -> None:
    name = "layers.0.mlp.down_proj.weight"
    odd = replace(target.tensors[name], shape=(256, 440))
    spec = replace(target, tensors={**target.tensors, name: odd})
    with pytest.raises(UserError, match="this target has rows of 440"):
        quantise_target(spec, "int4", tmp_path / "made.safetensors")


def test_engine_that_cannot_run_made_weights_refuses_them() -> None:
    tensorrt = {"backend": "tensorrt", "device": "cuda", "weights": "fp8"}
    with pytest.raises(
        ValueError, match=r"weights: engines of .* hold none quantised in float32 or with"
    ):
        EngineConfig.model_validate({**tensorrt, "dtype": "float32"})
    with pytest.raises(ValueError, match="quantise_head: true needs weights"):
        EngineConfig.model_validate({"quantise_head": True})
    with pytest.raises(ValueError, match="activations: int8 is for backend: onnxruntime, got to"):
        EngineConfig.model_validate({"backend": "torch", "activations": "int8"})
    for elsewhere in ({"backend": "onnxruntime"}, {"backend": "torch", "device": "cpu"}):
        with pytest.raises(ValueError, match="activations: fp8 is for backend: torch on device: c"):
            EngineConfig.model_validate({**elsewhere, "activations": "fp8"})
    EngineConfig.model_validate({"backend": "torch", "device": "cuda", "activations": "fp8"})


@pytest.mark.parametrize(
    "engine", [{"activations": "int8", "quantise_head": True}, {"backend": "torch"}]
)
def test_bundle_of_made_weights_holds_them_alone_and_speculates_as_it_decodes(
    engine: dict[str, Any], tmp_path: Path
) -> None:
    bundle = build_tiny(tmp_path, engine={**engine, "weights": "int4"})
    held = [file.name for file in (bundle / "weights/target").iterdir()]
    assert held == ["quantised-int4.safetensors"]
    with LLM(bundle) as llm:
        found = [
            llm.generate("What do you see?", max_tokens=16, speculation=speculation)
            for speculation in (True, False)
        ]
    assert found[0].token_ids == found[1].token_ids
    assert found[0].acceptance_length is not None
    assert found[0].acceptance_length > 1
