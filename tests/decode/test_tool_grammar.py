"""Grammars of calls in the XML format: the parser reads what they allow as the schema has it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decode.structured import ENDS, VOCAB, compiler, ids_of, state_of, text_of
from tests.decode.test_structured_answers import SCHEMAS
from trt_eagle3.decode.request.conversation import Conversation
from trt_eagle3.decode.sampling.grammar import Grammar
from trt_eagle3.decode.sampling.grammar_masks import fill_next
from trt_eagle3.decode.sampling.grammar_state import GrammarState
from trt_eagle3.decode.sampling.sampling_params import GREEDY
from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.assistant_message import AnswerFormat, AssistantMessage
from trt_eagle3.multimodal.reasoning import Reasoning
from trt_eagle3.multimodal.tool_formats.qwen3_xml import QWEN3_XML
from trt_eagle3.multimodal.tools import Tool

XML = AnswerFormat(tools=QWEN3_XML)


def tool(properties: Mapping[str, Any], /, **fields: Any) -> Tool:
    return Tool("f", parameters={"type": "object", "properties": properties, **fields})


def grammar(
    *tools: Tool, choice: str = "required", form: AnswerFormat = XML, **more: Any
) -> Grammar:
    found = Conversation((), tools, choice, **more).constrained(GREEDY, form).grammar
    assert found is not None
    return found


def call(values: Mapping[str, str], name: str = "f") -> str:
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def allows(state: GrammarState, text: str) -> bool:
    """Whether ``text`` is a whole answer."""
    for token in ids_of(text):
        found = state.after(token)
        if found is None:
            return False
        state = found
    return any(token in ENDS for token in allowed(state))


def allowed(state: GrammarState) -> list[int]:
    row = np.empty(VOCAB // 32, dtype=np.int32)
    fill_next(state, row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


INTEGER = {"type": "integer", "minimum": 10, "maximum": 99}
NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ["", "x", "a\nb\n", "<b>", "12"], ["a</parameter>b"]),
        ({}, ["any"], []),
        ({"type": "string", "maxLength": 3, "minLength": 2}, ["ab", "\n\n\n"], ["a", "abcd"]),
        ({"type": "string", "pattern": "^a/b|c$"}, ["a/bx", "xc"], ["xa/b", "cx"]),
        ({"type": "string", "pattern": "b+"}, ["abba"], ["aa"]),
        ({"type": "string", "format": "date"}, ["2024-02-28"], ["2024-13-01", "now"]),
        ({"enum": ["on", "off", 'q"']}, ["on", 'q"'], ["of", "offs", '"on"']),
        ({"const": "x"}, ["x"], ["y"]),
        (INTEGER, ["10", "99"], ["9", "100", "ten", '"10"']),
        ({"type": "boolean"}, ["true"], ["True", "yes"]),
        ({"type": "null"}, ["null"], [""]),
        ({"type": "array", "items": INTEGER}, ["[]", "[10, 20]"], ["[1]", "10"]),
        ({"$ref": "#/$defs/n"}, ["10"], ["1", "x"]),
        ({"type": "array", "items": {"$ref": "#/$defs/tree"}}, ['[{"in": [{}]}]'], ['[{"in": 5}]']),
        (NULLABLE, ["null", "x", "none"], ["</parameter>"]),
        ({"type": ["string", "null"], "maxLength": 2}, ["null", "ab"], ["abc"]),
        # a text that would be read as a number that is not allowed
        ({"anyOf": [{"type": "string"}, INTEGER]}, ["ten", "10"], ["9", "9 or 10"]),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, ["ten", "9", "9 or 10"], []),
        ({"anyOf": [{"type": "string"}, {"enum": [1, 2]}]}, ["x", "1"], ["3"]),
        ({"type": ["string", "object"]}, ["x", '{"a": 1}'], ['{"a"', "{x}"]),
        ({"enum": ["auto", 1, None]}, ["auto", "1", "null"], ["2", "None"]),
        ({"allOf": [{"$ref": "#/$defs/s"}], "description": "d"}, ["ab"], ["abc"]),
    ],
)
def test_value_is_kept_to_its_schema(schema: Any, good: list[str], bad: list[str]) -> None:
    definitions = {
        "n": INTEGER,
        "s": {"type": "string", "maxLength": 2},
        "tree": {"type": "object", "properties": {"in": {"$ref": "#/$defs/more"}}},
        "more": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
    }
    called = tool({"a": schema}, required=["a"], **{"$defs": definitions})
    state = state_of(grammar(called))
    root = {**called.parameters, "properties": {"a": schema}}
    for value in good:
        assert allows(state, call({"a": value})), value
        [(_, found)] = AssistantMessage.parse(call({"a": value}), [called], XML).calls
        jsonschema.validate(json.loads(found), root)
    for value in bad:
        assert not allows(state, call({"a": value})), value


def test_required_parameters_come_in_order_and_others_may_be_left_out() -> None:
    text, whole = {"type": "string"}, {"type": "integer"}
    state = state_of(grammar(tool({"a": text, "b": whole, "c": text}, required=["a", "c"])))
    assert allows(state, call({"a": "x", "c": "y"}))
    assert allows(state, call({"a": "x", "b": "1", "c": "y"}))
    for wrong in ({"a": "x"}, {"c": "y"}, {"c": "y", "a": "x"}, {"a": "x", "c": "y", "d": "z"}):
        assert not allows(state, call(wrong)), wrong


def test_additional_properties_match_their_schema() -> None:
    state = state_of(grammar(tool({"a": {"type": "string"}}, additionalProperties=INTEGER)))
    assert allows(state, call({"a": "x", "b": "12", "c": "13"}))
    assert not allows(state, call({"b": "x"}))
    assert not allows(state, call({"a": "x", "a ": "1"}))
    closed = state_of(grammar(tool({})))
    assert allows(closed, call({}))
    assert not allows(closed, call({"a": "x"}))
    assert allows(state_of(grammar(Tool("f"))), call({"a": "x"}))


def test_number_of_calls_follows_the_choice() -> None:
    tools = (Tool("f"), Tool("g"))
    one, two = call({}), f"{call({})}\n{call({'x': 'y'}, 'g')}"
    assert allows(state_of(grammar(*tools)), two)
    single = state_of(grammar(*tools, parallel_tool_calls=False))
    named = state_of(grammar(*tools, choice="f"))
    for state in (single, named):
        assert allows(state, one)
        assert not allows(state, two)
        assert not allows(state, f"Well. {one}")
    assert not allows(named, call({}, "g"))


def test_strict_tool_constrains_its_calls_and_no_text() -> None:
    strict = Tool("f", parameters=tool({"a": INTEGER}, required=["a"]).parameters, strict=True)
    state = state_of(grammar(strict, Tool("g"), choice="auto"))
    assert allows(state, "Nothing to < call.")
    assert allows(state, f"I call.\n\n{call({'a': '12'})}\n{call({'any': 'x'}, 'g')}")
    assert not allows(state, call({"a": "1"}))
    bare = call({"a": "1"}).removeprefix("<tool_call>\n")
    assert not allows(state, bare), "the parser reads calls without <tool_call> too"


def test_grammar_begins_behind_the_reasoning_of_the_template() -> None:
    form = AnswerFormat(Reasoning("open", "[THINK]", "[/THINK]"), QWEN3_XML)
    state = state_of(grammar(Tool("f"), form=form))
    text = f"so [/THINK]{call({})}"
    assert allows(state, text)
    message = AssistantMessage.parse(text, [Tool("f")], form)
    assert (message.reasoning, message.calls) == ("so", [("f", "{}")])


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"anyOf": [{"required": ["a"]}]}, "tools: f: anyOf: the grammar of"),
        ({"minProperties": 1}, "tools: f: minProperties"),
        ({"properties": {"a>": {}}}, "a parameter named a>"),
        ({"properties": {"a": {"pattern": "a^b"}}}, "an anchor inside the pattern"),
        ({"properties": {"a": {"type": "string", "format": "path"}}}, "format 'path'"),
        ({"properties": {"a": {"type": "string", "not": {}}}}, "tools: f: not"),
        ({"properties": {"a": False}, "required": ["a"]}, "never allowed"),
        ({"properties": {"a": {"maxLength": 2, "anyOf": [{"maxLength": 3}]}}}, "maxLength twice"),
        ({"properties": {"a": {"anyOf": [{}] * 500}}}, "more than 64 alternatives"),
        (
            {
                "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}},
                "properties": {"a": {"$ref": "#/$defs/a"}},
            },
            "alternatives",
        ),
        ({"properties": {"a": {"type": "integer", "minimum": float("nan")}}}, "not JSON"),
        (
            {
                "$defs": {"d": {"type": "object", "description": "x" * 9000}},
                "properties": {f"a{i}": {"$ref": "#/$defs/d"} for i in range(64)},
            },
            "bytes of schemas",
        ),
        ({"additionalProperties": {"type": 5}}, "type: expected a type or a list of them, got 5"),
        ({"additionalProperties": {"enum": 5}}, "enum: expected a list"),
        ({"properties": {"a": {"format": ["x"]}}}, "format: expected a text"),
        ({"properties": {"a": {"minLength": "1"}}}, "minLength: expected a whole number"),
        ({"properties": {"a": {"$ref": "#/b"}}, "b": {"allOf": 7}}, "allOf: expected a list"),
        ({"$ref": "#/b", "b": {"required": 5}}, "required: expected a list"),
        (
            {
                "properties": {"a": {"$ref": f"#/required/{'9' * 5000}"}, "b": False},
                "required": ["b"],
            },
            "never allowed",
        ),
    ],
)
def test_what_the_format_cannot_express_is_refused(parameters: Any, expected: str) -> None:
    called = Tool("f", parameters={"type": "object", **parameters})
    with pytest.raises(UserError) as caught:
        compiler().state(grammar(called))
    assert expected in str(caught.value)
    assert str(caught.value).startswith("tools: ")


@pytest.mark.parametrize(
    "parameters",
    [
        # each reference names the whole
        {"properties": {"a": {"type": "array", "anyOf": [{"$ref": f"#{i}"} for i in range(8000)]}}},
        # all parameters have one list, of which little is allowed
        {
            "properties": {f"p{i}": {"$ref": "#/e"} for i in range(3000)},
            "e": {"enum": ["a", *(f"</parameter>{i}" for i in range(6000))]},
        },
    ],
)
def test_schema_that_takes_too_long_is_refused_in_time(parameters: Any) -> None:
    called = Tool("f", parameters={"type": "object", **parameters})
    with pytest.raises(UserError, match="tools: takes more than"):
        compiler().state(grammar(called))


def test_types_of_a_hostile_schema_are_looked_up_in_time() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(40):
        deep = {"a": deep}
    steps = {f"s{i}": {"$ref": f"#{'/a' * 40}/s{i + 1}"} for i in range(25)}
    place = deep
    for _ in range(39):
        place = place["a"]
    place["a"] = {**steps, "s25": {"type": "integer"}}
    references = [{"$ref": f"#{'/a' * 40}/s0"} for _ in range(16_000)]
    called = Tool("f", parameters={**deep, "properties": {"x": {"anyOf": references}}})
    start = time.process_time()
    [(_, found)] = AssistantMessage.parse(call({"x": "5"}), [called], XML).calls
    assert json.loads(found) == {"x": 5}
    assert time.process_time() - start < 1.0


@settings(max_examples=40)
@given(
    st.dictionaries(st.sampled_from(["a", "city", "é x"]), SCHEMAS, min_size=1, max_size=3),
    st.integers(0, 999),
)
def test_drawn_calls_are_parsed_to_valid_arguments(properties: Any, seed: int) -> None:
    called = tool(properties, required=sorted(properties)[:1], additionalProperties=False)
    state, chance, tokens = state_of(grammar(called)), random.Random(seed), []
    while not (tokens and tokens[-1] in ENDS) and len(tokens) < 400:
        choices = allowed(state)
        token = next((t for t in choices if t in ENDS), None) or chance.choice(choices)
        tokens.append(token)
        if token not in ENDS:
            found = state.after(token)
            assert found is not None
            state = found
    message = AssistantMessage.parse(text_of(tokens), [called], XML)
    assert message.content == ""
    if tokens[-1] in ENDS:
        [(name, arguments)] = message.calls
        assert name == "f"
        jsonschema.validate(json.loads(arguments), called.parameters)
