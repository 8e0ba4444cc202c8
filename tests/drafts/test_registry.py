"""Kinds of drafts: each is found by its name, and nobody outside ``drafts`` knows one of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.drafts.mtp.head import add_head, read_head
from tests.hybrid import save_qwen3_5_text
from tests.tiny import DRAFT, TARGET
from trt_eagle3.checkpoint.manifest import Eagle3Manifest, ParallelRows, manifest_to_dict
from trt_eagle3.drafts.registry import KINDS, find_draft, kind_named, kind_of, manifest_from_dict
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import read_target

PACKAGE = Path(__file__).parents[2] / "trt_eagle3"
_NAMES = re.compile(r"Eagle3Manifest|MtpManifest|drafts\.(eagle3|mtp)|kind == .(eagle3|mtp)\b")


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_says_its_own_name(name: str) -> None:
    assert kind_named(name).manifest.kind == name


def test_a_name_finds_its_kind() -> None:
    claims = {
        n: [k for k in KINDS if kind_named(k).claims(n, DRAFT)] for n in ("mtp", "./mtp", "a/b")
    }
    assert claims == {"mtp": ["mtp", "eagle3"], "./mtp": ["eagle3"], "a/b": ["eagle3"]}
    assert kind_of(find_draft(str(DRAFT), read_target(TARGET), {})).title == "EAGLE-3"


def test_bundle_of_an_older_version_names_no_kind() -> None:
    plain = manifest_to_dict(find_draft(str(DRAFT), read_target(TARGET), {}))
    assert plain.pop("kind") == "eagle3"
    assert isinstance(manifest_from_dict(plain), Eagle3Manifest)


def test_unknown_kind_is_told_in_one_line() -> None:
    with pytest.raises(
        UserError, match="expected one of mtp, block, eagle3, got 'dflash'"
    ) as caught:
        manifest_from_dict({"kind": "dflash"})
    assert "\n" not in str(caught.value)


def test_head_of_a_target_has_no_files_to_write(tmp_path: Path) -> None:
    save_qwen3_5_text(tmp_path)
    manifest = read_head(add_head(tmp_path))
    with pytest.raises(UserError, match="has no files of its own"):
        kind_of(manifest).export(manifest, tmp_path / "copy", "speculators", "Qwen3_5ForCausalLM")


def test_vllm_is_told_the_method_of_every_draft() -> None:
    target = read_target(TARGET)
    folders = {
        name: find_draft(str(TARGET.parent / name), target, {}) for name in ("dflash", "dspark")
    }
    eagle = find_draft(str(DRAFT), target, {})
    assert isinstance(eagle, Eagle3Manifest)
    drafts = {
        **folders,
        "eagle3": eagle,
        "p-eagle": replace(eagle, parallel=ParallelRows(mask_token_id=0, num_drafts=4)),
    }
    assert {name: dict(kind_of(m).vllm_options(m)) for name, m in drafts.items()} == {
        "dflash": {"method": "dflash"},
        "dspark": {"method": "dspark"},
        "eagle3": {"method": "eagle3"},
        "p-eagle": {"method": "eagle3", "parallel_drafting": True},
    }


def test_nobody_outside_knows_a_kind() -> None:
    rooms = (PACKAGE / "drafts", PACKAGE / "checkpoint")
    outside = (p for p in PACKAGE.rglob("*.py") if not p.is_relative_to(rooms[0]))
    knowing = [p for p in outside if _NAMES.search(p.read_text())]
    assert [p for p in knowing if not p.is_relative_to(rooms[1])] == []
    assert not any("MtpManifest" in p.read_text() for p in knowing)
