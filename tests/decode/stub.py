"""Stub: what verification needs of a sequence, and the tokens that it has emitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from trt_eagle3.decode.sampling.logprobs import LogprobsReadback, TokenLogprob
from trt_eagle3.decode.sampling.sampler import Sampler
from trt_eagle3.decode.speculation.accept import Accepted, AcceptedPaths
from trt_eagle3.decode.speculation.proposal import Proposal
from trt_eagle3.decode.speculation.tree_masks import TreeMasks
from trt_eagle3.decode.speculation.verify import LogitsForm, logits_form_of, take_draws, verify

__all__ = ["Stub", "verify_step"]


@dataclass
class Stub:
    """Stands in for ``SequenceState``."""

    sampler: Sampler
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def append(self, accepted: Accepted) -> None:
        self.tokens += accepted.tokens
        self.logprobs += accepted.logprobs
        self.sampler.remember(accepted.tokens)


def verify_step(stubs: Sequence[Stub], proposal: Proposal, logits: Tensor) -> list[Accepted]:
    """What ``stubs`` emit, the first rows of ``proposal`` and of ``logits`` f32 [B, T, V]."""
    samplers = [s.sampler for s in stubs]
    masks, logits_form = TreeMasks(samplers, proposal), logits_form_of(samplers)
    reduced = logits if logits_form.reduction is None else logits_form.reduction(logits)
    paths = verify(logits_form, samplers, proposal, reduced, masks)
    found = AcceptedPaths.unpacked(paths.packed().tolist(), proposal.tree.depth)[: len(stubs)]
    if logits_form is LogitsForm.FLOAT32:
        num_best = [s.sampling.logprobs for s in samplers]
        logprobs = LogprobsReadback(num_best, logits, paths.path, paths.tokens)
        found = [replace(a, logprobs=logprobs.wait(i, len(a.tokens))) for i, a in enumerate(found)]
    for s, accepted in zip(stubs, found, strict=True):
        take_draws(s.sampler, accepted.draws)
        s.append(accepted)
    return found
