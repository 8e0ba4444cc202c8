"""Tools as strangers send them, and past calls as templates take them."""

from __future__ import annotations

from typing import Any

import pytest

from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.call_arguments import read_arguments
from trt_eagle3.multimodal.tools import MAX_TOOLS, Tool, read_tools, template_calls


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def test_tool_is_read_with_what_it_says() -> None:
    schema = {"type": "object", "properties": {"city": {"type": ["string", "null"]}}}
    [tool] = read_tools([function(description="d", parameters=schema, strict=True)])
    assert tool == Tool("f", "d", schema, strict=True)
    assert tool.to_template() == function(description="d", parameters=schema)


def test_tool_without_parameters_takes_an_empty_object() -> None:
    [tool] = read_tools([function(parameters=None, description=None, strict=None)])
    assert tool == Tool("f", "", {"type": "object", "properties": {}})
    assert tool.arguments["additionalProperties"] is False, "it is called without arguments"
    [any_object] = read_tools([function(parameters={"type": "object"})])
    assert any_object.arguments == {"type": "object"}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ([5], "tools[0]: expected"),
        ([{"type": "web_search"}], "tools[0]: expected"),
        ([{"type": "function"}], "tools[0].function: expected an object"),
        ([function(name="")], "tools[0].function.name: expected 1 to 64"),
        ([function(name="a b")], "tools[0].function.name: expected 1 to 64"),
        ([function(name="a" * 65)], "tools[0].function.name: expected 1 to 64"),
        ([function(), function()], "tools[1].function.name: 'f' is the name of tools[0] too"),
        ([function(description=5)], "tools[0].function.description: expected a text"),
        ([function(strict="yes")], "tools[0].function.strict: expected true or false"),
        ([function(parameters=[1])], "parameters: expected a JSON"),
        ([function(parameters={"type": "array"})], 'a schema of type "object"'),
        ([function(parameters={"type": "objekt"})], "parameters.type: expected one of array"),
        ([function(parameters={"properties": []})], "parameters.properties: expected an object"),
        (
            [function(parameters={"properties": {"a": {"type": "strin"}}})],
            "parameters.properties.a.type: expected one of",
        ),
        *[
            ([function(parameters={"properties": {"my a": {"type": bad}}})], "my a.type: expected")
            for bad in (5, None, True, 1.5, {}, [5], [[]])
        ],
        *[
            ([function(parameters={"$ref": bad})], "parameters.$ref: expected a text")
            for bad in (5, None, [], {})
        ],
        ([function(parameters={"required": "a"})], "parameters.required: expected a list"),
        ([function(parameters={"properties": {"a": {"enum": []}}})], "a.enum: expected a list"),
        ([function(parameters={"anyOf": {}})], "parameters.anyOf: expected a list"),
        ([function(parameters=deep(60))], "nested deeper than 48 levels"),
        ([function(name=f"f{i}") for i in range(MAX_TOOLS + 1)], "tools: 129 of them"),
    ],
)
def test_bad_tools_are_refused_by_the_field(tools: list[Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        read_tools(tools)
    assert expected in str(caught.value)
    assert str(caught.value).startswith("tools")


def test_arguments_of_past_calls_are_text_or_objects_as_the_template_wants_them() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a":  1}'}}
    [text] = template_calls([call], "calls", as_text=True)
    [parsed] = template_calls([call], "calls", as_text=False)
    assert text["function"]["arguments"] == '{"a":  1}'
    assert parsed["function"]["arguments"] == {"a": 1}
    assert (text["id"], text["type"]) == ("1", "function")


WHOLE = '{"city": "Bo\\n\\ud83d\\ude00", "n": [1, 2.5, {"a": null}], "b": true}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (WHOLE, {"city": "Bo\n\U0001f600", "n": [1, 2.5, {"a": None}], "b": True}),
        ("{", {}),
        ('{"ci', {}),
        ('{"city": "Bo', {"city": "Bo"}),
        ('{"city": "Bo\\', {"city": "Bo"}),
        ('{"city": "Bo", "n": [1, 2', {"city": "Bo", "n": [1, 2]}),
        ('{"city": "Bo", "b": tr', {"city": "Bo"}),
        ('{"a": {"b": "c', {"a": {"b": "c"}}),
        ('{"a": 1} and more', {"a": 1}),
        ('{"a": 1, b: 2}', {"a": 1}),
        ('{"a": "b", "c": "\\ud800"}', {"a": "b", "c": ""}),  # half a character
        ("", {}),
        (" \n", {}),
        ("null", {}),
    ],
)
def test_arguments_that_are_cut_are_those_of_their_longest_sound_beginning(
    text: str, expected: dict[str, Any]
) -> None:
    call = {"function": {"name": "f", "arguments": text}}
    [parsed] = template_calls([call], "calls", as_text=False)
    assert parsed["function"]["arguments"] == expected
    [kept] = template_calls([call], "calls", as_text=True)
    assert kept["function"]["arguments"] == (text if text.strip() else {})


def test_arguments_cut_anywhere_are_an_object() -> None:
    for end in range(1, len(WHOLE)):
        found = read_arguments(WHOLE[:end])
        assert found is not None
        assert found.keys() <= {"city", "n", "b"}
    for endless in ('{"a":' * 100_000, '{"a": ' + "9" * 5000 + "}"):
        assert list(read_arguments(endless) or ()) == ["a"]


def test_call_without_arguments_has_none() -> None:
    [call] = template_calls([{"id": None, "function": {"name": "f"}}], "calls", as_text=True)
    assert call == {"type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    "calls",
    [
        {},
        [5],
        [{"function": {"name": 5}}],
        [{"function": {"name": "f", "arguments": "[1]"}}],
        [{"function": {"name": "f", "arguments": "a"}}],
        [{"function": {"name": "f", "arguments": 5}}],
    ],
)
def test_bad_past_calls_are_refused(calls: Any) -> None:
    with pytest.raises(UserError, match="messages"):
        template_calls(calls, "messages[0].tool_calls", as_text=True)
