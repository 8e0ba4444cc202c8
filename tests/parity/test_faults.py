"""Every fault of the catalogue that one prompt shows is caught by the check that is there for it,
and the report names the right tensor.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.caught import SINGLE, assert_caught
from tests.parity.conftest import LIMITS, TREE, inspect
from tests.parity.fault import MORE_TOKENS
from tests.parity.faults import FAULTS
from tests.parity.planting import plant_in
from tests.tiny import build_tiny
from trt_eagle3.parity.checks.registry import CHECKS


@pytest.mark.parametrize("name", SINGLE)
def test_planted_fault_is_caught_and_named(
    name: str, tree_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_caught(name, tree_bundle, tmp_path, monkeypatch)


COARSE = ("transposed weight", "no compaction", "d2t shifted")
"""Of the target's layers, of verified rows, of the draft."""


@pytest.fixture(scope="module")
def bfloat16_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = {"backend": "torch", "dtype": "bfloat16"}
    return build_tiny(
        tmp_path_factory.mktemp("bfloat16"), speculation=TREE, limits=LIMITS, engine=engine
    )


@pytest.mark.parametrize("name", [None, *COARSE])
def test_bfloat16_engine_is_sound_and_its_faults_are_named(
    name: str | None, bfloat16_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = plant_in(bfloat16_bundle, tmp_path, monkeypatch)
    if name:
        FAULTS[name].plant(planted)
    found = inspect(planted.engine(), monkeypatch, max_tokens=MORE_TOKENS)
    expected = (FAULTS[name].check, FAULTS[name].tensor) if name else None
    assert (found.diagnosis and (found.diagnosis.check, found.diagnosis.tensor)) == expected


def test_catalogue_is_large_and_reaches_every_stage() -> None:
    assert len(FAULTS) >= 25
    assert {check for fault in FAULTS.values() for check in (fault.check, *fault.also)} == set(
        CHECKS
    ), "a check never fails"
    assert {CHECKS[fault.check].stage for fault in FAULTS.values()} >= {
        *("bundle", "processor", "vision", "prefill", "decode", "target", "verify"),
        *("draft extend", "fuse", "draft", "propose", "batch", "sampling"),
    }
