"""d2t is offsets to distinct ids in range; absolute ids are recognised, and converted where the
user says so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.drafts import (
    Geometry,
    target_spec,
    write_modelopt_draft,
    write_specforge_draft,
)
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.checkpoint.tensor_index import read_tensor
from trt_eagle3.errors import UserError

Tensors = dict[str, torch.Tensor]


def _edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _absolute(tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


@pytest.mark.parametrize("with_t2d", [True, False])
def test_absolute_ids_are_refused_with_the_override_that_converts_them(
    with_t2d: bool, tmp_path: Path
) -> None:
    # without t2d, only ids that overflow when read as offsets can be told from offsets
    write_specforge_draft(tmp_path, Geometry(draft_vocab=64))
    _edit(tmp_path, _absolute)
    if not with_t2d:
        _edit(tmp_path, lambda t: t.pop("t2d"))
    with pytest.raises(UserError, match=r"absolute target ids.*draft\.overrides\.d2t: absolute$"):
        read_draft(tmp_path, target_spec())


def test_absolute_ids_are_converted_where_the_user_says_so(tmp_path: Path) -> None:
    weights = write_specforge_draft(tmp_path / "draft")
    _edit(tmp_path / "draft", _absolute)
    before = (tmp_path / "draft" / "model.safetensors").read_bytes()
    manifest = read_draft(
        tmp_path / "draft", target_spec(), {"d2t": "absolute"}, cache=tmp_path / "cache"
    )
    assert torch.equal(read_tensor(manifest.tensors["d2t"]), weights["d2t"])
    assert manifest.sources["d2t"].kind == "override"
    assert tmp_path / "cache" in manifest.tensors["d2t"].file.parents
    assert (tmp_path / "draft" / "model.safetensors").read_bytes() == before


def test_offsets_that_could_be_absolute_are_taken_with_a_warning(tmp_path: Path) -> None:
    write_modelopt_draft(tmp_path)
    _edit(tmp_path, lambda t: t.update(d2t=torch.arange(24)))
    assert any(
        "could be absolute" in warning for warning in read_draft(tmp_path, target_spec()).warnings
    )


@pytest.mark.parametrize("write", [write_modelopt_draft, write_specforge_draft])
def test_sound_offsets_are_taken_without_a_warning(
    write: Callable[[Path], Any], tmp_path: Path
) -> None:
    write(tmp_path)
    assert not [
        warning for warning in read_draft(tmp_path, target_spec()).warnings if "d2t" in warning
    ]


def test_offsets_that_begin_with_zeros_and_a_whole_vocabulary_of_zeros_are_no_cause_for_a_warning(
    tmp_path: Path,
) -> None:
    write_modelopt_draft(tmp_path / "some")
    _edit(tmp_path / "some", lambda t: t.update(d2t=torch.arange(24) // 2))
    write_modelopt_draft(tmp_path / "all", Geometry(draft_vocab=96))
    _edit(tmp_path / "all", lambda t: t.update(d2t=torch.zeros(96, dtype=torch.long)))
    for name in ("some", "all"):
        assert not [
            warning
            for warning in read_draft(tmp_path / name, target_spec()).warnings
            if "d2t" in warning
        ]


def test_a_map_that_was_never_filled_in_is_warned_of(tmp_path: Path) -> None:
    write_specforge_draft(tmp_path)
    _edit(
        tmp_path,
        lambda t: t.update(
            d2t=torch.zeros(24, dtype=torch.long), t2d=torch.ones(96, dtype=torch.bool)
        ),
    )
    assert [w for w in read_draft(tmp_path, target_spec()).warnings if "d2t is all zeros" in w]


def test_a_mask_of_other_ids_is_warned_of(tmp_path: Path) -> None:
    write_specforge_draft(tmp_path)
    _edit(tmp_path, lambda t: t.update(t2d=torch.arange(96) < 24))
    assert [w for w in read_draft(tmp_path, target_spec()).warnings if "t2d marks 24 ids" in w]


def test_a_32_bit_map_is_read(tmp_path: Path) -> None:
    weights = write_modelopt_draft(tmp_path)
    _edit(tmp_path, lambda t: t.update(d2t=t["d2t"].int()))
    manifest = read_draft(tmp_path, target_spec())
    assert read_tensor(manifest.tensors["d2t"]).tolist() == weights["d2t"].tolist()


def _set(index: int, value: int) -> Callable[[Tensors], object]:
    return lambda t: t["d2t"].__setitem__(index, value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_set(-1, 1000), ["d2t[23] = 1000", "would be target id 1023", "out of range 0 to 95"]),
        (_set(0, -1), ["d2t[0] = -1", "would be target id -1"]),
        (
            lambda t: t["d2t"].__setitem__(7, t["d2t"][4] - 3),
            ["d2t[7] = ", "draft ids 4 and 7 are both target id", "must be distinct", "offsets"],
        ),
        (
            lambda t: t.update(d2t=t["d2t"][:-1].clone()),
            ["draft vocabulary", "lm_head.weight has 24", "d2t has 23"],
        ),
        (lambda t: t.update(d2t=t["d2t"].float()), ["expected whole numbers, got F32"]),
        (lambda t: t.update(d2t=t["d2t"][None].clone()), ["draft vocabulary"]),
    ],
)
def test_a_map_that_is_not_sound_is_refused(
    change: Callable[[Tensors], Any], said: list[str], tmp_path: Path
) -> None:
    write_modelopt_draft(tmp_path)
    _edit(tmp_path, change)
    with pytest.raises(UserError) as caught:
        read_draft(tmp_path, target_spec())
    assert all(part in str(caught.value) for part in said), str(caught.value)
    assert "\n" not in str(caught.value)


def test_unsound_absolute_ids_are_refused(tmp_path: Path) -> None:
    write_modelopt_draft(tmp_path / "draft")
    _edit(tmp_path / "draft", lambda t: t.update(d2t=torch.full((24,), 3)))
    with pytest.raises(UserError, match="must be distinct"):
        read_draft(tmp_path / "draft", target_spec(), {"d2t": "absolute"}, cache=tmp_path)


def by_frequency(tensors: Tensors) -> None:
    """Give ``tensors`` the vocabulary in ModelOpt's order, of frequency: ids do not ascend."""
    drafted = len(tensors["d2t"])
    order = torch.randperm(drafted, generator=torch.Generator().manual_seed(3))
    ids = (tensors["d2t"] + torch.arange(drafted))[order]
    tensors["d2t"] = ids - torch.arange(drafted)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order].clone()


