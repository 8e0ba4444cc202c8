"""Answers to 150 drawn JSON Schemas: trees change no greedy token, and every finished answer is
valid JSON of its schema.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decode.mask_faults import bonus_unmasked, not_rolled_back, parents_masks
from tests.decode.structured import ENDS, TREES, generate, text_of
from trt_eagle3.decode.sampling.grammar import Grammar
from trt_eagle3.decode.sampling.grammar_state import GrammarState
from trt_eagle3.decode.sampling.sampling_params import SamplingParams

MAX_TOKENS = 32
NAMES = st.sampled_from(["a", "b", "name", "x y", 'q"', "é"])
SCALARS = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, n: {"type": "integer", "minimum": low, "maximum": low + n},
        st.integers(-50, 50),
        st.integers(0, 500),
    ),
    st.just({"type": "number"}),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
    st.just({"type": "string", "pattern": "^[a-c]{2,5}$"}),
    st.builds(
        lambda v: {"enum": v},
        st.lists(
            st.sampled_from(["red", 1, None, True, "é\n"]), min_size=1, max_size=3, unique_by=repr
        ),
    ),
    st.builds(lambda v: {"const": v}, st.sampled_from([7, "x", [1, "a"], {"k": None}])),
)


def _object(properties: dict[str, Any], required: bool) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": list(properties)} if required else schema


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(_object, st.dictionaries(NAMES, inner, max_size=3), st.booleans()),
        st.builds(
            lambda item, n: {"type": "array", "items": item, "maxItems": n},
            inner,
            st.integers(0, 3),
        ),
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=2)),
    )


SCHEMAS = st.recursive(SCALARS, _nested, max_leaves=5)
finished: list[bool] = []


def sampling_of(schema: Any, number: int) -> SamplingParams:
    """Every way to choose, in turn."""
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "top_p": 0.95, "seed": number},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"min_tokens": 6, "logit_bias": {ENDS[0]: 2.0}},
        {"ignore_eos": True},
    ]
    grammar = Grammar.json_schema(schema)
    return SamplingParams(grammar=grammar, max_tokens=MAX_TOKENS, **options[number % len(options)])


@settings(max_examples=150)
@given(schema=SCHEMAS, number=st.integers(0, 99))
def test_answers_of_drawn_schemas_parse_validate_and_do_not_depend_on_the_tree(
    schema: Any, number: int
) -> None:
    sampling = sampling_of(schema, number)
    tree = TREES["tree" if number % 2 else "chain"]
    (drafted,) = generate([sampling], tree, number)
    assert not drafted.sampler.error
    if sampling.greedy:
        (plain,) = generate([sampling], TREES["plain"], number)
        assert drafted.answer == plain.answer
    finished.append(drafted.answer[-1] in ENDS)
    if finished[-1]:
        jsonschema.validate(json.loads(text_of(drafted.answer)), schema)
    else:
        assert len(drafted.answer) == MAX_TOKENS


def test_most_drawn_answers_were_finished() -> None:
    assert sum(finished) >= 0.6 * len(finished), sum(finished)


SCHEMA = _object({"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", 2]}},
                 required=True)  # fmt: skip


def answers(tree: str, *, ragged: bool = False) -> list[list[int]]:
    sampling = SamplingParams(grammar=Grammar.json_schema(SCHEMA), max_tokens=MAX_TOKENS)
    batches = (generate([sampling] * 2, TREES[tree], seed, ragged=ragged) for seed in range(6))
    return [second.answer for _, second in batches]


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("tree", ["chain", "tree"])
def test_batches_emit_with_every_tree_what_they_emit_without(tree: str, ragged: bool) -> None:
    assert answers(tree, ragged=ragged) == answers("plain")


def _one_token_late(monkeypatch: pytest.MonkeyPatch) -> None:
    true = GrammarState.advance

    def advance(self: Any, tokens: Any) -> None:
        late = [*getattr(self, "late", ()), *tokens]
        self.late = late[-1:]
        true(self, late[:-1])

    monkeypatch.setattr(GrammarState, "advance", advance)


@pytest.mark.parametrize("plant", [parents_masks, not_rolled_back, bonus_unmasked, _one_token_late])
def test_planted_fault_changes_answers(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers("plain")
    plant(monkeypatch)
    assert answers("tree") != expected
