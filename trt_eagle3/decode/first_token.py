"""First tokens: sampled from a prompt's last row, and on their way to the host while the draft runs
over the prompt.

Shapes: B sequences of a prefill, S rows of each, E of them whose prompt ends there, V vocab, Hd
draft hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trt_eagle3.decode.logprobs import token_logprobs
from trt_eagle3.decode.segment import Segment
from trt_eagle3.decode.sequence import SequenceState
from trt_eagle3.decode.transfer import Readback
from trt_eagle3.engine.embedding import EmbeddingTable

__all__ = ["FirstTokens"]


class FirstTokens:
    """The first tokens of those sequences of a prefill whose prompts end in it."""

    def __init__(
        self, chunks: Sequence[tuple[SequenceState, int]], logits: Sequence[Tensor]
    ) -> None:
        """Sample from ``logits`` [B] f32 [V], of the last row of each of ``chunks``."""
        ends = [
            (i, s)
            for i, (s, count) in enumerate(chunks)
            if not s.tokens and s.length + count == s.num_prefill
        ]
        self._ids = {s: s.sampler.first(logits[i]) for i, s in ends}
        self._logits = {s: logits[i].clone() for i, s in ends if s.sampling.logprobs is not None}
        self._readback: Readback | None = None
        if ends:
            finite = torch.stack([logits[i].amax().isfinite() for i, _ in ends])
            self._readback = Readback(torch.stack([*self._ids.values()]).masked_fill(~finite, -1))

    def put_embeds(
        self, embeds: Tensor, segments: Sequence[Segment], table: EmbeddingTable
    ) -> None:
        """Write their embeddings into ``embeds`` [B, S, Hd], after the last row but one of a
        prompt: row t has the token t + 1.
        """
        for i, segment in enumerate(segments):
            if segment.is_last and segment.sequence in self._ids:
                token = self._ids[segment.sequence][None]  # by a scalar torch would ask the device
                embeds[i, segment.count - 1] = table.lookup(token)[0]

    def append(self) -> None:
        """Append each to its sequence; none where the logits were no numbers. The host waits for
        the samples, and for nothing that was launched after them.
        """
        tokens = [] if self._readback is None else self._readback.wait()
        for sequence, token in zip(self._ids, tokens, strict=True):
            if token < 0 or sequence.sampler.error:
                continue
            logits, count = self._logits.get(sequence), sequence.sampling.logprobs
            found = []
            if logits is not None and count is not None:
                found = token_logprobs(logits[None], self._ids[sequence][None], count)
            sequence.append_tokens((token,), found)
