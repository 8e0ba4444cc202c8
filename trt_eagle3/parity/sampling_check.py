"""Gates on sampling: what the filters make of logits, and what verified trees then say, over many
random numbers.

The logits are the engine's own, of a plain answer. The tree is made of them: the answer's next
tokens as a chain, each with a sibling that the target likes less, so that acceptance, rejection and
the bonus token all happen. The first token of an answer and those of plain decoding have no tree;
they are drawn too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from trt_eagle3.decode.propose import Proposal
from trt_eagle3.decode.sampling import Sampler
from trt_eagle3.decode.sampling_params import SamplingParams
from trt_eagle3.decode.sequence import SequenceState
from trt_eagle3.decode.tree import Tree
from trt_eagle3.decode.verify import verify_tree
from trt_eagle3.parity.board import Board

__all__ = ["check_sampling", "reference_probs"]

_SETTINGS = {
    "temperature 0.7": SamplingParams(temperature=0.7),
    "top_k 5": SamplingParams(temperature=1.0, top_k=5),
    "top_p 0.8": SamplingParams(temperature=1.3, top_p=0.8),
    "min_p 0.1": SamplingParams(temperature=1.5, min_p=0.1),
    "all filters": SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02),
    "penalties": SamplingParams(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5),
}
_TOKENS = 512  # of the vocabulary: the best of the tree's rows, on which all of their mass lies
# logits that the 16th best token is brought below the best: certain rows would test nothing
_WARM = 4.0
_DRAWS, _BATCH = 5000, 250
_LEAST = 5.0  # expected count below which outcomes are pooled, the usual rule for Pearson's test
_NOBODY = torch.empty(0, dtype=torch.int64)  # tokens seen before
_TREE = Tree.from_paths([(0,), (1,), (0, 0), (0, 1)])


@dataclass(frozen=True)
class _Drawn:
    """All that ``verify_tree`` wants of a sequence."""

    sampler: Sampler


def check_sampling(board: Board, logits: Sequence[Tensor], token_ids: Sequence[Tensor]) -> None:
    """Both gates, on the logits f32 [A, V] of answers with tokens int64 [A]: the first with enough
    of them.

    The reference for probabilities is transformers' logits processors; for frequencies, those
    probabilities.
    """
    rows = next((x for x in logits if len(x) >= 4), None)
    tokens = next((t for t, x in zip(token_ids, logits, strict=True) if len(x) >= 4), None)
    if rows is None or tokens is None:
        board.skip(
            ("sampling.probabilities", "sampling.tokens"), "no answer of four tokens or more"
        )
        return
    best = rows[:4].max(dim=0).values.topk(min(_TOKENS, rows.shape[1])).indices
    kept = rows[:4, best].double()
    ordered = kept.sort(dim=1, descending=True).values
    spread = (ordered[:, :1] - ordered[:, 15:16]).clamp(min=1e-6)
    warm = ((kept - ordered[:, :1]) * (_WARM / spread)).clamp(min=-60).float()
    for name, sampling in _SETTINGS.items():
        _check_probabilities(board, name, sampling, warm)
        if not sampling.penalised:
            _check_frequencies(board, name, sampling, warm)


def _check_probabilities(board: Board, name: str, sampling: SamplingParams, logits: Tensor) -> None:
    """Chances of acceptance of a root's children, one for each of the likeliest tokens, and two
    levels below.
    """
    for row, values in enumerate(logits):
        order = values.argsort(descending=True)
        drafted = torch.cat([order[:24], order[-4:]])
        prompt, output_ids = order[torch.tensor([0, 2, 5])], int(order[1])
        sampler = Sampler(replace(sampling, seed=row), prompt, len(values))
        sampler.verdict(
            values[None],
            torch.tensor([output_ids]),
            torch.tensor([-1]),
            torch.ones(1, 1, dtype=torch.bool),
        )
        sampler.remember([output_ids])
        # each of them after the one before, with all that are drafted below
        path = [output_ids, *drafted[:2].tolist()]
        tokens = torch.cat([torch.tensor([output_ids]), *[drafted] * len(path)])
        num = len(drafted)
        nodes = [0, 1, num + 2]  # of the path
        mask = torch.eye(len(tokens), dtype=torch.bool)
        for depth in range(len(path)):
            mask[1 + depth * num : 1 + (depth + 1) * num, nodes[: depth + 1]] = True
        parents = torch.tensor([-1, *(node for node in nodes for _ in range(num))])
        found = sampler.verdict(values.expand(len(tokens), -1), tokens, parents, mask).accept[1:]
        for depth, ours in enumerate(found.split(num)):
            answer = path[: depth + 1]
            expected = reference_probs(
                values, sampling, torch.cat([prompt, torch.tensor(answer)]), answer
            )[drafted]
            error = float((ours - expected).abs().max())
            board.add(
                "sampling.probabilities", error, "", name, None, f"row {row}, depth {depth + 1}"
            )


def reference_probs(
    logits: Tensor, sampling: SamplingParams, seen: Tensor = _NOBODY, answer: Sequence[int] = ()
) -> Tensor:
    """float64 [V]: what transformers makes of ``logits`` f32 [V]; the presence penalty, which it
    lacks, by formula.
    """
    scores = logits.double()[None]
    if sampling.repetition_penalty != 1.0:
        scores = hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(
            seen[None], scores
        )
    scores = scores.clone()
    scores[:, list(answer)] -= sampling.presence_penalty
    steps: list[Any] = [hf.TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.top_k:
        steps.append(hf.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        steps.append(hf.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        steps.append(hf.MinPLogitsWarper(sampling.min_p))
    for step in steps:
        scores = step(seen[None], scores)
    probs: Tensor = scores.softmax(dim=-1)[0]
    return probs


def _check_frequencies(board: Board, name: str, sampling: SamplingParams, logits: Tensor) -> None:
    """First tokens said from the tree, second and third ones after the chain's, and those said
    without a tree.
    """
    first, second = (reference_probs(logits[row], sampling) for row in (0, 1))
    tops = [p.argsort(descending=True)[:2].tolist() for p in (first, second)]
    # of the root the second best stands first, so that it is rejected more often than not
    tokens = torch.tensor([0, tops[0][0], tops[0][1], tops[1][1], tops[1][0]])
    rows = logits[torch.tensor([0, 1, 2, 3, 3])]
    output_ids = [
        answer
        for start in range(0, _DRAWS, _BATCH)
        for answer in _sample_tokens(sampling, tokens, rows, range(start, start + _BATCH), _TREE)
    ]
    third = reference_probs(logits[3], sampling)
    after = [s for s in output_ids if s[0] == tops[0][0]]
    deep = [s for s in after if len(s) > 2]
    _add_frequencies(board, f"{name}: first token", [s[0] for s in output_ids], first)
    _add_frequencies(board, f"{name}: second token", [s[1] for s in after if len(s) > 1], second)
    _add_frequencies(board, f"{name}: third token", [s[2] for s in deep], third)
    _add_frequencies(
        board, f"{name}: token without a tree", _say_plainly(sampling, logits[0]), first
    )


def _add_frequencies(board: Board, name: str, output_ids: Sequence[int], probs: Tensor) -> None:
    if output_ids:
        board.add(
            "sampling.tokens",
            _p_value(Counter(output_ids), probs),
            "",
            name,
            None,
            f"{len(output_ids)} draws",
        )


def _say_plainly(sampling: SamplingParams, logits: Tensor) -> list[int]:
    """First tokens of answers, and those of passes over a root alone: a quarter of the draws
    each.
    """
    root, count = Tree.root_only(), _DRAWS // 4
    output_ids = [
        int(Sampler(replace(sampling, seed=seed), _NOBODY, len(logits)).first(logits))
        for seed in range(count)
    ]
    for start in range(count, 2 * count, _BATCH):
        seeds = range(start, min(start + _BATCH, 2 * count))
        output_ids += [
            answer[0]
            for answer in _sample_tokens(sampling, torch.tensor([0]), logits[None], seeds, root)
        ]
    return output_ids


def _sample_tokens(
    sampling: SamplingParams, tokens: Tensor, logits: Tensor, seeds: Sequence[int], tree: Tree
) -> list[tuple[int, ...]]:
    count, vocab = len(seeds), logits.shape[1]
    sequences = [_Drawn(Sampler(replace(sampling, seed=seed), _NOBODY, vocab)) for seed in seeds]
    proposal = Proposal(
        tokens=tokens.expand(count, -1),
        parents=torch.tensor(tree.parents).expand(count, -1),
        depths=tree.depths.expand(count, -1),
        mask=tree.mask.expand(count, -1, -1),
    )
    found = verify_tree(
        cast("Sequence[SequenceState]", sequences),
        proposal,
        logits.expand(count, -1, -1),
        [len(tokens)] * count,
    )
    return [accepted.tokens for accepted in found]


def _p_value(counts: Counter[int], probs: Tensor) -> float:
    """Pearson's chi-square test of ``counts`` against ``probs`` [V]; outcomes that cannot be are
    impossible at once.
    """
    total = sum(counts.values())
    if any(float(probs[token]) <= 0.0 for token in counts):
        return 0.0
    pools: list[tuple[float, float]] = []
    rest_expected = rest_found = 0.0
    for token in probs.argsort(descending=True).tolist():
        expected = total * float(probs[token])
        if expected >= _LEAST:
            pools.append((expected, counts[token]))
        else:
            rest_expected, rest_found = rest_expected + expected, rest_found + counts[token]
    if rest_expected >= _LEAST or not pools:
        pools.append((rest_expected, rest_found))
    else:
        expected, found = pools.pop()
        pools.append((expected + rest_expected, found + rest_found))
    if len(pools) < 2:
        return 1.0
    statistic = sum((found - expected) ** 2 / expected for expected, found in pools)
    half = torch.tensor([(len(pools) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
