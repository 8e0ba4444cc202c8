"""First tokens: sampled where a prompt ends, embedded for the draft, appended once read."""

from __future__ import annotations

import torch
from torch import Tensor
from trt_eagle3.decode.step.first_token import FirstTokens

from tests.decode.pair import NUM_PAGES, PAGE_SIZE, VOCAB
from tests.decode.scheduling import pair, prompts
from trt_eagle3.decode.forward.segment import Segment
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.sequence import SequenceState


def some() -> tuple[SequenceState, SequenceState]:
    """Prompts of 9 and 17 rows."""
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    return pair().sequence(prompts()[0], pool), pair().sequence(prompts()[3], pool)


def logits_of(*best: int) -> Tensor:
    return torch.eye(VOCAB)[list(best)]


def test_first_tokens_are_those_of_prompts_that_end() -> None:
    ends, goes_on = some()
    tokens = FirstTokens([(goes_on, 5), (ends, 9)], logits_of(3, 7))
    assert ends.tokens == []  # until they are read
    tokens.append()
    assert (ends.tokens, goes_on.tokens) == ([7], [])


def test_first_tokens_of_logits_that_are_no_numbers_are_none() -> None:
    ends, other = some()
    other.length = 8
    logits = logits_of(3, 7)
    logits[0][5] = torch.nan
    FirstTokens([(ends, 9), (other, 9)], logits).append()
    assert (ends.tokens, other.tokens) == ([], [7])


def test_first_tokens_come_after_the_last_row_of_the_last_segment() -> None:
    ends, goes_on = some()
    tokens = FirstTokens([(goes_on, 5), (ends, 9)], logits_of(3, 7))
    ids = torch.arange(18).view(3, 6)[:, 1:]
    segments = [Segment(goes_on, 0, 5), Segment(ends, 0, 5, is_last=False), Segment(ends, 5, 4)]
    found = tokens.put_ids(ids, segments)
    assert found[2, 3] == 7
    assert ids[2, 3] == 16, "the prefill's own stay"
    found[2, 3] = 16
    assert found.equal(ids)


def test_first_tokens_of_those_whom_the_draft_follows_are_put() -> None:
    first, second = some()
    tokens = FirstTokens([(first, 9), (second, 17)], logits_of(3, 7))
    assert (
        tokens.put_ids(torch.zeros(1, 17, dtype=torch.int64), [Segment(second, 0, 17)])[0, 16] == 7
    )


def test_first_tokens_of_who_starts_again_are_not_sampled_twice() -> None:
    ends, _ = some()
    ends.append_tokens((4,))
    FirstTokens([(ends, 9)], logits_of(3)).append()
    assert ends.tokens == [4]
