"""Every build config in the repository is one, and names what its file name says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import ROOT
from trt_eagle3.config import load_config
from trt_eagle3.decode.speculation.tree import configured_tree

CONFIGS = sorted(ROOT.glob("build_configs/*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_config_is_valid(file: Path) -> None:
    config = load_config(file)
    configured_tree(config.speculation)


@pytest.mark.parametrize("size", ["2b", "4b", "8b", "32b"])
def test_big_configs_name_hub_checkpoints_of_their_size(size: str) -> None:
    config = load_config(ROOT / f"build_configs/qwen3_vl_{size}.yaml")
    assert config.target.checkpoint == f"Qwen/Qwen3-VL-{size.upper()}-Instruct"
    assert config.draft is None or f"Qwen3-VL-{size.upper()}-Instruct" in config.draft.checkpoint
    assert (config.engine.backend, config.engine.device) == ("tensorrt", "cuda")


@pytest.mark.parametrize(
    ("name", "size", "weights"), [("rtx_2b", "2b", None), ("rtx_8b_int4", "8b", "int4")]
)
def test_rtx_configs_are_the_pairs_built_for_named_chips(
    name: str, size: str, weights: str | None
) -> None:
    config = load_config(ROOT / f"build_configs/{name}.yaml")
    other = load_config(ROOT / f"build_configs/qwen3_vl_{size}.yaml")
    assert (config.target, config.draft) == (other.target, other.draft)
    assert config.engine.weights == weights
    assert config.engine.tensorrt.runtime == "rtx"
    assert config.engine.tensorrt.chips == ("sm86", "sm89", "sm120")


def test_text_config_names_hub_checkpoints_of_its_size() -> None:
    config = load_config(ROOT / "build_configs/qwen3_8b.yaml")
    assert config.target.checkpoint == "Qwen/Qwen3-8B"
    assert config.draft is not None
    assert "Qwen3-8B" in config.draft.checkpoint


@pytest.mark.parametrize(
    ("name", "size", "method"),
    [
        ("qwen3_5_9b_dflash", "Qwen3.5-9B", "DFlash"),
        ("qwen3_6_27b_dflash", "Qwen3.6-27B", "DFlash"),
        ("qwen3_8_27b_dflash2", "Qwen3.8-27B", "DFlash2"),
        ("qwen3_8_27b_dspark", "Qwen3.8-27B", "DSpark"),
    ],
)
def test_configs_of_block_drafts_name_target_and_draft_of_one_size(
    name: str, size: str, method: str
) -> None:
    config = load_config(ROOT / f"build_configs/{name}.yaml")
    assert config.target.checkpoint == f"Qwen/{size}"
    assert config.draft is not None
    assert config.draft.checkpoint.endswith(f"/{size}-{method}")
    assert (config.engine.backend, config.engine.device) == ("torch", "cuda")
    assert f"build_configs/{name}.yaml" in (ROOT / "docs/drafts.md").read_text()


@pytest.mark.parametrize(
    ("name", "checkpoint"),
    [
        ("qwen3_30b_a3b", "Qwen/Qwen3-30B-A3B"),
        ("qwen3_vl_30b_a3b", "Qwen/Qwen3-VL-30B-A3B-Instruct"),
        ("qwen3_omni_30b_a3b", "Qwen/Qwen3-Omni-30B-A3B-Instruct"),
    ],
)
def test_configs_of_mixtures_name_hub_checkpoints_and_the_torch_backend(
    name: str, checkpoint: str
) -> None:
    config = load_config(ROOT / f"build_configs/{name}.yaml")
    assert config.target.checkpoint == checkpoint
    assert (config.engine.backend, config.engine.device) == ("torch", "cuda")
    assert f"build_configs/{name}.yaml" in (ROOT / "README.md").read_text()