@pytest.mark.parametrize("write", [write_modelopt_draft, write_specforge_draft])
def test_ids_in_order_of_frequency_are_read(write: Callable[[Path], Any], tmp_path: Path) -> None:
    weights = write(tmp_path)
    _edit(tmp_path, by_frequency)
    manifest = read_draft(tmp_path, target_spec())
    assert not [warning for warning in manifest.warnings if "2t" in warning]
    found = read_tensor(manifest.tensors["d2t"]) + torch.arange(24)
    assert found.tolist() != sorted(found.tolist())
    assert sorted(found.tolist()) == (weights["d2t"] + torch.arange(24)).tolist()
    assert manifest.sources["d2t"].detail == "offsets: id = i + d2t[i]"


@pytest.mark.parametrize("with_t2d", [True, False])
def test_absolute_ids_in_order_of_frequency_are_refused_and_converted(
    with_t2d: bool, tmp_path: Path
) -> None:
    write_specforge_draft(tmp_path / "draft", Geometry(draft_vocab=64))
    _edit(tmp_path / "draft", by_frequency)
    offsets = load_file(tmp_path / "draft" / "model.safetensors")["d2t"]
    _edit(tmp_path / "draft", _absolute)
    if not with_t2d:
        _edit(tmp_path / "draft", lambda t: t.pop("t2d"))
    with pytest.raises(UserError, match=r"absolute target ids.*draft\.overrides\.d2t: absolute$"):
        read_draft(tmp_path / "draft", target_spec())
    manifest = read_draft(
        tmp_path / "draft", target_spec(), {"d2t": "absolute"}, cache=tmp_path / "cache"
    )
    assert torch.equal(read_tensor(manifest.tensors["d2t"]), offsets)


def test_a_modelopt_draft_with_t2d_is_still_modelopts(tmp_path: Path) -> None:
    weights = write_modelopt_draft(tmp_path)
    mask = torch.zeros(96, dtype=torch.bool)
    mask[weights["d2t"] + torch.arange(24)] = True
    _edit(tmp_path, by_frequency)
    _edit(tmp_path, lambda t: t.update(t2d=mask))
    manifest = read_draft(tmp_path, target_spec())
    assert (manifest.producer, manifest.image_rows) == ("modelopt", "vision")
    assert not [warning for warning in manifest.warnings if "2t" in warning]


def test_a_map_that_moves_ids_beside_the_targets_head_is_refused(tmp_path: Path) -> None:
    write_modelopt_draft(tmp_path, Geometry(draft_vocab=96))
    moved = torch.arange(96).roll(1) - torch.arange(96)
    _edit(tmp_path, lambda t: t.update(d2t=moved))
    found = read_draft(tmp_path, target_spec())
    assert torch.equal(read_tensor(found.tensors["d2t"]), moved)
    with pytest.raises(UserError, match=r"d2t: draft ids are not target ids, and .* no lm_head"):
        read_draft(tmp_path, target_spec(), {"head": "target"})
