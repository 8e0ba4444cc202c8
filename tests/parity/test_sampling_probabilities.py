"""The check of sampling filters: what of its logits is the reference's, and what is not."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.parity.evidence import evidence, expected_answer, measured


def test_reference_whose_tokens_tie_at_the_edge_of_a_filter_is_no_failure() -> None:
    """The program keeps all tokens that tie there, transformers one of them or another."""
    logits = torch.zeros(4, 64)
    logits[:, 0] = 3.0
    expected = replace(expected_answer((0, 0, 0, 0)), logits=logits)
    found = measured("sampling.probabilities", evidence([expected]))
    assert found.taken
    assert not found.failures
