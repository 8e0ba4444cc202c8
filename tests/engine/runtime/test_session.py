"""What every session can do, whatever its backend."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from trt_eagle3.engine.runtime.session import Capabilities, Reduction, Session
from trt_eagle3.spec import StateSpec


class Doubling(Session):
    """A backend that implements what it must."""

    states: tuple[StateSpec, ...] = ()

    def bind(self, name: str, tensor: Tensor) -> None:
        raise AssertionError(name, tensor)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"logits": 2 * inputs["x"], "features_out": inputs["x"][..., None]}


def test_session_with_nothing_of_its_own_reduces_after_the_run() -> None:
    found = Doubling().run_reduced({"x": torch.ones(2, 3)}, {"logits": Reduction("sum", torch.sum)})
    assert found["logits"] == 12
    assert found["features_out"].shape == (2, 3, 1)


def test_session_with_nothing_of_its_own_returns_features_of_the_rows_that_are_read() -> None:
    x, rows = torch.arange(6.0).view(2, 3), torch.tensor([[2], [0]], dtype=torch.int32)
    found = Doubling().run_prompt({"x": x, "logit_rows": rows})
    assert found["features_out"].flatten().tolist() == [2, 3]
    assert torch.equal(found["logits"], 2 * x)


def test_session_with_nothing_of_its_own_has_no_capabilities() -> None:
    session = Doubling()
    assert session.capabilities == Capabilities(reduces=False, mixes=False)
    assert session.capture_rows(64, 4, lambda: True) == 0
    with pytest.raises(AssertionError, match="Doubling does not mix"):
        session.run_mixed([{}], [None])
