"""Sampling: accept probabilities and bonus tokens from the target's logits at all tree nodes.

A drafted token is a point mass, so a child is accepted with the target's probability of its token.
If it is rejected, its mass is removed, and the rest is renormalised for the next sibling
(SpecInfer, arXiv 2305.09781, section 4.3, with a deterministic draft). If all children are
rejected, the target's distribution without them remains. So the bonus token of every node can be
drawn before the end of the walk is known.

Shapes: B sequences, T nodes of each, V vocab.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from trt_eagle3.decode.sampling.grammar_masks import fill_next
from trt_eagle3.decode.sampling.grammar_state import GrammarState
from trt_eagle3.decode.sampling.logits_process import AllowedTokens, History, process_logits
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.host_copy import to_device

__all__ = ["Sampler", "VerifyResult", "agreeing", "target_probs", "verify_results"]

# likeliest tokens that ``top_p`` tries first; nearly always enough, and faster than a full sort
_FEW = 1024


@dataclass(frozen=True)
class VerifyResult:
    """Accept probabilities and bonus tokens of one tree, or of several trees of one shape.

    Attributes:
        accept: float64 [..., T]: the target's probability of a node's token after its parent; the
            root's value has no meaning.
        bonus: int64 [..., T]: the token to emit if the walk ends at a node; never a token of that
            node's children.
    """

    accept: Tensor
    bonus: Tensor


def agreeing(tokens: Tensor, parents: Tensor, target_ids: Tensor) -> Tensor:
    """Return bool [B, T]: whether a node's token is the target's choice after its parent.

    ``tokens``, ``parents``, ``target_ids``: int64 [B, T]; a root's parent is -1.
    """
    return tokens == target_ids.gather(1, parents.clamp(min=0))


def target_probs(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Return probabilities float64 [n, V] under temperature and filters.

    ``logits``: f32 [n, V], penalties applied. Tokens that tie at the edge of a filter all stay, so
    the result does not depend on the sort order.
    """
    if sampling.greedy:
        return torch.zeros_like(logits, dtype=torch.float64).scatter_(
            1, logits.argmax(dim=1, keepdim=True), 1.0
        )
    most = logits.amax(dim=1, keepdim=True)
    weights = _weights(logits, most, sampling.temperature)
    num_best = sampling.top_k if 0 < sampling.top_k < logits.shape[1] else None
    if num_best:
        best = logits.topk(num_best, dim=1).values
        weights = weights.masked_fill_(logits < best[:, -1:], 0.0)
    if sampling.top_p < 1.0 and num_best:
        # ``best`` has one of the tokens that tie at its end; they have one value, so one edge
        shares = _weights(best, most, sampling.temperature) / weights.sum(dim=1, keepdim=True)
        edge = best.gather(1, _num_within(shares, sampling.top_p) - 1)
        weights = weights.masked_fill_(logits < edge, 0.0)
    elif sampling.top_p < 1.0:
        weights /= weights.sum(dim=1, keepdim=True)
        ordered = _likeliest(weights, sampling.top_p)
        edge = ordered.gather(1, _num_within(ordered, sampling.top_p) - 1)
        weights = weights.masked_fill(weights < edge, 0.0)
    if sampling.min_p > 0.0:
        least = sampling.min_p * weights.amax(dim=1, keepdim=True)
        weights = weights.masked_fill(weights < least, 0.0)
    return weights.div_(weights.sum(dim=1, keepdim=True))


def _weights(logits: Tensor, most: Tensor, temperature: float) -> Tensor:
    """Return unnormalised probabilities, float64; ``most``: the largest logit, of weight 1."""
    # subtract first, so that the division can overflow only to -inf
    return logits.double().sub_(most).div_(temperature).exp_()


def _num_within(ordered: Tensor, mass: float) -> Tensor:
    """Return how many leading probabilities of each row reach ``mass``, int64 [n, 1].

    ``ordered``: descending. 1 for a row that is not finite.
    """
    return (ordered.cumsum(dim=1) - ordered < mass).sum(dim=1, keepdim=True).clamp(min=1)


