"""Schemas that demand themselves without end, and those that only may go on."""

from __future__ import annotations

import time
from typing import Any

import pytest

from trt_eagle3.decode.sampling.schema_end import never_ends


def node(**changes: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
        "required": ["v", "next"],
        **changes,
    }


ENDLESS: dict[str, Any] = {
    "itself": {"$ref": "#"},
    "each other": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    },
    "list that never ends": {"$ref": "#/$defs/node", "$defs": {"node": node()}},
    "in a required property": {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/node"}},
        "required": ["x"],
        "$defs": {"node": node()},
    },
    "in every alternative": {"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]},
    "in items": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "alternative that demands itself": {"anyOf": [{"$ref": "#/anyOf/0"}]},
    "name with a slash": {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"$ref": "#/$defs/a~1b"}}},
}
ENDS: dict[str, Any] = {
    "list that may end": {"$ref": "#/$defs/node", "$defs": {"node": node(required=["v"])}},
    "list that ends with null": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": node(
                properties={
                    "v": {"type": "integer"},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                }
            )
        },
    },
    "tree": {
        "type": "object",
        "properties": {"children": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["children"],
    },
    "unused definition": {"type": "integer", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "object or null": {
        "type": ["object", "null"],
        "properties": {"a": {"$ref": "#"}},
        "required": ["a"],
    },
    "true": True,
    "unknown reference": {"$ref": "http://example.org/x"},
    "dangling reference": {"$ref": "#/$defs/none"},
}


@pytest.mark.parametrize("name", ENDLESS)
def test_schema_that_demands_itself_never_ends(name: str) -> None:
    assert never_ends(ENDLESS[name])


@pytest.mark.parametrize("name", ENDS)
def test_schema_that_only_may_go_on_ends(name: str) -> None:
    assert not never_ends(ENDS[name])


def test_long_chains_of_references_are_judged_in_a_moment() -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(4000)}
    for last, endless in (({"type": "integer"}, False), ({"$ref": "#/$defs/d0"}, True)):
        chain["d4000"] = last
        assert never_ends({"$ref": "#/$defs/d0", "$defs": chain}) == endless


def test_references_times_parts_are_judged_in_a_moment() -> None:
    start = time.process_time()
    parts = [*({} for _ in range(10_000)), *({"$ref": f"#{i}"} for i in range(2_000))]
    assert never_ends({"allOf": parts})
    assert not never_ends({"anyOf": [{}, {"allOf": [*parts[:10_000], {"$ref": "#"}]}]})
    assert time.process_time() - start < 5
