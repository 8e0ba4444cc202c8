"""Why drafting is off, and the command that undoes it."""

from __future__ import annotations

from pathlib import Path

from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.policy.off import off_reason

ADAPTIVE, FIXED = SpeculationConfig(), SpeculationConfig(adaptive=False)


def test_adaptive_bundle_names_what_drafts_always(tmp_path: Path) -> None:
    found = off_reason(tmp_path, ADAPTIVE, has_draft=True) or ""
    assert "not expected to pay, by measured costs and acceptance" in found
    assert found.endswith("trt-eagle3 build PAIR.yaml --set speculation.adaptive=false")


def test_tuned_bundle_names_its_table_and_how_to_forget_it(tmp_path: Path) -> None:
    (tmp_path / "tuning.json").touch()
    found = off_reason(tmp_path, ADAPTIVE, has_draft=True) or ""
    assert f"by the costs in {tmp_path}/tuning.json" in found
    assert f"rm {tmp_path}/tuning.json" in found


def test_bundle_that_always_drafts_has_no_reason_and_one_without_a_draft_has(
    tmp_path: Path,
) -> None:
    assert off_reason(tmp_path, FIXED, has_draft=True) is None
    assert "no draft" in (off_reason(tmp_path, FIXED, has_draft=False) or "")
