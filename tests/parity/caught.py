"""Whether validation catches a planted fault: by the check that is there for it, with the right
tensor named.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.conftest import BLOCKS, WHOLE_CALL, inspect
from tests.parity.faults import FAULTS
from tests.parity.planting import plant_in
from trt_eagle3.errors import CheckFailedError
from trt_eagle3.parity.checks.registry import CHECKS
from trt_eagle3.parity.reference.sources import read_sources
from trt_eagle3.parity.report.summary import summarise

__all__ = ["BLOCK", "QUANTISED", "SERVED", "SINGLE", "assert_caught"]

BLOCK = [name for name, fault in FAULTS.items() if fault.bundle in BLOCKS]
"""Faults of bundles of ``BLOCKS``."""
QUANTISED = [name for name, fault in FAULTS.items() if fault.bundle and name not in BLOCK]
"""Faults of quantised bundles."""
SERVED = [name for name, fault in FAULTS.items() if not fault.bundle and fault.looks]
"""Those that a prompt alone never meets: of batches, sampling, options, and of unused bytes."""
SINGLE = [name for name in FAULTS if name not in {*BLOCK, *QUANTISED, *SERVED}]
"""Those that one prompt shows."""


def assert_caught(name: str, bundle: Path, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Plant fault ``name`` of the catalogue in a copy of ``bundle``, in ``folder``."""
    fault = FAULTS[name]
    planted = plant_in(bundle, folder, patch)
    if fault.bundle:
        planted.spec, manifest = read_sources(planted.engine())
        assert manifest is not None
        planted.manifest = manifest
    fault.plant(planted)
    settings, asked = {"temperature 0.7", fault.tensor}, {"grammar", fault.tensor}
    names = list(CHECKS)
    later = names[names.index(fault.check) + 1 :]
    found = inspect(
        planted.engine(),
        patch,
        fault.looks,
        settings,
        asked=asked,
        max_tokens=fault.max_tokens,
        option_tokens=WHOLE_CALL,
        own_sources=bool(fault.bundle),
        left_out=[name for name in later if name not in fault.also],
    )
    diagnosis = found.diagnosis  # all that was found is long to print
    assert diagnosis is not None, "no check failed"
    named = (diagnosis.check, diagnosis.tensor)
    assert named == (fault.check, fault.tensor), named
    assert diagnosis.stage == CHECKS[fault.check].stage
    held = [check for check in fault.also if not found.recorder[check].failures]
    assert not held, held
    report = summarise(found, suite="test", reference="PyTorch")
    assert not report.passed
    with pytest.raises(CheckFailedError, match=fault.check):
        report.check()
