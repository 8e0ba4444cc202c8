"""Sampling as its fields say it, for one token at a time, in plain Python floats: sort and scan.

Shapes: V vocab.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from trt_eagle3.decode.sampling.sampling_params import SamplingParams

__all__ = ["edge_distance", "ref_penalised", "ref_probs"]


def ref_penalised(
    logits: Sequence[float], prompt: Sequence[int], answer: Sequence[int], sampling: SamplingParams
) -> list[float]:
    """Logits [V] after ``prompt`` and ``answer`` with their penalties."""
    found = []
    for token, logit in enumerate(logits):
        if token in prompt or token in answer:
            by = sampling.repetition_penalty
            logit = logit / by if logit > 0 else logit * by
        found.append(logit - (sampling.presence_penalty if token in answer else 0.0))
    return found


def ref_probs(logits: Sequence[float], sampling: SamplingParams) -> list[float]:
    """Probabilities [V] of penalised ``logits``; temperature must not be 0."""
    return _filtered(logits, sampling)[0]


def edge_distance(logits: Sequence[float], sampling: SamplingParams) -> float:
    """How near a filter's edge is to a token that it decides about: rounding may decide
    otherwise below some 1e-12.
    """
    return _filtered(logits, sampling)[1]


def _filtered(logits: Sequence[float], sampling: SamplingParams) -> tuple[list[float], float]:
    best, distance = max(logits), 1.0
    probs = _normalised([math.exp((logit - best) / sampling.temperature) for logit in logits])
    if sampling.top_k:
        edge = sorted(probs, reverse=True)[: sampling.top_k][-1]
        probs = _normalised([p if p >= edge else 0.0 for p in probs])
    if sampling.top_p < 1.0:
        mass, edge = 0.0, 1.0
        for p in sorted(probs, reverse=True):
            distance = min(distance, abs(mass - sampling.top_p)) if mass else distance
            if mass >= sampling.top_p:
                break
            mass, edge = mass + p, p
        probs = _normalised([p if p >= edge else 0.0 for p in probs])
    if sampling.min_p:
        edge = sampling.min_p * max(probs)
        distance = min([distance, *(abs(p / edge - 1.0) for p in probs if p < max(probs))])
        probs = _normalised([p if p >= edge else 0.0 for p in probs])
    return probs, distance


def _normalised(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [weight / total for weight in weights]
