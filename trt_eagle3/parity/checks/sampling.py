"""Checks of sampling: filtered probabilities, and tokens of verified trees over many seeds.

The logits are the engine's own, of an answer without speculation. The tree is built from them: the
answer's next tokens as a chain, each with a less likely sibling. So acceptance, rejection and the
bonus token all occur. The first token of an answer, and tokens without speculation, have no tree;
they are sampled too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from trt_eagle3.decode.sampling.sampler import Sampler
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.decode.speculation.accept import AcceptedPaths
from trt_eagle3.decode.speculation.proposal import tree_proposal
from trt_eagle3.decode.speculation.tree import Tree
from trt_eagle3.decode.speculation.tree_masks import TreeMasks
from trt_eagle3.decode.speculation.verify import LogitsForm, verify
from trt_eagle3.parity.checks.check_recorder import Measurements
from trt_eagle3.parity.checks.evidence import Evidence

__all__ = ["check_frequencies", "check_probabilities", "filtered_probs", "reference_probs"]
__all__ += ["reference_scores"]

_SETTINGS = {
    "temperature 0.7": SamplingParams(temperature=0.7),
    "top_k 5": SamplingParams(temperature=1.0, top_k=5),
    "top_p 0.8": SamplingParams(temperature=1.3, top_p=0.8),
    "min_p 0.1": SamplingParams(temperature=1.5, min_p=0.1),
    "all filters": SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02),
    "penalties": SamplingParams(
        temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3
    ),
    "bias": SamplingParams(temperature=0.9, logit_bias={0: 2.0, 3: -1.5, 7: 0.5}),
}
_TOKENS = 512  # best tokens of the tree's rows; they hold all of the mass
# the 16th best logit lies this far below the best: near-certain rows would test nothing
_WARM = 4.0
_APART = 1e-5  # logits are separated by this: of tied tokens a filter may keep any or all
_DRAWS, _BATCH = 5000, 250
_LEAST = 5.0  # expected count below which outcomes are pooled, the usual rule for Pearson's test
_UNSEEN = torch.empty(0, dtype=torch.int64)  # no tokens before
_TOO_SHORT = "no answer of four tokens or more"
_TREE = Tree.from_paths([(0,), (1,), (0, 0), (0, 1)])


def check_probabilities(e: Evidence, m: Measurements) -> None:
    """Compare filters and penalties with transformers' logits processors."""
    logits = _warm_logits(e)
    if logits is None:
        m.skip(_TOO_SHORT)
        return
    for name, sampling in _SETTINGS.items():
        for row, values in enumerate(logits):
            _add_probabilities(m, name, replace(sampling, seed=row), values)


def check_frequencies(e: Evidence, m: Measurements) -> None:
    """Compare frequencies of tokens with the probabilities of transformers' logits processors."""
    logits = _warm_logits(e)
    if logits is None:
        m.skip(_TOO_SHORT)
        return
    for name, sampling in _SETTINGS.items():
        if not sampling.changes_logits:
            _add_settings(m, name, sampling, logits)


def _warm_logits(e: Evidence) -> Tensor | None:
    """float32 [4, V]: logits of four tokens of the first answer that has four; None without one.

    They are spread so that few tokens are near-certain and no two logits of a row are equal.
    """
    rows = next((x.logits for x in e.expected if len(x.logits) >= 4), None)
    if rows is None:
        return None
    best = rows[:4].max(dim=0).values.topk(min(_TOKENS, rows.shape[1])).indices
    kept = rows[:4, best].double()
    ordered = kept.sort(dim=1, descending=True).values
    spread = (ordered[:, :1] - ordered[:, 15:16]).clamp(min=1e-6)
    warm = ((kept - ordered[:, :1]) * (_WARM / spread)).clamp(min=-60)
    ranks = warm.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (warm - _APART * ranks).float()


