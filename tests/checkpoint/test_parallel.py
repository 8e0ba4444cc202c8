"""P-EAGLE: EAGLE-3 drafts of several layers whose mask rows draft the rest of a chain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.drafts import (
    Geometry,
    target_spec,
    write_generic_draft,
    write_specforge_draft,
    write_speculators_draft,
)
from trt_eagle3.checkpoint.convert import convert_draft
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.checkpoint.manifest import Eagle3Manifest, ParallelRows, manifest_to_dict
from trt_eagle3.drafts.registry import manifest_from_dict
from trt_eagle3.errors import UserError

ROWS = ParallelRows(mask_token_id=90, num_drafts=7)
GIVEN = {"parallel": {"mask_token_id": 90, "num_drafts": 7}}
AUX: dict[str, Any] = {"aux": [2, 4, 5], "layers": 2}


def _add_mask_hidden(folder: Path, width: int = 96) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "mask_hidden": torch.ones(1, 1, width)}, folder / "model.safetensors")


def _write_speculators(folder: Path, **config: Any) -> None:
    proposals = [{"proposal_type": "greedy", "speculative_tokens": 7}]
    keys = {
        "architectures": ["PEagleDraftModel"],
        "embed_requires_grad": True,
        "mask_token_id": 90,
        "speculators_config": {"algorithm": "peagle", "proposal_methods": proposals},
        "speculators_model_type": "peagle",
    }
    write_speculators_draft(folder, **AUX, **{**keys, **config})
    _add_mask_hidden(folder)


def test_speculators_names_mask_token_and_number_of_drafts(tmp_path: Path) -> None:
    _write_speculators(tmp_path)
    manifest = read_draft(tmp_path, target_spec())
    assert (manifest.producer, manifest.num_layers) == ("speculators", 2)
    assert (manifest.parallel, manifest.aux_layers) == (ROWS, (1, 3, 4))
    assert manifest.tensors["mask_hidden"].shape == (1, 1, 96)
    copy = manifest_from_dict(manifest_to_dict(manifest))
    assert isinstance(copy, Eagle3Manifest)
    assert copy.parallel == ROWS


@pytest.mark.parametrize("key", ["pard_token", "ptd_token_id"])
def test_other_keys_of_the_mask_token_are_read(key: str, tmp_path: Path) -> None:
    _write_speculators(tmp_path, mask_token_id=None, **{key: 90})
    assert read_draft(tmp_path, target_spec()).parallel == ROWS


def test_specforge_writes_neither_so_both_are_given(tmp_path: Path) -> None:
    write_specforge_draft(tmp_path, embedding=True, architectures=["PEagleDraftModel"])
    _add_mask_hidden(tmp_path)
    with pytest.raises(UserError, match=r"mask_token_id: not in config.json. Set draft.overrides"):
        read_draft(tmp_path, target_spec())
    manifest = read_draft(tmp_path, target_spec(), GIVEN)
    assert (manifest.producer, manifest.parallel) == ("specforge", ROWS)
    assert manifest.residual == "hidden"


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "two mask tokens": ({"pard_token": 5}, {}, "parallel: mask_token_id has 90, pard_token has 5"),
    "mask outside": ({"mask_token_id": 96}, {}, "96 is outside the vocabulary of 96"),
    "no drafts": ({"speculators_config": {}}, {}, "speculative_tokens: not in config.json"),
    "too many drafts": (
        {},
        {"parallel": {"mask_token_id": 90, "num_drafts": 65}},
        "expected 1 to 64 drafts per forward, got 65",
    ),
    "count is a text": (
        {"speculators_config": {"proposal_methods": [{"speculative_tokens": "7"}]}},
        {},
        "speculative_tokens: expected a whole number, got '7'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradiction_is_refused(case: str, tmp_path: Path) -> None:
    config, overrides, message = REFUSED[case]
    _write_speculators(tmp_path, **config)
    with pytest.raises(UserError, match=message) as caught:
        read_draft(tmp_path, target_spec(), overrides)
    assert str(caught.value).isprintable()


def test_name_without_the_tensor_is_refused(tmp_path: Path) -> None:
    write_speculators_draft(tmp_path, **AUX, architectures=["PEagleDraftModel"])
    with pytest.raises(UserError, match=r"mask_hidden is missing, but config.json names P-EAGLE"):
        read_draft(tmp_path, target_spec())


def test_mask_hidden_of_another_width_is_refused(tmp_path: Path) -> None:
    write_generic_draft(tmp_path, Geometry())
    _add_mask_hidden(tmp_path, 64)
    with pytest.raises(UserError, match=r"mask_hidden: expected shape \[1, 1, 96\]"):
        read_draft(tmp_path, target_spec(), GIVEN)


def test_other_layouts_cannot_express_mask_rows(tmp_path: Path) -> None:
    _write_speculators(tmp_path)
    manifest = read_draft(tmp_path, target_spec())
    with pytest.raises(UserError, match="a P-EAGLE draft: no layout here holds its mask rows"):
        convert_draft(manifest, tmp_path / "copy", "speculators", "Qwen3ForCausalLM")


def test_override_without_the_tensor_is_refused(tmp_path: Path) -> None:
    write_generic_draft(tmp_path)
    with pytest.raises(UserError, match="parallel: mask_hidden is missing: not a P-EAGLE draft"):
        read_draft(tmp_path, target_spec(), GIVEN)
