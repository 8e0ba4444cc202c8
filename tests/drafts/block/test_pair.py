"""The trained block drafts of the tiny pair: the answers of the target alone, in fewer forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tasks import examples

import trt_eagle3
from tests.tiny import DRAFT, ROOT, build_tiny
from trt_eagle3 import LLM, Grammar, Request, SamplingParams
from trt_eagle3.errors import UserError

DRAFTS = {
    "eagle3": DRAFT,
    "dflash": ROOT / "examples/tiny/dflash",
    "dspark": ROOT / "examples/tiny/dspark",
}
NUM_PROMPTS, MAX_TOKENS = 8, 40
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
SAMPLINGS = {
    "greedy": SamplingParams(),
    "penalties and logprobs": SamplingParams(
        repetition_penalty=1.2, presence_penalty=0.3, logprobs=2
    ),
    "stop string": SamplingParams(stop=(" a",)),
    "grammar": SamplingParams(grammar=Grammar.json_schema(SCHEMA)),
    "seed": SamplingParams(temperature=0.9, seed=5),
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LLM]:
    found: dict[str, LLM] = {}

    def engine(name: str) -> LLM:
        if name not in found:
            steps = {"steps": 5 if name == "eagle3" else 7, "adaptive": False}
            limits = {"max_batch_size": 4, "max_kv_tokens": 1024}
            folder = tmp_path_factory.mktemp(name)
            bundle = build_tiny(folder, draft=DRAFTS[name], speculation=steps, limits=limits)
            found[name] = trt_eagle3.load(bundle)
        return found[name]

    return engine


def requests(sampling: SamplingParams, **options: Any) -> list[Request]:
    return [
        Request(
            e.prompt,
            list(e.images),
            [list(e.frames)] if e.frames else [],
            sampling.updated(max_tokens=MAX_TOKENS),
            **options,
        )
        for e in examples("heldout", 3, NUM_PROMPTS)
    ]


def acceptance_length(engine: LLM) -> float:
    answers = [engine.submit(r).finish() for r in requests(SamplingParams())]
    lengths = [n for a in answers for n in a.accepted_lengths]
    return sum(lengths) / len(lengths)


@pytest.mark.parametrize("draft", ["dflash", "dspark"])
def test_acceptance_is_above_that_of_the_eagle3_draft(
    engines: Callable[[str], LLM], draft: str
) -> None:
    assert acceptance_length(engines(draft)) > acceptance_length(engines("eagle3"))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("draft", ["dflash", "dspark"])
def test_options_give_the_same_answers_alone_and_in_batches(
    engines: Callable[[str], LLM], draft: str, sampling: str
) -> None:
    """Half of a batch drafts; there is not room for all, so some are preempted."""
    engine, asked = engines(draft), SAMPLINGS[sampling]
    seeded = asked.seed is not None
    alone = [engine.submit(r).finish() for r in requests(asked, speculation=seeded)]
    flying = [
        engine.submit(r if seeded or i % 2 else r2)
        for i, (r, r2) in enumerate(
            zip(requests(asked), requests(asked, speculation=False), strict=True)
        )
    ]
    together = [answer.finish() for answer in flying]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    assert [a.text for a in together] == [a.text for a in alone]


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        ({"mode": "dynamic"}, "drafts chains only. Set speculation.mode: chain"),
        ({"steps": 8}, "at most 7 tokens"),
    ],
)
def test_trees_and_longer_blocks_are_refused(
    tmp_path: Any, speculation: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build_tiny(tmp_path, draft=DRAFTS["dflash"], speculation=speculation)