def _add_probabilities(
    m: Measurements, name: str, sampling: SamplingParams, values: Tensor
) -> None:
    """Compare accept probabilities of a root's children and of two levels below.

    Each level has one child for each of the likeliest tokens.
    """
    order = values.argsort(descending=True)
    drafted = torch.cat([order[:24], order[-4:]])
    prompt, first = order[torch.tensor([0, 2, 5])], int(order[1])
    found = _accept_probs(sampling, values, prompt, first, drafted)
    path = [first, *drafted[:2].tolist()]
    for depth, ours in enumerate(found):
        answer = path[: depth + 1]
        seen = torch.cat([prompt, torch.tensor(answer)])
        expected = reference_probs(values, sampling, seen, answer)[drafted]
        error = float((ours - expected).abs().max())
        detail = f"row {sampling.seed}, depth {depth + 1}"
        m.add(error, "", name, None, detail, compared=len(drafted))


def _accept_probs(
    sampling: SamplingParams, values: Tensor, prompt: Tensor, first: int, drafted: Tensor
) -> list[Tensor]:
    """Return by level the sampler's accept probability of each ``drafted`` token.

    The first level comes after the token ``first``, each next level after the best token above.
    """
    sampler = Sampler(sampling, prompt, len(values))
    root = torch.tensor([first]), torch.tensor([-1]), torch.ones(1, 1, dtype=torch.bool)
    sampler.verify(values[None], *root)
    sampler.remember([first])
    num, levels = len(drafted), 3
    tokens = torch.cat([torch.tensor([first]), *[drafted] * levels])
    nodes = [0, 1, num + 2]  # the path
    mask = torch.eye(len(tokens), dtype=torch.bool)
    for depth in range(levels):
        mask[1 + depth * num : 1 + (depth + 1) * num, nodes[: depth + 1]] = True
    parents = torch.tensor([-1, *(node for node in nodes for _ in range(num))])
    accept: Tensor = sampler.verify(values.expand(len(tokens), -1), tokens, parents, mask).accept
    return list(accept[1:].split(num))


def reference_scores(
    logits: Tensor, sampling: SamplingParams, seen: Tensor = _UNSEEN, answer: Sequence[int] = ()
) -> Tensor:
    """float64 [V]: ``logits`` f32 [V] after bias and penalties.

    The repetition penalty is transformers'. Bias, presence and frequency penalties, which
    transformers lacks, are computed by formula. ``seen`` int64: tokens of prompt and ``answer``.
    """
    scores = logits.double()[None].clone()
    for token, bias in sampling.logit_bias.items():
        scores[:, token] += bias
    if sampling.repetition_penalty != 1.0:
        scores = hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(
            seen[None], scores
        )
    scores = scores.clone()
    for token, times in Counter(answer).items():
        scores[:, token] -= sampling.presence_penalty + sampling.frequency_penalty * times
    return scores[0]


def reference_probs(
    logits: Tensor, sampling: SamplingParams, seen: Tensor = _UNSEEN, answer: Sequence[int] = ()
) -> Tensor:
    """float64 [V]: transformers' probabilities of ``reference_scores``; arguments as there."""
    return filtered_probs(reference_scores(logits, sampling, seen, answer), sampling)


