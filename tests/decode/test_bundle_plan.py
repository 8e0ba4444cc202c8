"""The plan of a bundle: adaptive unless its config says no, and what its table is taken for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.decode.simulated_plan import CHAIN
from tests.decode.test_adaptive_plan import tuned
from tests.tiny import build_tiny
from trt_eagle3 import LLM
from trt_eagle3.decode.adaptive_plan import AdaptivePlan
from trt_eagle3.decode.bundle_plan import acceptance_prior


def test_acceptance_of_the_table_is_by_level_given_the_one_above() -> None:
    found = acceptance_prior(tuned({1: 1.0}), CHAIN)
    assert found[1, 1] == pytest.approx(0.8)
    assert found[2, 1] == pytest.approx(0.75)
    assert found[5, 1] == pytest.approx(0.75)


def test_bundle_is_served_adaptively_unless_its_config_says_no(tmp_path: Path) -> None:
    for adaptive_too in (True, False):
        folder = tmp_path / str(adaptive_too)
        bundle = build_tiny(folder, speculation={"adaptive": adaptive_too})
        with LLM(bundle) as engine:
            assert isinstance(engine.bundle.plan, AdaptivePlan) == adaptive_too
