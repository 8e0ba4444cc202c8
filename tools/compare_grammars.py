"""Compare llguidance, which serves here, with xgrammar: ``python tools/compare_grammars.py FILE``.

FILE: a vocabulary in tiktoken's format. xgrammar is measured where it is installed (nothing else
needs it). Compile times and masks in processor time; which schemas are refused; and for
which an answer is possible that the schema forbids: an instance below, or one drawn from the masks.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import jsonschema
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.grammar import Vocabulary
from benchmarks.grammar_host import allowed_tokens
from trt_eagle3.decode.sampling.grammar import Grammar
from trt_eagle3.decode.sampling.grammar_text import grammar_text

SIZE, WORDS = 151_936, 4748
END = SIZE - 1
WALKS, MOST_TOKENS, ENOUGH = 6, 120, 0.5
TEXT, INTEGER = {"type": "string"}, {"type": "integer"}
Row = np.ndarray[Any, np.dtype[np.int32]]


def record(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> Any:
    """A schema of an object with these properties and no others."""
    needed = list(properties) if required is None else required
    shape = {"type": "object", "properties": properties, "required": needed}
    return {**shape, "additionalProperties": False, **more}


def one(schema: Any) -> Any:
    """A schema of an object with one property, ``x``."""
    return record({"x": schema})


def nested(levels: int) -> Any:
    """Objects in objects."""
    return record({"v": INTEGER} if not levels else {"a": INTEGER, "n": nested(levels - 1)})


ITEM = record(
    {
        "name": TEXT,
        "size": INTEGER,
        "colour": {"enum": ["red", "green", "blue"]},
        "parts": {"type": "array", "items": TEXT},
    }
)
ONE_ITEM = {"name": "a", "size": 1, "colour": "red", "parts": ["x"]}
TREE = record({"v": INTEGER, "c": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2}})
CHAIN = {"anyOf": [{"type": "null"}, record({"h": INTEGER, "t": {"$ref": "#/$defs/l"}})]}
IF = {
    "if": {"properties": {"a": {"const": "i"}}},
    "then": {"properties": {"b": INTEGER}},
    "else": {"properties": {"b": TEXT}},
}
ARRAY = {"type": "array", "items": INTEGER}
# schema, instances that it allows, and that it forbids
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "array of objects": (
        {"type": "array", "items": ITEM, "minItems": 2},
        [[ONE_ITEM] * 2],
        [[{**ONE_ITEM, "colour": "pink"}] * 2, []],
    ),
    "integer range": (one({**INTEGER, "minimum": 0, "maximum": 150}), [{"x": 150}],
                      [{"x": 151}, {"x": -1}]),
    "number range": (one({"type": "number", "minimum": -1.5, "exclusiveMaximum": 2}),
                     [{"x": 1.99}, {"x": -1.5}], [{"x": 2}, {"x": -1.51}]),
    "multipleOf": (one({**INTEGER, "multipleOf": 5}), [{"x": 35}], [{"x": 36}]),
    "pattern": (one({**TEXT, "pattern": "^[A-Z]{3}-[0-9]{4}$"}), [{"x": "ABC-1234"}],
                [{"x": "abc-1234"}, {"x": "ABC-12345"}]),
    "length": (one({**TEXT, "minLength": 2, "maxLength": 4}), [{"x": "abcd"}, {"x": "äöüß"}],
               [{"x": "a"}, {"x": "abcde"}]),
    "date-time": (one({**TEXT, "format": "date-time"}), [{"x": "2026-11-23T06:00:00Z"}],
                  [{"x": "yesterday"}]),
    "uuid": (one({**TEXT, "format": "uuid"}), [{"x": "12345678-1234-1234-1234-123456789abc"}],
             [{"x": "1234"}]),
    "enum of types": ({"enum": ["a", 1, None]}, ["a", 1, None], ["b", 2]),
    "const": (one({"const": "y"}), [{"x": "y"}], [{"x": "z"}]),
    "anyOf": ({"anyOf": [record({"a": INTEGER}), record({"b": TEXT})]}, [{"a": 1}, {"b": "x"}],
              [{"a": "x"}, {"a": 1, "b": "x"}]),
    "oneOf apart": ({"oneOf": [INTEGER, TEXT]}, [1, "x"], [True, None]),
    "allOf": (one({"allOf": [INTEGER, {"minimum": 3}, {"maximum": 5}]}), [{"x": 4}],
              [{"x": 2}, {"x": 6}]),
    "types": (one({"type": ["integer", "null"]}), [{"x": None}, {"x": 3}], [{"x": "3"}]),
    "tree by $ref": ({"$defs": {"n": TREE}, "$ref": "#/$defs/n"},
                     [{"v": 1, "c": [{"v": 2, "c": []}]}], [{"v": 1, "c": [{"v": 2}]}]),
    "list by $ref": ({"$defs": {"l": CHAIN}, "$ref": "#/$defs/l"},
                     [{"h": 1, "t": {"h": 2, "t": None}}], [{"h": 1, "t": 3}]),
    "tuple": ({"type": "array", "prefixItems": [INTEGER, TEXT], "items": False, "minItems": 2},
              [[1, "x"]], [["x", 1], [1, "x", 2], [1]]),
    "3 to 5 items": ({**ARRAY, "minItems": 3, "maxItems": 5}, [[1, 2, 3]], [[1, 2], [1] * 6]),
    "100 to 200 items": ({**ARRAY, "minItems": 100, "maxItems": 200}, [[7] * 150],
                         [[7] * 99, [7] * 201]),
    "uniqueItems": ({**ARRAY, "uniqueItems": True, "maxItems": 3}, [[1, 2]], [[1, 1]]),
    "map": ({"type": "object", "additionalProperties": INTEGER}, [{"a": 1, "b": 2}], [{"a": "x"}]),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^n_": INTEGER}, "additionalProperties": False},
        [{"n_a": 1}], [{"m": 1}, {"n_a": "x"}]),
    "propertyNames": (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"},
         "additionalProperties": INTEGER},
        [{"ab": 1}], [{"A1": 1}]),
    "2 to 3 properties": (
        {"type": "object", "additionalProperties": INTEGER, "minProperties": 2, "maxProperties": 3},
        [{"a": 1, "b": 2}], [{"a": 1}, {"a": 1, "b": 2, "c": 3, "d": 4}]),
    "8 optional fields": (record({f"f{i}": INTEGER for i in range(8)}, ["f3"]),
                          [{"f3": 1}, {"f0": 1, "f3": 1, "f7": 2}], [{"f0": 1}]),
    "40 optional fields": (record({f"f{i}": TEXT for i in range(40)}, []),
                           [{}, {"f0": "", "f39": "x"}], [{"f1": 1}, {"g": ""}]),
    "not": (one({"not": TEXT}), [{"x": 1}], [{"x": "s"}]),
    "if": ({**record({"a": {"enum": ["i", "s"]}, "b": {}}), **IF}, [{"a": "i", "b": 1}],
           [{"a": "i", "b": "x"}]),
    "dependentRequired": (
        record({"a": INTEGER, "b": INTEGER}, [], dependentRequired={"a": ["b"]}),
        [{"a": 1, "b": 2}, {"b": 1}], [{"a": 1}]),
    "oneOf that overlaps": ({"oneOf": [{**INTEGER, "minimum": 0}, {**INTEGER, "maximum": 10}]},
                            [20, -5], [5]),
    "1,000 values": (one({"enum": [f"value-{i:04d}" for i in range(1000)]}), [{"x": "value-0999"}],
                     [{"x": "value-1000"}]),
    "12 levels": (nested(12), [], []),
    "200 fields": (record({f"field_{i}": {"type": ["string", "integer"]} for i in range(200)}),
                   [], []),
    "any object": ({"type": "object"}, [{"a": [1, {"b": None}]}], [[1]]),
}  # fmt: skip


class Backend(Protocol):
    """A library of grammars."""

    def compile(self, schema: Any) -> Any:
        """A grammar, or an error."""

    def start(self, grammar: Any) -> Any:
        """A state at its beginning."""

    def mask(self, state: Any, row: Row) -> None:
        """Write the allowed tokens into ``row``."""

    def take(self, state: Any, token: int) -> bool:
        """Go on by ``token``; False where it is forbidden."""

    def undo(self, state: Any, count: int) -> None:
        """Take back tokens."""

    def copy(self, state: Any) -> Any:
        """The same state again."""


class LLGuidance:
    """As ``decode/sampling/grammar_compiler.py`` uses it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary))

    def compile(self, schema: Any) -> Any:
        from llguidance import LLMatcher

        text = grammar_text(Grammar.json_schema(schema))
        matcher = LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def start(self, grammar: Any) -> Any:
        return grammar.deep_copy()

    def mask(self, state: Any, row: Row) -> None:
        state.unsafe_compute_mask_ptr(row.ctypes.data, 4 * WORDS)

    def take(self, state: Any, token: int) -> bool:
        return bool(state.try_consume_tokens([token]) == 1)

    def undo(self, state: Any, count: int) -> None:
        state.rollback(count)

    def copy(self, state: Any) -> Any:
        return state.deep_copy()


