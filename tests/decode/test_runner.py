"""Masks of forwards."""

from __future__ import annotations

import torch

from trt_eagle3.decode.forward.runner import causal_mask


def test_causal_mask_is_its_callers_own() -> None:
    expected = [[True, False, False], [True, True, False], [True, True, True]]
    mask = causal_mask(3)
    assert mask.tolist() == expected
    mask.copy_(torch.zeros(3, 3))
    assert causal_mask(3).tolist() == expected
