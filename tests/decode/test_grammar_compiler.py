"""Grammars of every kind, and those of people who wish us ill."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.decode.structured import ENDS, VOCAB, compiler, ids_of, state_of, tokenizer
from tests.waiting import wait_for
from trt_eagle3.decode.sampling import grammar_worker
from trt_eagle3.decode.sampling.grammar import MAX_SOURCE_BYTES, Grammar, StructuralTag
from trt_eagle3.decode.sampling.grammar_compiler import GrammarCompiler
from trt_eagle3.decode.sampling.grammar_masks import fill_next
from trt_eagle3.decode.sampling.grammar_state import GrammarState
from trt_eagle3.errors import OverloadedError, RequestCancelledError, UserError
from trt_eagle3.multimodal.caller import Caller

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 3}}\n</tool_call>'
TAGS = [
    StructuralTag(
        f'<tool_call>\n{{"name": "{name}", "arguments": ', json.dumps(SCHEMA), "}\n</tool_call>"
    )
    for name in ("f", "g")
]


def calls(**options: bool) -> Grammar:
    return Grammar.structural_tags(TAGS, trigger="<tool_call>", **options)


def takes(state: GrammarState, text: str) -> tuple[bool, bool]:
    """Whether ``state`` allows ``text``, and may end then."""
    for token in ids_of(text):
        found = state.after(token)
        if found is None:
            return False, False
        state = found
    return True, ends_of(state)


def ends_of(state: GrammarState) -> bool:
    row = np.empty(VOCAB // 32, dtype=np.int32)
    fill_next(state, row)
    return bool(int(row[ENDS[0] >> 5]) >> (ENDS[0] & 31) & 1)


@pytest.mark.parametrize(
    ("grammar", "whole", "begun", "wrong"),
    [
        (Grammar.json_schema(SCHEMA), '{"a": 3}', '{"a', '{"b'),
        (Grammar.json_schema(json.dumps(SCHEMA)), '{ "a" : 12 }', '{"a": 12', '["a"]'),
        (Grammar.json_schema(True), "[1, null]", "[1", "one"),
        (Grammar.json_object(), '{"x": [1, {}]}', '{"x": [1', "[1]"),
        (Grammar.regex("[a-z]+/[0-9]{2}"), "ab/12", "ab/1", "ab-1"),
        (Grammar.choice(["yes", "no way!", 'a"b\\c/\n']), 'a"b\\c/\n', "no", "maybe"),
        (Grammar.ebnf('root ::= "a" root | "b"\n'), "aab", "aa", "ba"),
        (Grammar.ebnf('start: "x" /[0-9]+/'), "x12", "x", "12"),
        (Grammar.json_object().preceded_by("</think>"), 'so</think>{"a": 1}', "so", "</think>[1]"),
        (calls(), f"Well. {CALL} Done {{.", CALL[:20], "<tool_call>x"),
        (calls(), "plain text", "a <tool_call>", CALL.replace("3", "x")),
        (calls(parallel=False), f"Well. {CALL}", CALL[:-3], f"{CALL} more"),
        (calls(required=True), f"{CALL}\n{CALL}", CALL[:9], "plain"),
        (calls(required=True, parallel=False), CALL, CALL[:9], f"{CALL}\n{CALL}"),
    ],
)
def test_grammar_allows_what_it_says(grammar: Grammar, whole: str, begun: str, wrong: str) -> None:
    state = state_of(grammar)
    assert takes(state, whole) == (True, True)
    assert takes(state, begun) == (True, False)
    assert not takes(state, wrong)[0]


def test_white_space_between_json_tokens_comes_to_an_end() -> None:
    state = state_of(Grammar.json_schema(SCHEMA))
    assert takes(state, "{" + " " * 40 + '"a": 1}') == (True, True)
    assert not takes(state, "{" + " " * 41)[0]


def deep(levels: int) -> str:
    return '{"properties": {"a": ' * levels + "{}" + "}}" * levels


HOSTILE = {
    "no JSON": (Grammar.json_schema('{"a'), "not JSON"),
    "a list": (Grammar.json_schema("[1]"), "expected a JSON Schema"),
    "contradiction": (
        Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}),
        "minimum",
    ),
    "false": (Grammar.json_schema(False), "allows nothing"),
    "unknown type": (
        Grammar.json_schema({"type": "strin"}),
        "expected one of object, array, .*, got strin$",
    ),
    "endless": (Grammar.json_schema({"$ref": "#"}), "would ever end"),
    "references times parts": (
        Grammar.json_schema(
            {"allOf": [*({} for _ in range(36_000)), *({"$ref": f"#{i}"} for i in range(6_000))]}
        ),
        "would ever end",
    ),
    "remote": (Grammar.json_schema({"$ref": "http://169.254.169.254/x"}), "169.254"),
    "deep": (Grammar.json_schema(deep(5000)), "recursion"),
    "lenient": (
        Grammar.json_schema({"not": {}, "x-guidance": {"lenient": True}}),
        "Unimplemented keys",
    ),
    "a hundred million states": (
        Grammar.json_schema({"type": "integer", "multipleOf": 99_999_989}),
        "to compile. Simplify it",
    ),
    "wide": (
        Grammar.json_schema({"properties": {f"property{i}": {} for i in range(5000)}}),
        "Simplify it|items|fuel|large",
    ),
    "broken regex": (Grammar.regex("((("), "unclosed"),
    "look-ahead": (Grammar.regex("(?=a)b"), "look"),
    "empty regex": (Grammar.regex(r"[^\x{0}-\x{10ffff}]"), "no token can satisfy"),
    "left recursion": (Grammar.ebnf("start: start\n"), "no token can satisfy"),
    "garbage": (Grammar.ebnf("\x00 ::: {{{"), "neither Lark nor GBNF"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammar_is_refused_by_its_field(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar, reason = HOSTILE[name]
    with pytest.raises(UserError, match=reason) as caught:
        compiler().state(grammar)
    assert str(caught.value).startswith(f"{grammar.field}: ")
    asked: list[object] = []
    monkeypatch.setattr(compiler()._worker, "ask", lambda *request: asked.append(request))
    with pytest.raises(UserError, match=reason):
        compiler().state(grammar)
    assert not asked, "it is known by now"


@pytest.mark.parametrize("answer", [None, {"ended": signal.SIGALRM}])
def test_grammar_that_could_not_be_tried_is_tried_again(
    answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = GrammarCompiler(tokenizer(), VOCAB, ENDS)
    with monkeypatch.context() as patch:
        patch.setattr(made._worker, "ask", lambda *_: answer)
        with pytest.raises(OverloadedError, match=r"Try again\."):
            made.state(Grammar.json_schema(SCHEMA))
    assert takes(made.state(Grammar.json_schema(SCHEMA)), '{"a": 3}') == (True, True)
    made.close()


def test_worker_that_had_no_time_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_worker, "_try", lambda *_: signal.pause())
    monkeypatch.setattr(grammar_worker, "WALL_S", 0.01)
    silent, _writer = os.pipe()
    assert json.loads(grammar_worker._bounded(None, "", silent)) == {"ended": signal.SIGALRM}


def test_a_good_grammar_follows_a_hostile_one_and_is_compiled_once() -> None:
    made = GrammarCompiler(tokenizer(), VOCAB, ENDS)
    with pytest.raises(UserError):
        made.state(HOSTILE["a hundred million states"][0])
    first, again = (made.state(Grammar.json_schema(SCHEMA)) for _ in range(2))
    first.advance(ids_of('{"a'))
    assert takes(again, '{"a": 3}') == (True, True)
    asked: list[object] = []
    made._worker.ask = lambda *request: asked.append(request) or {}  # type: ignore[assignment,func-returns-value,method-assign]
    made.state(Grammar.json_schema(SCHEMA, field="another name"))
    assert not asked
    made.close()


def test_grammars_are_read_and_compiled_in_a_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reading a schema costs, it costs a process that is bounded."""
    monkeypatch.setattr(
        "trt_eagle3.decode.sampling.schema_end.never_ends", lambda _: time.sleep(60)
    )
    monkeypatch.setattr(
        "trt_eagle3.decode.sampling.grammar_text.never_ends", lambda _: time.sleep(60)
    )
    state = compiler().state(Grammar.json_schema({**SCHEMA, "title": "not known"}))
    assert takes(state, '{"a": 3}') == (True, True)


