"""A ``Grammar`` in the words of llguidance: JSON Schema with our options, regular expression, Lark.

Grammars of requests are written so in the bounded process (``grammar_worker``) only: its limits
hold for this too.

Syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
from typing import Any

from trt_eagle3.decode.grammar import Grammar
from trt_eagle3.decode.schema_end import never_ends
from trt_eagle3.errors import clip

__all__ = ["grammar_text"]

# between two JSON tokens: a model that goes on with white space for ever must come to an end
_WHITE_SPACE = r"[ \t\n\r]{1,40}"
_JSON_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": _WHITE_SPACE,
    "coerce_one_of": False,
    "lenient": False,
}


def grammar_text(grammar: Grammar) -> str:
    """What ``llguidance.LLMatcher`` takes.

    Raises:
        ValueError, TypeError: the source is no JSON, no schema, or no grammar.
    """
    inner = _inner(grammar)
    if not grammar.after:
        return json.dumps({"grammars": [inner]})
    before = _escaped(grammar.after)
    whole = "start: before @inner" + "\n" + rf"before[lazy]: /(.|\n)*{before}/"
    parts = [{"name": "outer", "lark_grammar": whole}, {"name": "inner", **inner}]
    return json.dumps({"grammars": parts})


def _inner(grammar: Grammar) -> dict[str, Any]:
    source = grammar.source
    match grammar.kind:
        case "json_schema":
            return {"json_schema": _schema(source)}
        case "regex":
            return {"lark_grammar": f"start: /{source.replace('/', chr(92) + '/')}/"}
        case "choice":
            return {"lark_grammar": f"start: /{'|'.join(map(_escaped, json.loads(source)))}/"}
        case "ebnf":
            return {"lark_grammar": _lark(source)}
        case "tags":
            return {"lark_grammar": _tags(json.loads(source))}


def _schema(source: str) -> Any:
    """A schema with our options, whatever it says of its own."""
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({clip(error)})") from error
    if schema is False:
        raise ValueError("the schema allows nothing")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise TypeError(f"expected a JSON Schema, got {type(schema).__name__}")
    if never_ends(schema):
        raise ValueError(
            "the schema demands itself inside itself, so no answer would ever end. Make that part "
            "optional."
        )
    return {**schema, "x-guidance": _JSON_OPTIONS}


def _lark(source: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(source))
    except Exception as error:  # the converter raises bare Exception
        raise ValueError(f"neither Lark nor GBNF ({clip(error)})") from error


def _tags(form: dict[str, Any]) -> str:
    """Free text in which the trigger begins a tag, or nothing but tags."""
    trigger, tags = form["trigger"], form["tags"]
    rules = []
    for i, (begin, schema, end) in enumerate(tags):
        read = json.dumps(_schema(schema))
        rest = begin[len(trigger) :]
        around = [json.dumps(text, ensure_ascii=False) if text else "" for text in (rest, end)]
        rules.append(f"tag_{i}: {around[0]} %json {read} {around[1]}")
    body = "body: " + " | ".join(f"tag_{i}" for i in range(len(tags)))
    white = rf"WHITE: /{_WHITE_SPACE}/"
    quoted = json.dumps(trigger, ensure_ascii=False)
    if form["required"]:
        more = f"(WHITE? {quoted} body)*" if form["parallel"] else ""
        start = f"start: {quoted} body {more}"
        if form["answer"] is not None:
            start += " | answer"
            rules.append(f"answer: %json {json.dumps(_schema(form['answer']))}")
        return "\n".join([start, body, white, *rules])
    lazy = rf"call_begin[lazy]: TEXT {quoted}"
    call = "call: call_begin body"
    start = "start: call* TEXT" if form["parallel"] else "start: call WHITE? | TEXT"
    text = rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{_escaped(trigger)}(.|\n)*/"
    return "\n".join([start, call, lazy, body, text, white, *rules])


def _escaped(text: str) -> str:
    """A regular expression of ``text`` alone."""
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{{{ord(c):x}}}" for c in text)