class XGrammar:
    """One thread, no cache of grammars."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self._module = xgrammar
        self._info = xgrammar.TokenizerInfo(
            vocabulary.tokens, xgrammar.VocabType.RAW, vocab_size=SIZE, stop_token_ids=[END]
        )

    def compile(self, schema: Any) -> Any:
        compiler = self._module.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        return compiler.compile_json_schema(json.dumps(schema), strict_mode=True)

    def start(self, grammar: Any) -> Any:
        return self._module.GrammarMatcher(grammar)

    def mask(self, state: Any, row: Row) -> None:
        state.fill_next_token_bitmask(torch.from_numpy(row[None]))

    def take(self, state: Any, token: int) -> bool:
        return bool(state.accept_token(token))

    def undo(self, state: Any, count: int) -> None:
        state.rollback(count)

    def copy(self, state: Any) -> Any:
        return state.fork()


@dataclass
class Found:
    """What was seen of one backend; times in seconds."""

    compiled: dict[str, float] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)
    too_strict: set[str] = field(default_factory=set)
    masks: list[float] = field(default_factory=list)
    four: list[float] = field(default_factory=list)
    undone: list[float] = field(default_factory=list)
    copied: list[float] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        compiled, masks = [1e3 * s for s in self.compiled.values()], 1e6 * np.array(self.masks)
        yield f"compiled {len(compiled)}, refused {len(self.refused)}: {', '.join(self.refused)}"
        yield f"allow a wrong answer: {len(self.wrong)}: {', '.join(sorted(self.wrong))}"
        yield f"refuse a right one: {len(self.too_strict)}: {', '.join(sorted(self.too_strict))}"
        yield f"compile, ms: median {median(compiled):.2f}, largest {max(compiled):.0f}"
        quantiles = ", ".join(f"{np.quantile(masks, q):.0f}" for q in (0.5, 0.99, 1.0))
        yield f"{len(masks)} masks, us: median, p99, largest: {quantiles}"
        times = (f"{1e6 * median(x):.1f}" for x in (self.four, self.undone, self.copied))
        yield f"4 tokens taken, rolled back, a state copied, us: {', '.join(times)}"


@contextlib.contextmanager
def timed(into: list[float]) -> Iterator[None]:
    start = time.process_time()
    yield
    into.append(time.process_time() - start)


def compare(backend: Backend, vocabulary: Vocabulary) -> Found:
    """Every schema."""
    found = Found()
    for name, (schema, right, wrong) in CASES.items():
        times: list[float] = []
        try:
            for _ in range(3):
                with timed(times):
                    grammar = backend.compile(schema)
        except Exception:  # of any kind: it is refused
            found.refused.append(name)
            continue
        found.compiled[name] = min(times)
        if not all(matches(backend, grammar, vocabulary, value) for value in right):
            found.too_strict.add(name)
        if any(matches(backend, grammar, vocabulary, value) for value in wrong):
            found.wrong.add(name)
        chance, validator = random.Random(7), jsonschema.Draft202012Validator(schema)
        for _ in range(WALKS):
            text = drawn(backend, grammar, vocabulary, chance, found)
            if text is not None and not sound(text, validator):
                found.wrong.add(name)
    move(backend, vocabulary, found)
    return found


def matches(backend: Backend, grammar: Any, vocabulary: Vocabulary, value: Any) -> bool:
    """Whether ``value`` is an answer."""
    state, row = backend.start(grammar), np.full(WORDS, -1, dtype=np.int32)
    text = json.dumps(value, ensure_ascii=False)
    if not all(backend.take(state, token) for token in vocabulary(text)):
        return False
    backend.mask(state, row)
    return allows(row, END)


def drawn(
    backend: Backend, grammar: Any, vocabulary: Vocabulary, chance: random.Random, found: Found
) -> bytes | None:
    """An answer of allowed tokens, of which half close something; None where it has no end."""
    state, text, row = backend.start(grammar), b"", np.zeros(WORDS, dtype=np.int32)
    closing = [i for i, t in enumerate(vocabulary.tokens) if t and set(t) <= set(b'"}],:')]
    for _ in range(MOST_TOKENS):
        row.fill(-1)
        with timed(found.masks):
            backend.mask(state, row)
        allowed = allowed_tokens(row)
        others = allowed[allowed != END]
        if not len(others) or (allows(row, END) and chance.random() < ENOUGH):
            return text
        ends = [token for token in closing if allows(row, token)]
        token = int(chance.choice(ends if ends and chance.random() < ENOUGH else others))
        if not backend.take(state, token):
            return b"not what the mask allowed"
        text += vocabulary.tokens[token]
    return None


def move(backend: Backend, vocabulary: Vocabulary, found: Found) -> None:
    """Take four tokens in the middle of an answer, take them back, and copy the state."""
    state = backend.start(backend.compile(CASES["array of objects"][0]))
    for token in vocabulary('[{"name": "some words", '):
        backend.take(state, token)
    tokens = vocabulary('"size": 12, "')[:4]
    for _ in range(200):
        with timed(found.four):
            taken = sum(backend.take(state, token) for token in tokens)
        with timed(found.undone):
            backend.undo(state, taken)
        with timed(found.copied):
            backend.copy(state)


def sound(text: bytes, validator: Any) -> bool:
    """Whether ``text`` is JSON that the schema allows."""
    try:
        return bool(validator.is_valid(json.loads(text)))
    except ValueError:
        return False


def allows(row: Row, token: int) -> bool:
    return bool(int(row[token >> 5]) >> (token & 31) & 1)


def main() -> None:
    vocabulary = Vocabulary(SIZE, Path(sys.argv[1]))
    for kind in (LLGuidance, XGrammar):
        try:
            backend = kind(vocabulary)
        except ImportError as error:
            print(f"== {kind.__name__}: {error}")
            continue
        print(f"== {kind.__name__}, {len(CASES)} schemas")
        print(*compare(backend, vocabulary).lines(), sep="\n")


if __name__ == "__main__":
    main()