def test_cancelled_grammar_frees_its_worker() -> None:
    made = GrammarCompiler(tokenizer(), VOCAB, ENDS)
    made.warm_up()
    [process] = made._worker._all
    left = threading.Event()
    threading.Timer(0.05, left.set).start()
    with pytest.raises(RequestCancelledError):
        made.state(HOSTILE["a hundred million states"][0], Caller(cancelled=left.is_set))
    assert takes(made.state(Grammar.json_schema(SCHEMA)), '{"a": 3}') == (True, True)
    assert made._worker._all == {process}, "only its fork was ended"
    assert not made.knows(HOSTILE["a hundred million states"][0]), "it was not tried"
    made.close()


def test_new_grammars_of_clients_are_tried_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    made = GrammarCompiler(tokenizer(), VOCAB, ENDS)
    tried: list[str] = []
    goes_on = threading.Semaphore(0)

    def slow(request: bytes, _: object) -> dict[str, object]:
        tried.append(json.loads(request)["source"])
        assert goes_on.acquire(timeout=60)
        return {"slow": 1.0}

    monkeypatch.setattr(made._worker, "ask", slow)

    def ask(source: str) -> None:
        with pytest.raises(UserError, match="takes 1"):
            made.state(Grammar.regex(source), Caller(client=source[0]))

    with ThreadPoolExecutor(8) as threads:
        for i, source in enumerate(["a1", "a2", "a3", "b1", "b2", "c1"]):
            threads.submit(ask, source)
            wait_for(lambda i=i: len(tried) + len(made._turns._waiting) == i + 1)  # type: ignore[misc]
        goes_on.release(6)
    assert tried == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_same_grammar_asked_at_once_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = GrammarCompiler(tokenizer(), VOCAB, ENDS)
    tried: list[bytes] = []
    waiting = threading.Event()

    def slow(request: bytes, _: object) -> dict[str, object]:
        tried.append(request)
        assert waiting.wait(60)
        return {"error": "bad"}

    monkeypatch.setattr(made._worker, "ask", slow)
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(made.state, Grammar.regex("x")) for _ in range(8)]
        wait_for(lambda: len(made._turns._waiting) == 7)
        waiting.set()
        for one in asked:
            assert str(one.exception()) == "regex: bad"
    assert len(tried) == 1


