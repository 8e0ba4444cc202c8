"""Detect schemas that no finite JSON value satisfies: their answers would never end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from trt_eagle3.multimodal.tool_formats.schema import referenced

__all__ = ["never_ends"]


def never_ends(schema: Any) -> bool:
    """Return whether ``schema`` requires itself, so that every allowed value is infinite.

    Only keywords that require parts are read: required properties, items of lists that must not be
    empty, and references. The grammar compiler finds other contradictions. Each part and each
    demand is visited once, so time is linear in the size of the schema.
    """

    @cache
    def at(reference: str) -> Any:
        return referenced(schema, reference)

    unmet: dict[int, int] = {}  # by part: its demands without a known finite value
    demanders: dict[int, list[list[int]]] = defaultdict(list)  # by part: the demands it can meet
    ending: list[int] = []
    found = [schema]
    while found:
        part = found.pop()
        if id(part) in unmet:
            continue
        demands = list(_demands(part, at))
        unmet[id(part)] = len(demands)
        if not demands:
            ending.append(id(part))
        for alternatives in demands:
            demand = [id(part)]  # emptied when met
            for alternative in alternatives:
                demanders[id(alternative)].append(demand)
                found.append(alternative)
    while ending:
        for demand in demanders[ending.pop()]:
            if demand:
                part_id = demand.pop()
                unmet[part_id] -= 1
                if not unmet[part_id]:
                    ending.append(part_id)
    return unmet[id(schema)] > 0


def _demands(schema: Any, at: Callable[[str], Any]) -> Iterator[list[Any]]:
    """Yield lists of schemas: a value of ``schema`` contains a value of one schema of each list."""
    if not isinstance(schema, Mapping):
        return
    reference = schema.get("$ref")
    if isinstance(reference, str) and (target := at(reference)) is not None:
        yield [target]
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            yield schema[key]
    for part in _parts(schema):
        yield [part]


def _parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas of the parts that every value of ``schema`` contains."""
    every = schema.get("allOf")
    yield from every if isinstance(every, list) else ()
    if schema.get("type") in ("object", ["object"]):
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, Mapping) and isinstance(required, list):
            yield from (properties.get(str(name)) for name in required)
    if schema.get("type") in ("array", ["array"]) and schema.get("minItems"):
        yield schema.get("items")
