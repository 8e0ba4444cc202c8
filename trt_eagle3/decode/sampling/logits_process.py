"""Process the target's logits before sampling: bias, penalties, forbidden tokens.

Order: ``logit_bias``, repetition penalty, presence and frequency penalties, then the tokens that
``min_tokens`` and the grammar forbid. Penalties count the tokens on a node's own path.

Shapes: B sequences, T tree nodes, V vocab, R masks, W = ceil(V / 32) words of a mask.
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
    """Grammar masks of a batch of trees. A node without a mask forbids nothing.

    Only nodes that can be accepted have a mask.

    Attributes:
        nodes: batch row and tree node of each mask.
        bits: the masks, int32 [R, W], on the device of the logits (``grammar_state``).
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
        """Copy the masks of ``grammar_masks.fill_trees`` to ``device``; None if all is allowed.

        Args:
            bits: int32 [R, W] on the host, written by ``fill_trees``.
            found: [n][T] result of ``fill_trees``. nodes: [n][T] batch row and tree node.
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
        """Return the masks of batch rows ``rows``; None if none has a grammar."""
        place = {row: i for i, row in enumerate(rows)}
        kept = [(i, place[row], node) for i, (row, node) in enumerate(self.nodes) if row in place]
        if not kept:
            return None
        index = to_device(torch.tensor([i for i, *_ in kept]), self.bits.device)
        return AllowedTokens([(row, node) for _, row, node in kept], self.bits[index])

    def places(self, num_nodes: int) -> Tensor:
        """Return the index of each mask's row among the B * T rows of logits, int64 [R]."""
        flat = [row * num_nodes + node for row, node in self.nodes]
        return to_device(torch.tensor(flat), self.bits.device)

    def mask_(self, logits: Tensor) -> Tensor:
        """Set forbidden ``logits`` [R, V] to -inf in place."""
        return logits.masked_fill_(forbidden_tokens(self.bits, logits.shape[1]), -torch.inf)


class History:
    """The token counts of a sequence that penalties need: its prompt, and counts in its answer."""

    def __init__(self, sampling: SamplingParams, prompt_ids: Tensor, vocab_size: int) -> None:
        """Create the history of a prompt. ``prompt_ids``: int64 [P] on the host."""
        self._sampling = sampling
        self._prompt_ids = prompt_ids
        self._vocab_size = vocab_size
        self._uncounted: list[int] = []  # tokens before the first use of penalties
        # bool [V]: token is in prompt or answer; f32 [V]: its count in the answer
        self._seen: tuple[Tensor, Tensor] | None = None

    def remember(self, tokens: Sequence[int]) -> None:
        """Append tokens to the answer."""
        if self._seen is None:
            self._uncounted += tokens
        elif tokens:
            anywhere, counts = self._seen
            index = torch.tensor(tokens).to(anywhere.device, non_blocking=True)
            anywhere[index] = True
            counts.index_add_(0, index, torch.ones_like(index, dtype=counts.dtype))

    def penalise(self, logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Apply penalties for tokens in prompt, answer and on each node's own path.

        ``logits``: [T, V]. ``tokens``: int64 [T]; the answer already contains the root's token.
        ``mask``: bool [T, T].
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
        self.remember(self._uncounted)
        return self._seen


def process_logits(
    samplers: Sequence[Sampler],
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor,
    allowed: AllowedTokens | None,
) -> Tensor:
    """Apply bias, penalties and masks to ``logits`` f32 [B, T, V].

    Returns ``logits`` itself if nothing changes.

    Args:
        tokens: int64 [B, T]; the answers already contain the roots' tokens.
        mask: bool [B, T, T]: row i is true at i and its ancestors.
        allowed: tokens that the grammars allow; None without grammars.
    """
    logits = changed_logits(samplers, logits, tokens, mask)
    return logits if allowed is None else _masked(logits, allowed)


def changed_logits(
    samplers: Sequence[Sampler], logits: Tensor, tokens: Tensor, mask: Tensor
) -> Tensor:
    """Apply bias, penalties and ``min_tokens``, but no grammars; ``logits``: any type."""
    if not any(_has_changes(s) for s in samplers):
        return logits
    every = zip(samplers, logits.float(), tokens, mask, strict=True)
    return torch.stack([_changed_or_failed(s, x, t, m) for s, x, t, m in every])


def _has_changes(sampler: Sampler) -> bool:
    sampling = sampler.sampling
    return sampling.penalised or bool(sampling.logit_bias) or _may_be_early(sampler)


def _may_be_early(sampler: Sampler) -> bool:
    """Return whether an end token could come before ``min_tokens``.

    With a grammar, the grammar's mask handles it.
    """
    return sampler.count < sampler.sampling.min_tokens and sampler.grammar is None


def _changed_or_failed(sampler: Sampler, logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Apply ``_changed``; an exception fails only its own sequence (``Sampler.failure``)."""
    try:
        return _changed(sampler, logits, tokens, mask)
    except Exception as error:
        sampler.failure = error
        return logits


def _changed(sampler: Sampler, logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Apply bias and penalties to ``logits`` [T, V]; mask end tokens before ``min_tokens``."""
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
    """Mask the tokens that ``allowed`` forbids in ``logits`` [B, T, V]."""
    rows, places = logits.flatten(0, 1), allowed.places(logits.shape[1])
    kept = allowed.mask_(rows.index_select(0, places))
    return rows.index_copy(0, places, kept).view_as(logits)


def unpacked_bits(bits: Tensor, vocab_size: int) -> Tensor:
    """Unpack words int32 [..., W] to bool [..., V]."""
    return ~forbidden_tokens(bits, vocab_size)


def forbidden_tokens(bits: Tensor, vocab_size: int) -> Tensor:
    """Return bool [..., V]: true where words int32 [..., W] have no bit."""
    of_bytes = bits.contiguous().view(torch.uint8)[..., None]
    return (of_bytes & _bits_of_byte(bits.device)).eq(0).flatten(-2)[..., :vocab_size]


@lru_cache(maxsize=8)
def _bits_of_byte(device: torch.device) -> Tensor:
    """Return the 8 single-bit bytes, uint8 [8]."""
    return torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8).to(device)
