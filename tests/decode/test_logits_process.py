"""Bias, penalties and early ends at the nodes of a tree, against each path by formula."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trt_eagle3.decode.sampling.logits_process import History, process_logits
from trt_eagle3.decode.sampling.sampler import Sampler
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.decode.speculation.tree import Tree

VOCAB, END = 12, 11
TREE = Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
PROMPT = [3, 4, 4]


def by_formula(logits: Tensor, answer: list[int], s: SamplingParams) -> Tensor:
    """f32 [V] after ``answer``: OpenAI's and CTRL's formulas, token by token."""
    found, times = logits.clone(), Counter(answer)
    for token in range(VOCAB):
        value = float(logits[token]) + s.logit_bias.get(token, 0.0)
        if token in times or token in PROMPT:
            value = value / s.repetition_penalty if value > 0 else value * s.repetition_penalty
        value -= s.presence_penalty * (token in times) + s.frequency_penalty * times[token]
        early = len(answer) < s.min_tokens and token in (END, *s.stop_token_ids)
        found[token] = -torch.inf if early else value
    return found


def processed(sampling: SamplingParams, answer: list[int], tokens: list[int], x: Tensor) -> Tensor:
    sampler = Sampler(sampling, torch.tensor(PROMPT), VOCAB, end_ids=[END])
    for token in answer:
        sampler.remember([token])
    return process_logits([sampler], x[None], torch.tensor([tokens]), TREE.mask[None], None)[0]


OPTIONS: dict[str, Any] = {
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": 0.9},
    "repetition": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": {2: 5.0, 7: -100.0}},
    "early": {"min_tokens": 4, "stop_token_ids": [6]},
}
OPTIONS["all"] = {"logit_bias": {1: 2.0}, "min_tokens": 3, "frequency_penalty": -0.4}
OPTIONS["all"] |= {"presence_penalty": 0.5, "repetition_penalty": 1.2}


@pytest.mark.parametrize("name", OPTIONS)
@settings(max_examples=40)
@given(
    answer=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
    drafted=st.lists(st.integers(0, VOCAB - 1), min_size=5, max_size=5),
    seed=st.integers(0, 99),
)
def test_every_node_counts_its_own_path(
    name: str, answer: list[int], drafted: list[int], seed: int
) -> None:
    sampling = SamplingParams(**OPTIONS[name])
    x = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(seed))
    tokens = [answer[-1], *drafted]
    found = processed(sampling, answer, tokens, x)
    paths = [answer]
    for token, parent in zip(drafted, TREE.parents[1:], strict=True):
        paths.append([*paths[parent], token])
    expected = torch.stack([by_formula(row, p, sampling) for row, p in zip(x, paths, strict=True)])
    torch.testing.assert_close(found, expected)


def test_logits_that_nothing_changes_are_not_copied() -> None:
    x = torch.randn(1, 6, VOCAB)
    sampler = Sampler(SamplingParams(), torch.tensor(PROMPT), VOCAB)
    none = torch.zeros(1, 6, dtype=torch.int64)
    assert process_logits([sampler], x, none, TREE.mask[None], None) is x


def _bias_twice(patch: pytest.MonkeyPatch) -> None:
    true = Sampler.bias_on
    patch.setattr(Sampler, "bias_on", lambda self, device: 2 * true(self, device))


def _penalties_of_the_root(patch: pytest.MonkeyPatch) -> None:
    true = History.penalise
    own = partial(torch.eye, dtype=torch.bool)
    patch.setattr(History, "penalise", lambda self, x, t, _: true(self, x, t, own(len(t))))


def _min_tokens_of_the_root(patch: pytest.MonkeyPatch) -> None:
    """A node's depth does not count."""
    patch.setattr(torch.Tensor, "sum", lambda self, *_, **__: torch.ones(len(self)))


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (_bias_twice, "bias"),
        (_penalties_of_the_root, "frequency"),
        (_min_tokens_of_the_root, "early"),
    ],
)
def test_planted_fault_is_caught(plant: Any, name: str) -> None:
    sampling, x = SamplingParams(**OPTIONS[name]), torch.zeros(6, VOCAB)
    tokens, paths = [1, 2, 3, 2, 5, 2], [[1], [1, 2], [1, 3], [1, 2, 2], [1, 2, 5], [1, 2, 2, 2]]
    expected = torch.stack([by_formula(row, p, sampling) for row, p in zip(x, paths, strict=True)])
    torch.testing.assert_close(processed(sampling, [1], tokens, x), expected)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        found = processed(sampling, [1], tokens, x)
    assert not torch.allclose(found, expected)
