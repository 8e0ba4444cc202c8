"""Recorded loads of an H200 served again: the policy keeps to what drafting may cost and gain.

``benchmarks/traces/h200_8b.json.gz`` has every tree at every load (``benchmarks.record_load``).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.replay_policy import (
    RecordedLoad,
    fixed_policy,
    loads_of,
    make_policy,
    prime,
    replay,
)
from trt_eagle3.decode.policy.protocol import FixedPolicy

TRACE = Path(__file__).parents[3] / "benchmarks" / "traces" / "h200_8b.json.gz"
LOADS = loads_of(TRACE)
PROMPT_ROW_S = 21e-6  # 8B on an H200, chunks of 1,000 rows and more
LEAST_OF_AUTOREGRESSIVE = 0.97
LEAST_OF_BEST_FIXED = 0.93
"""What a user may lose by the policy, to either side: the bounds that the design sets."""


def name(load: RecordedLoad) -> str:
    return f"{load.clients} clients, length {load.length:g}"


@pytest.mark.parametrize("load", LOADS, ids=name)
def test_replayed_load_loses_little_to_either_side(load: RecordedLoad) -> None:
    policy = make_policy(load)
    prime(policy, LOADS, PROMPT_ROW_S)
    served = replay(load, policy, seconds=40.0, skip=20.0).speed
    fixed = {
        size: replay(load, fixed_policy(size), seconds=20.0, skip=0.0).speed
        for size in {0, load.best_size}
    }
    assert served >= LEAST_OF_AUTOREGRESSIVE * fixed[0]
    assert served >= LEAST_OF_BEST_FIXED * max(fixed.values())


def test_replay_of_a_policy_that_always_drafts_fails_where_the_draft_is_never_right() -> None:
    load = next(one for one in LOADS if one.clients == 1 and one.length == 1)
    always: FixedPolicy = fixed_policy(4)
    plain = replay(load, fixed_policy(0), seconds=10.0, skip=0.0).speed
    drafted = replay(load, always, seconds=10.0, skip=0.0).speed
    assert drafted < LEAST_OF_AUTOREGRESSIVE * plain