def _likeliest(probs: Tensor, mass: float) -> Tensor:
    """Return the largest values of each row, descending; their sum reaches ``mass``."""
    # only on the CPU: on a GPU, reading the sums would be a wait
    if probs.device.type == "cpu" and probs.shape[1] > _FEW:
        few = probs.topk(_FEW, dim=1).values
        if bool((few.cumsum(dim=1)[:, -1] >= mass).all()):
            return few
    return probs.sort(dim=1, descending=True).values


class Sampler:
    """The sampling state of one sequence: random numbers, history and grammar.

    Attributes:
        count: tokens of the answer. end_ids: tokens that end it.
        draft_seed: seed of the random numbers that draw drafts (``DraftSampling``), an int64.
        failure: the exception that penalties or biases raised; None without one.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        prompt_ids: Tensor,
        vocab_size: int,
        grammar: GrammarState | None = None,
        end_ids: Sequence[int] = (),
    ) -> None:
        """Create a sampler.

        ``prompt_ids``: int64 [P] on the host. ``grammar``: of ``sampling.grammar``, in its start
        state.
        """
        self.sampling = sampling
        seed = int.from_bytes(os.urandom(8), "little") if sampling.seed is None else sampling.seed
        self._generator = torch.Generator().manual_seed(seed)
        self.draft_seed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
        self._ahead = deque[float]()  # drawn, but not used yet
        self._vocab_size = vocab_size
        self.history = History(sampling, prompt_ids, vocab_size)
        self.grammar = grammar
        self.count = 0
        self.failure: Exception | None = None
        self.end_ids = tuple({*sampling.stop_token_ids, *end_ids})
        self._bias: Tensor | None = None

    @property
    def needs_probs(self) -> bool:
        """Whether more than the likeliest token of the raw logits is needed."""
        return self.sampling.changes_logits or not self.sampling.greedy

    @property
    def error(self) -> str:
        """Why no more tokens can be sampled; empty without an error."""
        if self.failure is not None:
            return f"{type(self.failure).__name__}: {self.failure}"
        return self.grammar.error if self.grammar is not None else ""

    def uniform(self) -> float:
        """Consume the next random number of this sequence, in [0, 1)."""
        number = self.upcoming(1)[0]
        self.skip(1)
        return number

    def upcoming(self, count: int) -> list[float]:
        """Return the next ``count`` random numbers without consuming them."""
        lacking = count - len(self._ahead)
        if lacking > 0:
            drawn = torch.rand(lacking, generator=self._generator, dtype=torch.float64)
            self._ahead.extend(drawn.tolist())
        return list(islice(self._ahead, count))

    def skip(self, count: int) -> None:
        """Consume the next ``count`` random numbers."""
        self.upcoming(count)
        for _ in range(count):
            self._ahead.popleft()

    def bias_on(self, device: torch.device) -> Tensor:
        """Return ``logit_bias`` as f32 [V] on ``device``."""
        if self._bias is None:
            bias = torch.zeros(self._vocab_size)
            for token, value in self.sampling.logit_bias.items():
                bias[token] = value
            self._bias = bias.to(device)
        return self._bias

    def first(self, logits: Tensor) -> Tensor:
        """Sample the first token (int64) from the prompt's last logits f32 [V].

        Only for a sampler that ``needs_probs``; otherwise it is the likeliest token.
        """
        no_tokens = torch.full((1,), -1, device=logits.device)
        mask = torch.ones(1, 1, dtype=torch.bool)
        allowed = None
        if self.grammar is not None:
            bits = torch.empty(1, -(-len(logits) // 32), dtype=torch.int32)
            fill_next(self.grammar, bits.numpy()[0])
            allowed = AllowedTokens([(0, 0)], to_device(bits, logits.device))
        found = verify_results(
            [self], logits[None, None], no_tokens[None], no_tokens[None], mask[None], allowed
        )
        return found.bonus[0, 0]

    def remember(self, tokens: Sequence[int]) -> None:
        """Append tokens to the answer."""
        self.count += len(tokens)
        self.history.remember(tokens)
        if self.grammar is not None:
            self.grammar.advance(tokens)

    def verify(self, logits: Tensor, tokens: Tensor, parents: Tensor, mask: Tensor) -> VerifyResult:
        """Verify one tree: ``verify_results`` without the batch dimension."""
        found = verify_results([self], logits[None], tokens[None], parents[None], mask[None])
        return VerifyResult(found.accept[0], found.bonus[0])


def verify_results(
    samplers: Sequence[Sampler],
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    mask: Tensor,
    allowed: AllowedTokens | None = None,
    draws: Sequence[float] | None = None,
    drawn: tuple[Tensor, Tensor] | None = None,
) -> VerifyResult:
    """Verify a tree of each of B sequences with the same filters.

    Args:
        logits: f32 [B, T, V].
        tokens: int64 [B, T]; the answers already contain the roots' tokens.
        parents: int64 [B, T].
        mask: bool [B, T, T]: row i is true at i and its ancestors.
        allowed: tokens that the grammars allow; None without grammars.
        draws: a random number in [0, 1) per sequence, for its bonus token; None: consume the next
            one.
        drawn: for chains whose tokens were drawn at random: int64 [B, T, K] the possible tokens of
            each node and float64 [B, T, K] their probabilities; None: each token is a point mass.
    """
    device, (batch, num_nodes) = logits.device, tokens.shape
    parents, mask = parents.to(device, non_blocking=True), mask.to(device, non_blocking=True)
    logits = process_logits(samplers, logits, tokens, mask, allowed)
    if samplers[0].sampling.greedy:
        best = logits.argmax(dim=2)
        return VerifyResult(agreeing(tokens, parents, best).double(), best)
    rows = logits.flatten(0, 1)
    probs = target_probs(rows, samplers[0].sampling)
    first = torch.arange(0, batch * num_nodes, num_nodes, device=device)[:, None]
    above = first + parents.clamp(min=0)
    accept = probs[above, tokens.clamp(min=0)]
    if drawn is None:
        drafted = above[:, 1:].flatten(), tokens[:, 1:].flatten()
        left = probs.index_put_(drafted, torch.zeros((), dtype=probs.dtype, device=device))
    else:
        accept, left = _less_drawn(probs, accept, above, tokens, *drawn)
    draws = [s.uniform() for s in samplers] if draws is None else draws
    uniform = to_device(torch.tensor(draws, dtype=torch.float64), device)
    each = uniform[:, None].expand(-1, num_nodes).reshape(-1, 1)
    return VerifyResult(accept, _inverse_cdf(left, each).view(batch, -1))


def _less_drawn(
    probs: Tensor, accept: Tensor, above: Tensor, tokens: Tensor, ids: Tensor, drawn: Tensor
) -> tuple[Tensor, Tensor]:
    """Return accept probabilities min(1, p / q), and weights (p - q)+ of the bonus tokens.

    Speculative sampling (Leviathan et al., arXiv 2211.17192). Each node of a chain has one child.

    Args:
        probs: float64 [B * T, V], p after each node. accept: float64 [B, T], p of each token.
        above: int64 [B, T], the row of each node's parent. tokens: int64 [B, T].
        ids: int64 [B, T, K], drawn: float64 [B, T, K], q of each node.
    """
    of_token = (drawn * (ids == tokens[..., None])).sum(dim=2)
    ratio = torch.where(of_token > 0, accept / of_token, 0.0).clamp(max=1.0)
    size = drawn.shape[2]
    rows = above[:, 1:, None].expand(-1, -1, size)
    left = probs.index_put((rows, ids[:, 1:]), -drawn[:, 1:], accumulate=True).clamp_(min=0.0)
    # p = q leaves nothing, and then the child is always accepted; rounding may say otherwise
    return ratio, torch.where(left.sum(dim=1, keepdim=True) > 0, left, probs)


def _inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw a sample of each row of ``weights`` float64 [n, V]; returns int64 [n].

    Rows need not be normalised. ``uniform``: float64 [n, 1].
    """
    cumulative = weights.cumsum(dim=1)
    threshold = cumulative[:, -1:] * uniform
    # the last token with weight: rounding must not go past it
    last = weights.shape[1] - 1 - (weights > 0).flip(1).to(torch.uint8).argmax(dim=1)
    return torch.minimum(torch.searchsorted(cumulative, threshold, right=True)[:, 0], last)
