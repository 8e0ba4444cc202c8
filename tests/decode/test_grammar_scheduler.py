"""Grammars, penalties, bias and log-probabilities through the scheduler: in every mode, with
images, preemption and reused prefixes, each sequence says what it says alone in plain decoding.
"""

from __future__ import annotations

import random
import re
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tests.decode.pair import NUM_PAGES, PAGE_SIZE, VOCAB
from tests.decode.scheduling import (
    LAYOUTS,
    MAX_SEQ_LEN,
    MAX_TOKENS,
    TREES,
    finish,
    make_scheduler,
    prompts,
)
from tests.decode.test_stepper import count_calls
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.prefix_cache import PrefixCache
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.sampling.filter_trial import FilterTrial
from trt_eagle3.decode.sampling.grammar import Grammar
from trt_eagle3.decode.sampling.grammar_state import GrammarState
from trt_eagle3.decode.sampling.grammar_text import grammar_text
from trt_eagle3.decode.sampling.logprobs import TokenLogprob
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.decode.speculation.tree import AnyTree
from trt_eagle3.decode.speculation.tree_masks import TreeMasks
from trt_eagle3.decode.step import stepper

END = VOCAB - 1
TEXTS = [*"0123456789,"]
NUMBERS = "([0-4]{2}[5-9],)+"
PATTERNS = (NUMBERS, "[0-9]{3},[0-9]", "(1|2)*3?")
GRAMMARS = [Grammar.regex(pattern) for pattern in PATTERNS]


class Vocabulary:
    eos_token_id, bos_token_id, special_token_ids = END, None, (END,)
    tokens = [*(text.encode() for text in TEXTS), b"<end>"]  # noqa: RUF012

    def __call__(self, text: str | bytes) -> list[int]:
        whole = text if isinstance(text, str) else text.decode()
        return [TEXTS.index(c) for c in whole]


@cache
def matcher(grammar: Grammar) -> LLMatcher:
    made = LLMatcher(LLTokenizer(TokenizerWrapper(Vocabulary())), grammar_text(grammar))
    assert not made.is_error(), made.get_error()
    return made


OPTIONS: list[dict[str, Any]] = [
    {"grammar": GRAMMARS[0]},
    {},
    {"grammar": GRAMMARS[1], "logprobs": 2},
    {"frequency_penalty": 1.5, "min_tokens": 9},
    {"grammar": GRAMMARS[2], "frequency_penalty": 0.8, "presence_penalty": 0.3},
    {"logit_bias": {3: 4.0, END: 3.0}, "logprobs": 1},
    {"grammar": GRAMMARS[0], "logit_bias": {1: 5.0}, "min_tokens": 6, "ignore_eos": True},
]
"""By sequence: images, prefixes that others have, and long prompts among them (``LAYOUTS``)."""


def sequence(
    index: int, pool: PagePool, drafting: bool, options: dict[str, Any] | None = None
) -> SequenceState:
    sampling = SamplingParams(**(OPTIONS[index] if options is None else options))
    state = None
    if sampling.grammar is not None:
        early = {"min_tokens": sampling.min_tokens, "ignore_eos": sampling.ignore_eos}
        state = GrammarState(matcher(sampling.grammar).deep_copy(), [END], VOCAB, **early)
        state.trial.filters = index % 4 == 0  # some drafts are kept to it from the beginning
    return SequenceState(prompts()[index], pool, VOCAB, sampling, drafting, state, [END])


def answer_of(s: SequenceState) -> list[int]:
    """Cut where it ends."""
    ends = [i + 1 for i, token in enumerate(s.tokens) if token == END]
    return s.tokens[: min([*ends, MAX_TOKENS])]


def run(
    asked: list[SequenceState],
    pool: PagePool,
    tree: AnyTree | None,
    prefixes: PrefixCache | None = None,
    *,
    preempting: bool = False,
) -> int:
    """Step until all have their answers; how many were preempted."""
    scheduler = make_scheduler(pool, prefixes, lambda _: tree)
    coming, chance = list(asked), random.Random(3)
    while coming or scheduler.running or scheduler.waiting:
        if coming and chance.random() < 0.4:
            scheduler.add(coming.pop())
        if preempting and scheduler.running and chance.random() < 0.2:
            scheduler._preempt(chance.choice(scheduler.running))
        for emission in scheduler.step():
            assert emission.error is None, emission.error
            s = emission.sequence
            if len(s.tokens) >= MAX_TOKENS or END in s.tokens or emission.full:
                scheduler.remove(s)
    return scheduler.num_preempted


@cache
def alone(index: int) -> tuple[list[int], list[TokenLogprob]]:
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    s = sequence(index, pool, drafting=False)
    run([s], pool, None)
    return answer_of(s), s.logprobs


