"""A Qwen3.5 that drafts with its own MTP head, under the scheduler: whatever is drafted, it answers
as decoding alone does.
"""

from __future__ import annotations

import pytest

from tests.decode.hybrid import check_batches, check_preemption, hybrid
from tests.decode.scheduling import TREES

DENSE, MOE = "dense+mtp", "moe+mtp"


@pytest.mark.parametrize(("kind", "tree"), [*((DENSE, tree) for tree in TREES), (MOE, "bushy")])
def test_batches_with_images_answer_as_decoding_alone(kind: str, tree: str) -> None:
    check_batches(hybrid(kind), tree)


def test_preempted_sequences_and_reused_prefixes_answer_alike() -> None:
    check_preemption(hybrid(DENSE))
