"""From the target's logits to those that tokens are chosen by: bias, penalties, what is forbidden.

Order: ``logit_bias``, repetition penalty, presence and frequency penalties, then what
``min_tokens`` and the grammar forbid. Penalties count the tokens on a node's own path.

Shapes: B sequences, T tree nodes, V vocab, R masks, W = ceil(V / 32) words of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trt_eagle3.decode.sampling.grammar_masks import NO_MASK
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.host_copy import copy_on_side_stream, to_device

if TYPE_CHECKING:
    from trt_eagle3.decode.sampling.sampler import Sampler

__all__ = [
    "AllowedTokens",
    "History",
    "changed_logits",
    "forbidden_tokens",
    "process_logits",
    "unpacked_bits",
]


@dataclass(frozen=True)
class AllowedTokens:
    """What grammars allow at those nodes of the trees of a batch that can be accepted; at any other
    node nothing is forbidden.

    Attributes:
        nodes: of each mask, the sequence of the batch and the node. bits: int32 [R, W], on the
            device of the logits (``grammar_state``).
    """

    nodes: Sequence[tuple[int, int]]
    bits: Tensor

    @classmethod
    def from_masks(
        cls,
        device: torch.device,
        bits: Tensor,
        found: Sequence[Sequence[int]],
        nodes: Sequence[Sequence[tuple[int, int]]],
    ) -> AllowedTokens | None:
        """What ``grammar_masks.fill_trees`` has ``found`` [n][T]; None where it forbids nothing.

        Args:
            bits: int32 [R, W] on the host that it has written. nodes: [n][T] sequence and node.
        """
        masked = {
            row: node
            for rows, names in zip(found, nodes, strict=True)
            for row, node in zip(rows, names, strict=True)
            if row != NO_MASK
        }
        if not masked:
            return None
        used = sorted(masked)
        on_device = copy_on_side_stream(bits[: used[-1] + 1], device)
        if len(used) < len(on_device):
            on_device = on_device[copy_on_side_stream(torch.tensor(used), device)]
        return cls([masked[row] for row in used], on_device)

    def select(self, rows: Sequence[int]) -> AllowedTokens | None:
        """The same of the sequences ``rows``; None where none has a grammar."""
        place = {row: i for i, row in enumerate(rows)}
        kept = [(i, place[row], node) for i, (row, node) in enumerate(self.nodes) if row in place]
        if not kept:
            return None
        index = to_device(torch.tensor([i for i, *_ in kept]), self.bits.device)
        return AllowedTokens([(row, node) for _, row, node in kept], self.bits[index])

    def places(self, num_nodes: int) -> Tensor:
        """int64 [R]: which of the B * T rows of logits the masks are of."""
        flat = [row * num_nodes + node for row, node in self.nodes]
        return to_device(torch.tensor(flat), self.bits.device)

    def mask_(self, logits: Tensor) -> Tensor:
        """``logits`` [R, V], of which forbidden ones are set to -inf in place."""
        return logits.masked_fill_(forbidden_tokens(self.bits, logits.shape[1]), -torch.inf)


class History:
    """What penalties must know of a sequence: its prompt, and how often its answer has a token."""

    def __init__(self, sampling: SamplingParams, prompt_ids: Tensor, vocab_size: int) -> None:
        """``prompt_ids`` int64 [P] on the host."""
        self._sampling = sampling
        self._prompt_ids = prompt_ids
        self._vocab_size = vocab_size
        self._early: list[int] = []  # tokens before anybody asked for penalties
        # bool [V] in the prompt or answer, f32 [V] times in the answer
        self._seen: tuple[Tensor, Tensor] | None = None

    def remember(self, tokens: Sequence[int]) -> None:
        """The answer has these tokens now."""
        if self._seen is None:
            self._early += tokens
        elif tokens:
            anywhere, counts = self._seen
            index = torch.tensor(tokens).to(anywhere.device, non_blocking=True)
            anywhere[index] = True
            counts.index_add_(0, index, torch.ones_like(index, dtype=counts.dtype))

    def penalise(self, logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Penalties of what stands in prompt, answer, and on each node's own path; ``logits``
        [T, V], ``tokens`` int64 [T] (the root's is in the answer), ``mask`` bool [T, T].
        """
        anywhere, counts = self._seen or self._begin(logits.device)
        if len(tokens) > 1:
            paths = tokens.clamp(min=0).expand(len(tokens), -1)
            on_path = mask.float()
            on_path[:, 0] = 0.0
            counts = counts.expand_as(logits).scatter_add(1, paths, on_path)
            anywhere = anywhere | (counts > 0)
        penalty = self._sampling.repetition_penalty
        repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
        found = torch.where(anywhere, repeated, logits)
        present = self._sampling.presence_penalty * (counts > 0)
        return found - present - self._sampling.frequency_penalty * counts

    def _begin(self, device: torch.device) -> tuple[Tensor, Tensor]:
        in_prompt = torch.zeros(self._vocab_size, dtype=torch.bool)
        in_prompt[self._prompt_ids] = True
        self._seen = in_prompt.to(device), torch.zeros(self._vocab_size, device=device)
        self.remember(self._early)
        return self._seen


