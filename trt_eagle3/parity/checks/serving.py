"""Check of serving: answers of concurrent clients must equal the recorded answers of each alone."""

from __future__ import annotations

from trt_eagle3.parity.checks.check_recorder import Measurements
from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.checks.tokens import compare_answers

__all__ = ["check_tokens"]


def check_tokens(e: Evidence, m: Measurements) -> None:
    """Compare the tokens of concurrent clients with the recorded ones.

    Where steps can be launched ahead of the host and none was, nothing was proved: that fails.
    """
    served = e.record.served
    assert served is not None, "served answers were not recorded"
    for replies in served.replies:
        for expected, reply in zip(e.expected, replies, strict=True):
            sides = ("alone", "served")
            compare_answers(m, expected, reply.token_ids, e.decode, sides, expected)
    if served.runs_ahead and not served.num_ahead:
        m.add(1, "", "tokens", None, "no step was launched ahead of the host", compared=0)
    m.count(
        clients=served.num_clients,
        steps_launched_ahead=served.num_ahead,
        forwards_of_prompts_and_steps=served.num_mixed,
    )
