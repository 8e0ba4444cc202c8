"""First tokens: sampled where a prompt ends, embedded for the draft, appended once read."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.decode.pair import NUM_PAGES, PAGE_SIZE, VOCAB
from tests.decode.scheduling import pair, prompts
from trt_eagle3.decode.first_token import FirstTokens
from trt_eagle3.decode.kv_cache import PagePool
from trt_eagle3.decode.segment import Segment
from trt_eagle3.decode.sequence import SequenceState


def some() -> tuple[SequenceState, SequenceState]:
    """Prompts of 9 and 17 rows."""
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    return pair().sequence(prompts()[0], pool), pair().sequence(prompts()[3], pool)


def logits_of(*best: int) -> tuple[Tensor, ...]:
    return torch.eye(VOCAB)[list(best)].unbind()


class Table:
    def lookup(self, token_ids: Tensor) -> Tensor:
        assert token_ids.ndim > 0, "to index by a scalar of the device is to wait for it"
        return token_ids[..., None].float().expand(*token_ids.shape, 4)


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


def test_first_tokens_put_embeds_into_the_last_row_of_the_last_segment() -> None:
    ends, goes_on = some()
    tokens = FirstTokens([(goes_on, 5), (ends, 9)], logits_of(3, 7))
    embeds = torch.zeros(3, 5, 4)
    segments = [Segment(goes_on, 0, 5), Segment(ends, 0, 5, is_last=False), Segment(ends, 5, 4)]
    tokens.put_embeds(embeds, segments, Table())  # type: ignore[arg-type]
    assert embeds[2, 3].tolist() == [7.0] * 4
    embeds[2, 3] = 0
    assert not embeds.any()


def test_first_tokens_of_who_starts_again_are_not_sampled_twice() -> None:
    ends, _ = some()
    ends.append_tokens((4,))
    FirstTokens([(ends, 9)], logits_of(3)).append()
    assert ends.tokens == [4]
