"""SequenceState: the decoding state of one request: its tokens, and its rows in the caches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from trt_eagle3.decode.memory.kv_cache import PagePool, PageTable
from trt_eagle3.decode.memory.tensor_row import TensorRow
from trt_eagle3.decode.request.prompt import Prompt, Vision
from trt_eagle3.decode.sampling.grammar_state import GrammarState
from trt_eagle3.decode.sampling.logprobs import TokenLogprob
from trt_eagle3.decode.sampling.prompt_logprobs import PromptLogprobs
from trt_eagle3.decode.sampling.sampler import Sampler
from trt_eagle3.decode.sampling.sampling_params import GREEDY, SamplingParams
from trt_eagle3.errors import EngineFailedError, clip

__all__ = ["DraftState", "SequenceState", "Snapshot"]


class Snapshot(Protocol):
    """A copy of a sequence's per-sequence states. The owner must release it."""

    def release(self) -> None:
        """Free the copy."""
        ...


class DraftState(Protocol):
    """What a drafter keeps of a sequence whose prompt it has run. Only that drafter reads it."""


@dataclass(eq=False)
class SequenceState:
    """The decoding state of one request.

    Attributes:
        drafting: whether the draft runs for it. backpressured: whether its reader lags behind.
        created: time by ``time.perf_counter``. queue_seconds: from then to its admission; None
            before.
        turn_start: number of its tokens when it was admitted.
        grammar: of ``sampling.grammar``, in its start state. end_ids: the model's tokens that end
            the answer.
        tokens: the answer. Its last token is in no cache yet: it is the root of the next tree.
        logprobs: of each of ``tokens``, if the request wants them.
        num_computed_tokens: rows in the target's cache.
        draft: the draft's state; None before the end of the prefill.
        num_draft_computed_tokens: rows in the draft's cache; equal while it drafts.
        deferred: aux hidden states of the rows that the draft lacks, from steps without a tree.
        page_keys: keys of filled pages, as far as computed (``prefix_cache.page_keys``).
        snapshots: of the per-sequence states, by the number of pages that the rows fill.
        num_reused_rows: prompt rows that the prefix cache had before the first token.
        num_prompt: tokens of the prompt.
        prompt_logprobs: of the prompt's tokens, if requested.
        vision: output of the vision tower, from admission to the end of the prompt's prefill.
        epoch: how often its rows were released. A forward in flight of an older epoch is void.
    """

    prompt: Prompt
    pool: PagePool
    vocab_size: int
    sampling: SamplingParams = GREEDY
    drafting: bool = False
    grammar: GrammarState | None = None
    end_ids: Sequence[int] = ()
    backpressured: bool = False
    created: float = field(default_factory=time.perf_counter)
    queue_seconds: float | None = None
    turn_start: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_computed_tokens: int = 0
    draft: DraftState | None = None
    num_draft_computed_tokens: int = 0
    deferred: list[TensorRow] = field(default_factory=list)
    page_keys: list[bytes] = field(default_factory=list)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    epoch: int = 0
    num_reused_rows: int = 0
    num_prompt: int = field(init=False)
    prompt_logprobs: PromptLogprobs | None = field(init=False)
    vision: Vision | None = field(init=False)
    pages: PageTable = field(init=False)
    sampler: Sampler = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.prompt.token_ids)
        num_best = self.sampling.prompt_logprobs
        self.prompt_logprobs = None
        if num_best is not None:
            token_ids = self.prompt.token_ids.tolist()
            self.prompt_logprobs = PromptLogprobs(token_ids, min(num_best, self.vocab_size))
        self.vision = self.prompt.vision
        self.pages = PageTable(self.pool)
        self.sampler = Sampler(
            self.sampling, self.prompt.token_ids, self.vocab_size, self.grammar, self.end_ids
        )

    @property
    def num_prefill(self) -> int:
        """Rows that the cache needs before decoding continues.

        The prompt, and after a preemption also the answer so far.
        """
        return self.num_prompt + max(len(self.tokens) - 1, 0)

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether the logits of all its next prompt rows are needed, for ``prompt_logprobs``."""
        found = self.prompt_logprobs
        return found is not None and found.num_launched < found.num_rows

    @property
    def prefilled(self) -> bool:
        """Whether it has a root: all rows before its last token are in the cache."""
        tokens = self.tokens
        return bool(tokens) and self.num_computed_tokens >= self.num_prompt + len(tokens) - 1

    @property
    def turn_length(self) -> int:
        """Tokens since its admission."""
        return len(self.tokens) - self.turn_start

    @property
    def num_written(self) -> int:
        """Rows that are in the target's cache and, while it drafts, also in the draft's."""
        return (
            min(self.num_computed_tokens, self.num_draft_computed_tokens)
            if self.drafting
            else self.num_computed_tokens
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.num_prompt + len(self.tokens)

    def ids(self, start: int, stop: int) -> Tensor:
        """Return tokens ``start`` to ``stop`` - 1 of prompt and answer, int64 [stop - start]."""
        num_prompt = self.num_prompt
        if stop <= num_prompt:
            return self.prompt.token_ids[start:stop]
        output_ids = self.tokens[max(start - num_prompt, 0) : max(stop - num_prompt, 0)]
        return torch.cat(
            [self.prompt.token_ids[start:stop], torch.tensor(output_ids, dtype=torch.int64)]
        )

    def append_tokens(self, tokens: tuple[int, ...], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Append ``tokens`` to the answer, and update the sampler."""
        self.tokens += tokens
        self.logprobs += logprobs
        self.sampler.remember(tokens)

    def failure(self) -> EngineFailedError:
        """Return the error of a sequence that emits no token.

        Its logits cannot be processed, its grammar failed, or its logits are not finite.
        """
        if self.sampler.failure is not None:
            failure = EngineFailedError(
                f"its logits cannot be processed ({clip(self.sampler.error)}). Send the request "
                "without penalties, logit_bias and min_tokens."
            )
            failure.__cause__ = self.sampler.failure
            return failure
        if self.sampler.error:
            return EngineFailedError(
                f"the grammar cannot go on ({clip(self.sampler.error)}). Simplify it."
            )
        return EngineFailedError(
            "the target's logits are not finite numbers: its activations overflowed. In a float16 "
            "build, set engine.residual: float32 or engine.dtype: bfloat16; otherwise: trt-eagle3 "
            "validate BUNDLE"
        )

    def adopt(self, pages: Sequence[int]) -> None:
        """Start with ``pages``, which already hold the first rows."""
        self.pages.adopt(pages)
        self.num_computed_tokens = self.num_draft_computed_tokens = len(pages) * self.pool.page_size

    @property
    def in_answer(self) -> bool:
        """Whether its rows include rows of the answer."""
        return self.num_computed_tokens > self.num_prompt

    def keep_snapshot(self, snapshot: Snapshot) -> None:
        """Keep a copy of the current per-sequence states. The rows end at a page border."""
        self.snapshots[self.num_computed_tokens // self.pool.page_size] = snapshot

    def drop_snapshots(self, *, in_answer: bool) -> bool:
        """Release snapshots; returns whether there was one to release.

        ``in_answer``: all snapshots of the answer; otherwise only the sequence's first one.
        """
        in_prompt = self.num_prompt // self.pool.page_size
        ends = sorted(self.snapshots)
        dropped = [n for n in ends if n > in_prompt] if in_answer else ends[:1]
        for num_pages in dropped:
            self.snapshots.pop(num_pages).release()
        return bool(dropped)

    def take_snapshots(self, num_pages: int) -> dict[int, Snapshot]:
        """Return the snapshots of the first ``num_pages`` pages. The caller owns them."""
        return {n: self.snapshots.pop(n) for n in sorted(self.snapshots) if n <= num_pages}

    def reset(self) -> None:
        """Release all pages and rows; the output tokens stay."""
        self.pages.truncate(0)
        self.epoch += 1
        for snapshot in self.snapshots.values():
            snapshot.release()
        self.snapshots.clear()
        self.num_computed_tokens = self.num_draft_computed_tokens = 0
        self.draft = None
        self.deferred.clear()