def test_bad_grammars_make_no_good_one_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    made = GrammarCompiler(tokenizer(), VOCAB, ENDS)
    made.warm_up()
    made.close()
    monkeypatch.setattr(made._worker, "ask", lambda *_: {"error": "bad"})
    for i in range(200):
        with pytest.raises(UserError, match="bad"):
            made.state(Grammar.regex(f"a{i}"))
    assert made.knows(Grammar.json_object())
    assert made.knows(Grammar.regex("a199"))
    assert not made.knows(Grammar.regex("a0"))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Grammar.regex(""), "regex: expected a text"),
        (lambda: Grammar.regex("a" * (MAX_SOURCE_BYTES + 1)), "regex: 262145 bytes"),
        (lambda: Grammar.choice([]), "choice: expected a list"),
        (lambda: Grammar.choice("abc"), "choice: expected a list"),
        (lambda: Grammar.json_schema(3), "json_schema: expected a JSON Schema, got int"),  # type: ignore[arg-type]
        (lambda: Grammar.json_schema({"a": float("nan")}), "json_schema: not a JSON value"),
        (lambda: Grammar.structural_tags([], trigger="x"), "tools: expected tags"),
    ],
)
def test_grammar_refuses_what_is_none(make: object, reason: str) -> None:
    assert callable(make)
    with pytest.raises(UserError, match=reason):
        make()


@pytest.fixture(autouse=True, scope="module")
def end() -> Iterator[None]:
    yield
    compiler().close()
