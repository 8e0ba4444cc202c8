"""Scales of keys and values: those of a checkpoint, and what is refused of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.quantised import add_kv_scales, save_quantised
from trt_eagle3.checkpoint.kv_scales import KVScales
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


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"k_scale": torch.ones(7)}, r"k_scale: expected 1 or \d+ scales, one for each KV head"),
        (
            {"k_scale": torch.ones(()), "k_proj__k_scale": torch.ones(())},
            "scales of the k of layer 2 are given twice",
        ),
        ({"k_scale": torch.zeros(())}, "expected scales above 0, got 0"),
        ({"v_scale": torch.tensor(torch.nan)}, "expected scales above 0, got nan"),
    ],
)
def test_read_target_refuses_scales_that_do_not_fit(
    tensors: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message) as error:
        read_target(with_tensors(checkpoint, tmp_path, **tensors))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("scales", [(), (0.0,), (-1.0,), (float("inf"),), (1.0, float("nan"))])
def test_kv_scales_refuse_what_is_no_positive_number(scales: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match="kv_scales: expected scales above 0"):
        KVScales(k=scales)


def test_kv_scales_of_another_geometry_are_refused() -> None:
    with pytest.raises(UserError, match="layer 5: expected 1 or 8 scales"):
        KVScales(k=(1.0, 2.0)).by_head(8, 5)
