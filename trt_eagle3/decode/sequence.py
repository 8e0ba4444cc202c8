"""A sequence in the making: what it says, and what the caches hold of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trt_eagle3.decode.kv_cache import PagePool, PageTable
from trt_eagle3.decode.prompt import Prompt
from trt_eagle3.decode.propose import DraftState
from trt_eagle3.decode.sampling import Sampler
from trt_eagle3.decode.sampling_params import GREEDY, SamplingParams

__all__ = ["SequenceState"]


@dataclass(eq=False)
class SequenceState:
    """One sequence.

    Attributes:
        drafting: whether the draft follows it. backpressured: whether its reader lags behind.
        created: by ``time.perf_counter``. queue_seconds: from then to its admission, None before.
        turn_start: how many tokens it had when it was admitted.
        tokens: the answer. Its last token is in no cache yet: it is the root of the next tree.
        length: rows in the target's cache. draft: the draft's state, once the prompt is through.
        draft_length: rows in the draft's cache, equal to ``length`` while it drafts.
        deferred: [k * H] aux hidden states of the rows that the draft lacks, where it was not worth
            asking.
        page_keys: of the pages that prompt and answer fill, as far as anybody asked
            (``prefix_cache.page_keys``).
    """

    prompt: Prompt
    pool: PagePool
    vocab_size: int
    sampling: SamplingParams = GREEDY
    drafting: bool = False
    backpressured: bool = False
    created: float = field(default_factory=time.perf_counter)
    queue_seconds: float | None = None
    turn_start: int = 0
    tokens: list[int] = field(default_factory=list)
    length: int = 0
    draft: DraftState | None = None
    draft_length: int = 0
    deferred: list[Tensor] = field(default_factory=list)
    page_keys: list[bytes] = field(default_factory=list)
    pages: PageTable = field(init=False)
    sampler: Sampler = field(init=False)

    def __post_init__(self) -> None:
        self.pages = PageTable(self.pool)
        self.sampler = Sampler(self.sampling, self.prompt.token_ids, self.vocab_size)

    @property
    def num_prefill(self) -> int:
        """Rows to be in the cache before decoding goes on: the prompt, and after a preemption
        the answer so far.
        """
        return len(self.prompt.token_ids) + max(len(self.tokens) - 1, 0)

    @property
    def prefilled(self) -> bool:
        """Whether it has a root to decode from."""
        return bool(self.tokens) and self.length >= self.num_prefill

    @property
    def turn_length(self) -> int:
        """Tokens since it was admitted."""
        return len(self.tokens) - self.turn_start

    @property
    def num_written(self) -> int:
        """Rows that are in every cache that wants them."""
        return min(self.length, self.draft_length) if self.drafting else self.length

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt.token_ids) + len(self.tokens)

    def ids(self, start: int, stop: int) -> Tensor:
        """int64 [stop - start]: tokens of prompt and answer."""
        num_prompt = len(self.prompt.token_ids)
        output_ids = self.tokens[max(start - num_prompt, 0) : max(stop - num_prompt, 0)]
        return torch.cat(
            [self.prompt.token_ids[start:stop], torch.tensor(output_ids, dtype=torch.int64)]
        )

    def append_tokens(self, tokens: tuple[int, ...]) -> None:
        """Append to the answer."""
        self.tokens += tokens
        self.sampler.remember(tokens)

    def release(self) -> None:
        """Give all pages back; its output tokens stay, so that they can be computed again."""
        self.pages.truncate(0)
        self.length = self.draft_length = 0
        self.draft = None
        self.deferred.clear()
