"""What a step emits: each sequence once, its first token and a cycle's together."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from tests.decode.overwriting import overwriting_llm
from tests.tiny import build_tiny
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.request.request import Request
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.decode.schedule.emission import Emission, joined
from trt_eagle3.decode.schedule.scheduler import Scheduler
from trt_eagle3.errors import EngineFailedError

ONE, OTHER = (cast(SequenceState, object()) for _ in range(2))


def test_joined_emissions_have_every_token_once_in_order() -> None:
    first = Emission(ONE, (5,), begins=True)
    cycle = Emission(ONE, (6, 7), full=True, tree_depth=3)
    beside = Emission(OTHER, (8,), tree_depth=0)
    assert joined([first, beside, cycle]) == [
        Emission(ONE, (5, 6, 7), begins=True, full=True, tree_depth=3),
        beside,
    ]


def test_joined_emission_keeps_the_error_of_the_cycle() -> None:
    error = EngineFailedError("no numbers")
    (found,) = joined([Emission(ONE, (5,), begins=True), Emission(ONE, (), error=error)])
    assert (found.tokens, found.begins, found.error) == ((5,), True, error)
    assert [(p.tokens, p.tree_depth) for p in found.parts] == [((5,), None)]


def test_parts_are_those_of_each_forward_and_only_the_last_is_full() -> None:
    found = Emission(ONE, (5, 6, 7), begins=True, full=True, tree_depth=2).parts
    assert [(p.tokens, p.tree_depth, p.full) for p in found] == [
        ((5,), None, False),
        ((6, 7), 2, True),
    ]
    alone = Emission(ONE, (5,), begins=True, full=True).parts
    assert [(p.tokens, p.tree_depth, p.full) for p in alone] == [((5,), None, True)]
    assert [p.tokens for p in Emission(ONE, (6, 7), tree_depth=2).parts] == [(6, 7)]
    assert Emission(ONE, (), error=EngineFailedError("no numbers")).parts == []


LIMITS = {"max_batch_size": 4, "max_seq_len": 256, "max_visual_tokens": 64}


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_answer_ends_where_it_ends_though_its_first_token_and_a_cycle_come_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    """While others decode, a prompt's first token is read in the step that runs its first cycle."""
    steps, step = list[list[Emission]](), Scheduler.step

    def watched(self: Scheduler) -> list[Emission]:
        steps.append(step(self))
        return steps[-1]

    prompts = ["Say nothing.", "What is 3 plus 4?", "What is 12 plus 30?"]
    limits = [30, 30, max_tokens]
    with overwriting_llm(build_tiny(tmp_path, limits=LIMITS)) as engine:
        alone = [
            engine.generate(p, ignore_eos=True, max_tokens=n)
            for p, n in zip(prompts, limits, strict=True)
        ]
        engine.restart_metrics()
        monkeypatch.setattr(Scheduler, "step", watched)
        engine.bundle.decoder.prefill_chunk = 16  # so that prompts end one after the other
        requests = [
            Request(p, sampling=SamplingParams(ignore_eos=True, max_tokens=n))
            for p, n in zip(prompts, limits, strict=True)
        ]
        answers = engine._started().submit_together(requests)
        found = [answer.finish() for answer in answers]
        metrics = engine.metrics()
    assert [g.token_ids for g in found] == [g.token_ids for g in alone]
    assert found[2].accepted_lengths == (1,) * (max_tokens - 1)
    assert all(len({id(e.sequence) for e in emitted}) == len(emitted) for emitted in steps)
    both = [e for emitted in steps for e in emitted if len(e.parts) == 2]
    assert any(len(e.sequence.tokens) < 30 for e in both), "the short one is in such a step"
    assert metrics.generated_tokens == sum(limits)
    assert metrics.kv_pages_used == 0