def filtered_probs(scores: Tensor, sampling: SamplingParams) -> Tensor:
    """float64 [V]: ``scores`` float64 [V] after transformers' temperature and filters."""
    steps: list[Any] = [hf.TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.top_k:
        steps.append(hf.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        steps.append(hf.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        steps.append(hf.MinPLogitsWarper(sampling.min_p))
    rows = scores[None]
    for step in steps:
        rows = step(_UNSEEN[None], rows)
    probs: Tensor = rows.softmax(dim=-1)[0]
    return probs


def _add_settings(m: Measurements, name: str, sampling: SamplingParams, logits: Tensor) -> None:
    """Compare first, second and third tokens drawn from the tree, and tokens drawn without one."""
    first, second = (reference_probs(logits[row], sampling) for row in (0, 1))
    third = reference_probs(logits[3], sampling)
    tops = [p.argsort(descending=True)[:2].tolist() for p in (first, second)]
    drawn = _draw(sampling, logits, tops)
    after = [answer for answer in drawn if answer[0] == tops[0][0]]
    _add_frequencies(m, f"{name}: first token", [a[0] for a in drawn], first)
    _add_frequencies(m, f"{name}: second token", [a[1] for a in after if len(a) > 1], second)
    _add_frequencies(m, f"{name}: third token", [a[2] for a in after if len(a) > 2], third)
    alone = _draw_without_tree(sampling, logits[0])
    _add_frequencies(m, f"{name}: token without a tree", alone, first)


def _draw(
    sampling: SamplingParams, logits: Tensor, tops: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """Draw answers to the tree of the best two tokens ``tops`` of two levels, one per seed."""
    # the second best child of the root comes first, so it is rejected more often than accepted
    tokens = torch.tensor([0, tops[0][0], tops[0][1], tops[1][1], tops[1][0]])
    rows = logits[torch.tensor([0, 1, 2, 3, 3])]
    return [
        answer
        for start in range(0, _DRAWS, _BATCH)
        for answer in _sample_tokens(sampling, tokens, rows, range(start, start + _BATCH), _TREE)
    ]


def _add_frequencies(m: Measurements, name: str, output_ids: Sequence[int], probs: Tensor) -> None:
    value, pools = _p_value(Counter(output_ids), probs)
    # a single pool of outcomes does not test frequencies
    compared = len(output_ids) if pools > 1 else 0
    m.add(value, "", name, None, f"{len(output_ids)} draws", compared=compared)


def _draw_without_tree(sampling: SamplingParams, logits: Tensor) -> list[int]:
    """Draw first tokens of answers and tokens of forwards over a root alone.

    Each kind is a quarter of the draws.
    """
    root, count = Tree.root_only(), _DRAWS // 4
    output_ids = [
        int(Sampler(replace(sampling, seed=seed), _UNSEEN, len(logits)).first(logits))
        for seed in range(count)
    ]
    for start in range(count, 2 * count, _BATCH):
        seeds = range(start, min(start + _BATCH, 2 * count))
        answers = _sample_tokens(sampling, torch.tensor([0]), logits[None], seeds, root)
        output_ids += [answer[0] for answer in answers]
    return output_ids


def _sample_tokens(
    sampling: SamplingParams, tokens: Tensor, logits: Tensor, seeds: Sequence[int], tree: Tree
) -> list[tuple[int, ...]]:
    count, vocab = len(seeds), logits.shape[1]
    samplers = [Sampler(replace(sampling, seed=seed), _UNSEEN, vocab) for seed in seeds]
    proposal = tree_proposal(tree, tokens.expand(count, -1))
    masks = TreeMasks(samplers, proposal)
    paths = verify(LogitsForm.FLOAT32, samplers, proposal, logits.expand(count, -1, -1), masks)
    return [a.tokens for a in AcceptedPaths.unpacked(paths.packed().tolist(), tree.depth)]


def _p_value(counts: Counter[int], probs: Tensor) -> tuple[float, int]:
    """Run Pearson's chi-square test of ``counts`` against ``probs`` [V].

    Returns the p-value and the number of compared pools of outcomes. The p-value is 0 if an
    outcome of probability 0 was drawn.
    """
    pools = _pools(counts, probs)
    if any(float(probs[token]) <= 0.0 for token in counts):
        return 0.0, len(pools)
    if len(pools) < 2:
        return 1.0, len(pools)
    statistic = sum((found - expected) ** 2 / expected for expected, found in pools)
    half = torch.tensor([(len(pools) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1])), len(pools)


def _pools(counts: Counter[int], probs: Tensor) -> list[tuple[float, float]]:
    """Return expected and found count of each outcome; rare outcomes are pooled."""
    total = sum(counts.values())
    pools: list[tuple[float, float]] = []
    rest_expected = rest_found = 0.0
    for token in probs.argsort(descending=True).tolist():
        expected = total * float(probs[token])
        if expected >= _LEAST:
            pools.append((expected, counts[token]))
        else:
            rest_expected, rest_found = rest_expected + expected, rest_found + counts[token]
    if rest_expected < _LEAST and pools:
        expected, found = pools.pop()
        rest_expected, rest_found = expected + rest_expected, found + rest_found
    return [*pools, (rest_expected, rest_found)]