def process_logits(
    samplers: Sequence[Sampler],
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor,
    allowed: AllowedTokens | None,
) -> Tensor:
    """``logits`` f32 [B, T, V] as tokens are chosen by them; themselves where nothing changes them.

    Args:
        tokens: int64 [B, T], the roots' are in the answers. mask: bool [B, T, T]: row i is true at
            i and its ancestors. allowed: what grammars allow.
    """
    logits = changed_logits(samplers, logits, tokens, mask)
    return logits if allowed is None else _masked(logits, allowed)


def changed_logits(
    samplers: Sequence[Sampler], logits: Tensor, tokens: Tensor, mask: Tensor
) -> Tensor:
    """``process_logits`` without grammars; ``logits`` of any type."""
    if not any(_has_changes(s) for s in samplers):
        return logits
    every = zip(samplers, logits.float(), tokens, mask, strict=True)
    return torch.stack([_changed_or_failed(s, x, t, m) for s, x, t, m in every])


def _has_changes(sampler: Sampler) -> bool:
    sampling = sampler.sampling
    return sampling.penalised or bool(sampling.logit_bias) or _may_be_early(sampler)


def _may_be_early(sampler: Sampler) -> bool:
    """Whether an end token here could come before ``min_tokens``; a grammar sees to it itself."""
    return sampler.count < sampler.sampling.min_tokens and sampler.grammar is None


def _changed_or_failed(sampler: Sampler, logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """``_changed``; what that raises is its sequence's alone (``Sampler.failure``): others of the
    batch go on.
    """
    try:
        return _changed(sampler, logits, tokens, mask)
    except Exception as error:
        sampler.failure = error
        return logits


def _changed(sampler: Sampler, logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """``logits`` [T, V] with bias, penalties and without tokens that would end it too early."""
    sampling = sampler.sampling
    if sampling.logit_bias:
        logits = logits + sampler.bias_on(logits.device)
    if sampling.penalised:
        logits = sampler.history.penalise(logits, tokens, mask)
    if _may_be_early(sampler):
        early = sampler.count + mask.sum(dim=1) - 1 < sampling.min_tokens
        ends = torch.zeros(logits.shape[1], dtype=torch.bool)
        ends[list(sampler.end_ids)] = True
        logits = logits.masked_fill(early[:, None] & ends.to(logits.device), -torch.inf)
    return logits


def _masked(logits: Tensor, allowed: AllowedTokens) -> Tensor:
    """``logits`` [B, T, V] without the tokens that ``allowed`` forbids."""
    rows, places = logits.flatten(0, 1), allowed.places(logits.shape[1])
    kept = allowed.mask_(rows.index_select(0, places))
    return rows.index_copy(0, places, kept).view_as(logits)


def unpacked_bits(bits: Tensor, vocab_size: int) -> Tensor:
    """bool [..., V] of words int32 [..., W]."""
    return ~forbidden_tokens(bits, vocab_size)


def forbidden_tokens(bits: Tensor, vocab_size: int) -> Tensor:
    """bool [..., V]: where words int32 [..., W] have no bit."""
    of_bytes = bits.contiguous().view(torch.uint8)[..., None]
    return (of_bytes & _bits_of_byte(bits.device)).eq(0).flatten(-2)[..., :vocab_size]


@lru_cache(maxsize=8)
def _bits_of_byte(device: torch.device) -> Tensor:
    """uint8 [8]."""
    return torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8).to(device)
