"""First tokens: sampled from a prompt's last row, and on their way to the host while the draft runs
over the prompt.

Shapes: B sequences of a prefill, or segments of those, S rows of each, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trt_eagle3.decode.forward.segment import Segment
from trt_eagle3.decode.memory.row_ref import rows_of
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.sampling.logprobs import token_logprobs
from trt_eagle3.host_copy import Readback, to_device

__all__ = ["FirstTokens"]


class FirstTokens:
    """The first tokens of those sequences of a prefill whose prompts end in it."""

    def __init__(self, chunks: Sequence[tuple[SequenceState, int]], logits: Tensor) -> None:
        """Sample from ``logits`` f32 [B, V], of the last row of each of ``chunks``."""
        ends = [
            (i, s)
            for i, (s, count) in enumerate(chunks)
            if not s.tokens and s.length + count == s.num_prefill
        ]
        self._rows = {s: row for row, (_, s) in enumerate(ends)}
        self._readback: Readback | None = None
        if not ends:
            return
        own = rows_of(logits, [i for i, _ in ends])
        self._ids = own.argmax(dim=1)
        for s, row in self._rows.items():
            if s.sampler.needs_probs:
                self._ids[row] = s.sampler.first(own[row])
        wanted = [(s, row) for s, row in self._rows.items() if s.sampling.logprobs is not None]
        self._logits = {s: own[row].clone() for s, row in wanted}
        finite = own.amax(dim=1).isfinite()
        self._readback = Readback(self._ids.masked_fill(~finite, -1))

    def put_ids(self, ids: Tensor, segments: Sequence[Segment]) -> Tensor:
        """``ids`` int64 [B, S], of which row t has the token t + 1, with these after each prompt's
        last one.
        """
        ends = [
            (i * ids.shape[1] + segment.count - 1, self._rows[segment.sequence])
            for i, segment in enumerate(segments)
            if segment.is_last and segment.sequence in self._rows
        ]
        if not ends:
            return ids
        places, rows = zip(*ends, strict=True)
        found = ids.clone(memory_format=torch.contiguous_format)
        there = to_device(torch.tensor(places), ids.device)
        found.view(-1).index_copy_(0, there, rows_of(self._ids, rows).to(ids.device))
        return found

    def append(self) -> None:
        """Append each to its sequence; none where the logits were no numbers. The host waits for
        the samples, and for nothing that was launched after them.
        """
        tokens = [] if self._readback is None else self._readback.wait()
        for sequence, token in zip(self._rows, tokens, strict=True):
            if token < 0 or sequence.sampler.error:
                continue
            logits, count = self._logits.get(sequence), sequence.sampling.logprobs
            found = []
            if logits is not None and count is not None:
                row = self._rows[sequence]
                found = token_logprobs(logits[None], self._ids[row : row + 1], count)
            sequence.append_tokens((token,), found)
