"""A Qwen3.5 that drafts with its own MTP head, under the scheduler: whatever is drafted, it answers
as decoding alone does.
"""

from __future__ import annotations

import pytest

from tests.decode.hybrid import LAYOUTS, ROOM, all_free, hybrid
from tests.decode.pair import NUM_PAGES, PAGE_SIZE
from tests.decode.scheduling import TREES
from trt_eagle3.decode.kv_cache import PagePool
from trt_eagle3.decode.prefix_cache import PrefixCache

DENSE, MOE = "dense+mtp", "moe+mtp"


@pytest.mark.parametrize(("kind", "tree"), [*((DENSE, tree) for tree in TREES), (MOE, "bushy")])
def test_batches_with_pictures_answer_as_decoding_alone(kind: str, tree: str) -> None:
    pair = hybrid(kind)
    expected = [pair.alone(i) for i in range(len(LAYOUTS))]
    states = pair.make_states()
    scheduler = pair.make_scheduler(states, tree)
    assert pair.answers(scheduler, PagePool(NUM_PAGES, PAGE_SIZE), range(len(LAYOUTS))) == expected
    assert all_free(states)


def test_preempted_sequences_and_reused_prefixes_answer_alike() -> None:
    pair = hybrid(DENSE)
    expected = [pair.alone(i) for i in (1, 2)]
    pool = PagePool(16, PAGE_SIZE)  # both begin, one can end
    prefixes, states = PrefixCache(pool), pair.make_states(ROOM)
    scheduler = pair.make_scheduler(states, prefixes=prefixes)
    assert pair.answers(scheduler, pool, (1, 2)) == expected
    assert scheduler.num_preempted > 0
    assert pair.answers(scheduler, pool, (2, 1)) == expected[::-1]
    assert scheduler.num_reused_rows > 0
