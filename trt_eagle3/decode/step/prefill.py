"""Prefill: run prompt rows through target and draft, and sample the first tokens.

A prefill is launched, and its first tokens are read later. They are copied to the host while the
draft runs over the prompt.

Shapes: B segments of prompts, S rows of each, k aux layers, H target hidden, V vocab, P pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trt_eagle3.decode.forward.batch import of_width, segment_inputs, segment_metadata
from trt_eagle3.decode.forward.prompt_rows import PromptRows
from trt_eagle3.decode.forward.runner import TargetInputs, TargetRunner
from trt_eagle3.decode.forward.segment import Segment, cut, last_segments
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.memory.tensor_row import rows_of
from trt_eagle3.decode.sampling.logprobs import token_logprobs
from trt_eagle3.decode.sampling.prompt_logprobs import PromptLogprobsReadback
from trt_eagle3.decode.speculation.drafter import Drafter
from trt_eagle3.decode.step.stepper import Stepper
from trt_eagle3.engine.runtime.buckets import PROMPTS
from trt_eagle3.engine.runtime.memory import request_memory
from trt_eagle3.errors import DeviceMemoryError
from trt_eagle3.host_copy import Readback, to_device

__all__ = ["Chunk", "FirstTokens", "LaunchedPrefill", "Prefiller"]

Chunk = tuple[SequenceState, int]
"""A sequence, and the number of its next prompt rows."""


class FirstTokens:
    """The first tokens of the sequences whose prompts end in a prefill."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        logits: Tensor,
        prompt_logprobs: PromptLogprobsReadback | None = None,
    ) -> None:
        """Sample from ``logits`` f32 [n, V] of the last row of each of ``chunks``.

        ``prompt_logprobs``: of a chunk whose sequence requested them.
        """
        self._prompt_logprobs = prompt_logprobs
        ends = [
            (i, s)
            for i, (s, count) in enumerate(chunks)
            if not s.tokens and s.num_computed_tokens + count == s.num_prefill
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
        logprob_rows = [
            (s, row) for s, row in self._rows.items() if s.sampling.logprobs is not None
        ]
        self._logits = {s: own[row].clone() for s, row in logprob_rows}
        finite = own.amax(dim=1).isfinite()
        self._readback = Readback(self._ids.masked_fill(~finite, -1))

    def put_ids(self, ids: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Return ``ids`` int64 [B, S] with the first tokens put at each prompt's last row.

        Row t of ``ids`` has token t + 1.
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
        """Append each first token to its sequence, except where the logits are not finite.

        Log-probabilities of prompts are stored before. The host waits for the samples, but for
        nothing that was launched after them.
        """
        if self._prompt_logprobs is not None:
            self._prompt_logprobs.put()
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


@dataclass
class LaunchedPrefill:
    """A prefill whose first tokens the host has not read.

    Attributes:
        begun: sequences that had no token before.
        sequences: all sequences of the prefill. ended: those whose prompts end in it.
        failed: sequences whose chunks ran out of device memory, each with its error.
    """

    begun: Sequence[SequenceState] = ()
    sequences: list[SequenceState] = field(default_factory=list)
    ended: list[SequenceState] = field(default_factory=list)
    failed: list[tuple[SequenceState, DeviceMemoryError]] = field(default_factory=list)
    first_tokens: list[FirstTokens] = field(default_factory=list)

    def wait(self) -> list[SequenceState]:
        """Read the first tokens; returns the sequences whose prompts ended."""
        for tokens in self.first_tokens:
            tokens.append()
        begun = {id(s) for s in self.begun}
        return [s for s in self.ended if id(s) in begun]


class Prefiller:
    """Launches prefills."""

    def __init__(
        self,
        target: TargetRunner,
        drafter: Drafter | None,
        stepper: Stepper,
        *,
        max_seq_len: int,
        chunk: int,
        max_segments: int | None,
        fixed_shapes: bool,
    ) -> None:
        """Create a prefiller.

        ``stepper``: runs steps that are batched with prompts. ``chunk``: most rows of a forward.
        ``max_segments``: most batch rows of a forward that splits prompts; None: any number, 0:
        prompts are not split. ``fixed_shapes``: pad a prompt that runs alone to a recurring width.
        """
        self._target = target
        self._drafter = drafter
        self._stepper = stepper
        self._max_seq_len = max_seq_len
        self._chunk = chunk
        self._max_segments = max_segments
        self._fixed_shapes = fixed_shapes

    def launch(
        self, chunks: Sequence[Chunk], beside: Sequence[SequenceState] = ()
    ) -> LaunchedPrefill:
        """Launch one forward over ``chunks``; if memory runs out, one forward per chunk.

        So only a sequence that is too large fails. ``beside``: sequences that decode without a
        tree. Their next step may run in the same forward; ``Stepper.step`` continues from it.
        """
        launched = LaunchedPrefill([s for s, _ in chunks if not s.tokens])
        if chunks:
            self._launch(launched, chunks, beside)
        return launched

    def _launch(
        self, launched: LaunchedPrefill, chunks: Sequence[Chunk], beside: Sequence[SequenceState]
    ) -> None:
        rows = sum(count for _, count in chunks)
        try:
            with request_memory(
                f"prompt: {rows} tokens at once", "Rebuild with a smaller engine.prefill_chunk."
            ):
                launched.first_tokens.append(self.run(chunks, beside))
        except DeviceMemoryError as error:
            if len(chunks) == 1 and not beside:
                launched.failed.append((chunks[0][0], error))
                return
            for chunk in chunks:
                self._launch(launched, [chunk], ())
            return
        launched.sequences += [s for s, _ in chunks]
        launched.ended += [s for s, _ in chunks if s.num_computed_tokens >= s.num_prefill]

    def run(self, chunks: Sequence[Chunk], beside: Sequence[SequenceState] = ()) -> FirstTokens:
        """Launch one forward over ``chunks``; the caller must ``append`` the first tokens.

        A sequence whose logits are not finite gets no token. One that needs the logits of its
        prompt is alone in ``chunks``.
        """
        segments = cut(chunks, self._max_segments)
        table = self._target.embedding
        rows = PromptRows.of(segments, self._width(segments, len(beside)), table.device)
        embeds = table.lookup(rows.ids[:, :-1])
        inputs = segment_inputs(self._target.states, segments)
        metadata = segment_metadata(segments, rows.positions[..., :-1], inputs, embeds.device)
        logit_rows = _logit_rows(segments)
        prompts = TargetInputs(embeds, metadata, logit_rows, self._put_visual(segments, embeds))
        mixed = self._stepper.launch_mixed(beside, prompts) if beside else None
        logits, aux = mixed or self._target.forward(
            embeds, metadata, logit_rows, prompts.visual_levels
        )
        first_tokens = FirstTokens(
            chunks,
            rows_of(logits[:, -1], last_segments(segments)),
            _prompt_logprobs(rows, logits),
        )
        try:
            if aux is not None:
                self._run_draft(rows, inputs["page_table"], aux, first_tokens)
        except Exception:
            # the draft ran out of memory; the sequence is prefilled again, but keeps its token
            first_tokens.append()
            raise
        # must be last: if the draft runs out of memory, the prefill is retried over the same states
        self._target.states.swap_entries([s for s, _ in chunks])
        for sequence, count in chunks:
            sequence.num_computed_tokens += count
            if sequence.prompt_logprobs is not None and sequence.needs_prompt_logits:
                sequence.prompt_logprobs.num_launched = sequence.num_computed_tokens
        return first_tokens

    def _put_visual(self, segments: Sequence[Segment], embeds: Tensor) -> Tensor | None:
        """Write visual embeddings over ``embeds`` [B, S, H].

        Returns the deepstack levels [L, B, S, H]; None without visual rows.
        """
        if not any(s.sequence.prompt.has_visual(s.start, s.count) for s in segments):
            return None
        levels = embeds.new_zeros(self._target.num_visual_levels, *embeds.shape)
        for i, s in enumerate(segments):
            prompt, vision = s.sequence.prompt, s.sequence.vision
            prompt.put_visual(embeds[i], s.start, vision)
            prompt.put_visual_levels(levels[:, i], s.start, vision)
        return levels

    def _run_draft(
        self, rows: PromptRows, page_table: Tensor, aux: Tensor, first_tokens: FirstTokens
    ) -> None:
        """Run the draft over the rows of drafting sequences.

        The last row of a segment gets the first token of the next segment; the last row of a
        prompt gets the first token of the answer.
        """
        drafting = [i for i, s in enumerate(rows.segments) if s.sequence.drafting]
        if self._drafter is None or not drafting:
            return
        # a recurring width: the target's may be odd, as decoding sequences were batched with it
        width = self._width([rows.segments[i] for i in drafting])
        aux = of_width(rows_of(aux, drafting), width, dim=1)
        some = rows.only(drafting, width)
        next_ids = first_tokens.put_ids(some.ids[:, 1:], some.segments)
        self._drafter.prefill(some, next_ids, rows_of(page_table, drafting), aux)

    def _width(self, segments: Sequence[Segment], num_beside: int = 0) -> int:
        """Return the row width of ``segments`` in one forward.

        A single segment is padded, together with ``num_beside`` decoding rows, to a recurring
        width. Chunk and length limit bound the padding.
        """
        widest = max(s.count for s in segments)
        if not self._fixed_shapes or len(segments) > 1:
            return widest
        room = min(self._chunk - num_beside, self._max_seq_len - segments[0].start)
        return max(widest, min(PROMPTS.size_of(widest + num_beside) - num_beside, room))


def _logit_rows(segments: Sequence[Segment]) -> Tensor:
    """Return the rows of B segments whose logits are needed, int64 [B, R]: the last, or all."""
    if not any(s.sequence.needs_prompt_logits for s in segments):
        return torch.tensor([[s.count - 1] for s in segments])
    assert len(segments) == 1, "a prompt whose logits are needed runs alone"
    return torch.arange(segments[0].count)[None]


def _prompt_logprobs(rows: PromptRows, logits: Tensor) -> PromptLogprobsReadback | None:
    """Read ``logits`` f32 [1, R, V] of a prompt's ``rows``; None if they are not needed."""
    segment = rows.segments[0]
    found = segment.sequence.prompt_logprobs
    if found is None or not segment.sequence.needs_prompt_logits:
        return None
    count = min(segment.count, found.num_rows - segment.start)  # the last row predicts the answer
    if count <= 0:
        return None
    next_ids = rows.ids[0, 1 : 1 + count].to(logits.device)
    return PromptLogprobsReadback(found, segment.start, logits[0, :count], next_ids)
