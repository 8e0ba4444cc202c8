"""Scales of keys and values: those of a checkpoint, and what is refused of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.quantised import add_kv_scales, save_quantised
from tests.tiny import build_tiny
from trt_eagle3.checkpoint.kv_scales import KVScales
from trt_eagle3.engine.bundle.read import read_bundle
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import read_target

PREFIX = "model.language_model.layers.2.self_attn"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_quantised(tmp_path_factory.mktemp("target"), "fp8-channel")


def with_tensors(checkpoint: Path, folder: Path, **tensors: Tensor) -> Path:
    """``checkpoint`` with tensors of layer 2's attention."""
    for file in checkpoint.iterdir():
        (folder / file.name).hardlink_to(file)
    weights = load_file(checkpoint / "model.safetensors")
    weights |= {f"{PREFIX}.{name.replace('__', '.')}": value for name, value in tensors.items()}
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors")
    return folder


def test_read_target_reads_scales_of_every_layer_and_head(tmp_path: Path) -> None:
    spec = read_target(add_kv_scales(save_quantised(tmp_path, "fp8-channel")))
    assert sorted(spec.kv_scales) == list(range(spec.num_layers))
    heads = spec.attention.num_kv_heads
    found = spec.kv_scales[3]
    assert len(found.k) == len(found.v) == heads
    assert found.k[0] == pytest.approx(0.02 * 1.3)
    assert found.v[-1] == pytest.approx(0.05 * (1.3 + 0.37 * (heads - 1)))


@pytest.mark.parametrize("name", ["k_scale", "k_proj__k_scale", "attn__k_scale"])
def test_read_target_takes_a_scale_of_a_layer_by_any_producers_name(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    spec = read_target(with_tensors(checkpoint, tmp_path, **{name: torch.tensor([0.25])}))
    assert spec.kv_scales == {2: KVScales((0.25,), (1.0,))}
    heads = spec.attention.num_kv_heads
    assert spec.kv_scales[2].by_head(heads, 2) == ((0.25,) * heads, (1.0,) * heads)


BAD: dict[str, tuple[dict[str, Tensor], str]] = {
    "another geometry": (
        {"k_scale": torch.ones(7)},
        r"k_scale: expected 1 or \d+ scales, one for each KV head, got \[7\]",
    ),
    "twice": (
        {"k_scale": torch.ones(()), "k_proj__k_scale": torch.ones(())},
        "scales of the k of layer 2 are given twice",
    ),
    "zero": ({"k_scale": torch.zeros(())}, "k_scale: expected scales above 0, got 0"),
    "no number": (
        {"v_scale": torch.tensor(torch.nan)},
        "v_scale: expected scales above 0, got nan",
    ),
}


@pytest.fixture(scope="module", params=BAD)
def bad(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    tensors, message = BAD[request.param]
    return with_tensors(checkpoint, tmp_path_factory.mktemp("bad"), **tensors), message


def test_stored_scales_that_do_not_fit_are_refused_when_they_are_used(
    bad: tuple[Path, str],
) -> None:
    spec = read_target(bad[0])
    with pytest.raises(UserError, match=bad[1]) as error:
        dict(spec.kv_scales)
    assert "\n" not in str(error.value)


def test_stored_scales_of_the_vision_tower_are_refused_when_they_are_used(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = with_tensors(checkpoint, tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.visual.blocks.0.attn.k_scale"] = torch.ones(())
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors")
    spec = read_target(folder)
    with pytest.raises(UserError, match="in the vision tower, which has no KV cache"):
        dict(spec.kv_scales)


def test_build_refuses_bad_scales_with_fp8_keys_and_values_alone(
    checkpoint: Path, tmp_path: Path
) -> None:
    (folder := tmp_path / "target").mkdir()
    with_tensors(checkpoint, folder, k_scale=torch.zeros(()))
    assert read_bundle(build_tiny(tmp_path / "out", target=folder)).kv_scales == {}
    with pytest.raises(UserError, match="k_scale: expected scales above 0, got 0"):
        build_tiny(tmp_path / "fp8", target=folder, engine={"kv_dtype": "fp8"})
    assert not (tmp_path / "fp8").exists(), "refused before any work"


@pytest.mark.parametrize("scales", [(), (0.0,), (-1.0,), (float("inf"),), (1.0, float("nan"))])
def test_kv_scales_refuse_what_is_no_positive_number(scales: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match="kv_scales: expected scales above 0"):
        KVScales(k=scales)


def test_kv_scales_of_another_geometry_are_refused() -> None:
    with pytest.raises(UserError, match="layer 5: expected 1 or 8 scales"):
        KVScales(k=(1.0, 2.0)).by_head(8, 5)