def pool_of(num_pages: int, ahead: bool) -> PagePool:
    return PagePool(num_pages, PAGE_SIZE, MAX_SEQ_LEN // PAGE_SIZE if ahead else None)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("many", [None, 1, 8], ids=["synchronous", "ahead", "ahead"])
def test_sequences_of_all_kinds_say_what_each_says_alone(
    tree: str, many: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepper, "_LAUNCHED_AHEAD", many or 8)
    pool = pool_of(13, many is not None)  # hardly more than the longest wants
    shape = TREES[tree]
    asked = [sequence(i, pool, shape is not None) for i in range(len(LAYOUTS))]
    preempted = run(asked, pool, shape, PrefixCache(pool), preempting=True)
    for i, s in enumerate(asked):
        tokens, logprobs = alone(i)
        assert answer_of(s) == tokens, i
        for ours, theirs in zip(s.logprobs, logprobs, strict=False):
            assert ours.token_id == theirs.token_id
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [t for t, _ in ours.top] == [t for t, _ in theirs.top]
        assert (len(s.logprobs) >= len(tokens)) == (s.sampling.logprobs is not None)
    assert preempted
    assert pool.num_used == pool.num_idle, "pages leaked"


def test_answers_alone_are_what_their_options_demand() -> None:
    texts = ["".join(TEXTS[t] for t in alone(i)[0] if t != END) for i in range(len(OPTIONS))]
    assert re.fullmatch(NUMBERS, texts[1]) is None, "the target would not say so by itself"
    assert re.fullmatch(r"([0-4]{2}[5-9],)+([0-4]{1,2}[5-9]?)?", texts[0])
    assert re.fullmatch(PATTERNS[1], texts[2])
    assert len(alone(3)[0]) > 9
    assert END not in alone(6)[0], "it goes on as long as it may"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("tree", ["chain", "bushy", "dynamic"])
def test_sampled_answers_obey_their_grammar_and_come_again(tree: str, ahead: bool) -> None:
    found = []
    for wanted in (False, True):  # what was tried with other answers changes nothing
        pool = pool_of(NUM_PAGES, ahead)
        options = {"temperature": 1.2, "grammar": GRAMMARS[1]}
        asked = [sequence(i, pool, True, {**options, "seed": i}) for i in (0, 1, 3)]
        for s in asked:
            assert s.sampler.grammar is not None
            s.sampler.grammar.trial.filters = wanted
        run(asked, pool, TREES[tree])
        found.append([answer_of(s) for s in asked])
    assert found[0] == found[1]
    for answer in found[0]:
        text = "".join(TEXTS[t] for t in answer if t != END)
        assert re.fullmatch(PATTERNS[1], text), text


def test_filtered_drafts_are_accepted_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FilterTrial, "add", lambda *_, **__: None)

    def cycles(*, wanted: bool) -> int:
        pool = pool_of(NUM_PAGES, ahead=True)
        asked = [sequence(0, pool, True), sequence(4, pool, True)]
        for s in asked:
            assert s.sampler.grammar is not None
            s.sampler.grammar.trial.filters = wanted
        with pytest.MonkeyPatch.context() as patch:
            calls = count_calls(patch, TreeMasks, "compute")
            run(asked, pool, TREES["chain"])
        return len(calls)

    assert cycles(wanted=True) < cycles(wanted=False)


def test_grammar_that_breaks_down_fails_its_own_sequence_alone() -> None:
    for ahead in (False, True):
        pool = pool_of(NUM_PAGES, ahead)
        good, bad = sequence(0, pool, True), sequence(2, pool, True)
        scheduler = make_scheduler(pool, None, lambda _: TREES["bushy"])
        scheduler.add(good)
        scheduler.add(bad)
        while not bad.tokens:
            scheduler.step()
        assert bad.sampler.grammar is not None
        bad.sampler.grammar.error = "too many states"
        errors = []
        for _ in range(8):
            errors += [e for e in scheduler.step() if e.error is not None]
        assert [e.sequence for e in errors] == [bad]
        assert "grammar cannot go on (too many states)" in str(errors[0].error)
        assert len(good.tokens) > 8


@pytest.mark.parametrize("ahead", [False, True])
def test_of_several_answers_to_one_prompt_one_computes_it(ahead: bool) -> None:
    pool = pool_of(NUM_PAGES, ahead)
    asked = [sequence(1, pool, True, {}) for _ in range(3)]  # with two images
    scheduler = make_scheduler(pool, PrefixCache(pool), lambda _: TREES["chain"])
    for s in asked:
        scheduler.add(s)
    finish(scheduler)
    assert [answer_of(s) for s in asked] == [alone(1)[0]] * 3
    pages = (len(asked[0].prompt.token_ids) - 1) // PAGE_SIZE
    assert scheduler.num_reused_rows == 2 * pages * PAGE_SIZE


@pytest.mark.parametrize("known", [True, False])
def test_prompt_whose_pages_are_known_waits_for_nobody(known: bool) -> None:
    """Neither for another that asks the same and has no token yet."""
    pool = pool_of(NUM_PAGES, False)
    scheduler = make_scheduler(pool, PrefixCache(pool), lambda _: TREES["chain"])
    if known:
        scheduler.add(sequence(1, pool, True, {}))
        finish(scheduler)
    asked = [sequence(1, pool, True, {}) for _ in range(3)]
    for s in asked:
        scheduler.add(s)
    scheduler.step()
    assert scheduler.running == (asked if known else asked[:1])
    finish(scheduler)
    assert [answer_of(s) for s in asked] == [alone(1)[0]] * 3


def test_prompt_that_only_an_undrafted_one_has_filled_waits_for_who_drafts() -> None:
    pool = pool_of(NUM_PAGES, False)
    scheduler = make_scheduler(pool, PrefixCache(pool), lambda _: TREES["chain"])
    scheduler.add(sequence(1, pool, False, {}))
    finish(scheduler)
    asked = [sequence(1, pool, drafting, {}) for drafting in (True, True, False)]
    for s in asked:
        scheduler.add(s)
    scheduler.step()
    assert scheduler.running == [asked[0], asked[2]]
    finish(scheduler)
    assert [answer_of(s) for s in asked] == [alone(1)[0]] * 3
