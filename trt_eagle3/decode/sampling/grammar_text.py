"""Convert a ``Grammar`` to llguidance's form: JSON Schema with our options, or Lark.

Only the sandbox process (``grammar_worker``) converts grammars of requests, so its limits apply.

Syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from typing import Any

from trt_eagle3.decode.sampling.grammar import Grammar
from trt_eagle3.decode.sampling.schema_end import never_ends
from trt_eagle3.errors import clip
from trt_eagle3.multimodal.tool_formats.parts import part_form
from trt_eagle3.multimodal.tool_formats.qwen3_xml_grammar import call_parameters

__all__ = ["grammar_text"]

# between two JSON tokens; bounded, because a model might emit white space without end
_WHITE_SPACE = r"[ \t\n\r]{1,40}"
_JSON_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": _WHITE_SPACE,
    "coerce_one_of": False,
    "lenient": False,
}


def grammar_text(grammar: Grammar) -> str:
    """Convert ``grammar`` to the text that ``llguidance.LLMatcher`` takes.

    Raises:
        ValueError, TypeError: the source is not JSON, not a schema, or not a grammar.
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
            return {"lark_grammar": f"start: {_regex(source)}"}
        case "choice":
            return {"lark_grammar": f"start: /{'|'.join(map(_escaped, json.loads(source)))}/"}
        case "ebnf":
            return {"lark_grammar": _lark(source)}
        case "tags":
            return {"lark_grammar": _tags(json.loads(source))}


def _schema(source: str) -> Any:
    """Parse a schema and set our options; they override the schema's own."""
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
            "the schema requires itself inside itself, so no answer would ever end. Make that part "
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
    """Write free text in which the trigger starts a tag; if tags are required, only tags."""
    trigger = form["trigger"]
    writer = _PartWriter()
    rules = []
    for i, (begin, content, end) in enumerate(form["tags"]):
        parts = [{"json": content}] if isinstance(content, str) else content
        rules.append(f"tag_{i}: {writer.written([begin[len(trigger) :], *parts, end])}")
    body = "body: " + " | ".join(f"tag_{i}" for i in range(len(rules)))
    white = rf"WHITE: /{_WHITE_SPACE}/"
    quoted = json.dumps(trigger, ensure_ascii=False)
    rules += writer.terminals
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
    text = f"TEXT: {_ANYTHING}" + "".join(map(_without, [trigger, *form["never"]]))
    return "\n".join([start, call, lazy, body, text, white, *rules])


class _PartWriter:
    """Writes parts (``multimodal.tool_formats.parts``, in their JSON form) in Lark's syntax.

    Attributes:
        terminals: rules that the written parts refer to.
    """

    def __init__(self) -> None:
        self.terminals: list[str] = []

    def written(self, parts: list[Any]) -> str:
        """Return the right side of a rule."""
        return " ".join(self._part(part) for part in parts if part)

    def _part(self, part: Any) -> str:
        match part:
            case str():
                return json.dumps(part, ensure_ascii=False)
            case {"tool": tool, "parameters": schema}:
                return self.written(part_form(call_parameters(tool, json.loads(schema))))
            case {"json": schema}:
                return f"%json {json.dumps(_schema(schema))}"
            case {"any": options}:
                return f"({' | '.join(self.written(option) for option in options)})"
            case {"repeated": parts, "once": once}:
                return f"({self.written(parts)}){'?' if once else '*'}"
            case {"text": matching, "excluding": excluding, "end": end}:
                name = f"PART_{len(self.terminals)}"
                all_of = [*map(_regex, matching), *(f"~{_regex(one)}" for one in excluding)]
                ending = json.dumps(end, ensure_ascii=False) if end else ""
                self.terminals.append(f"{name}: ({' & '.join(all_of)}) {ending}")
                return name
        raise AssertionError(f"not a part of a grammar: {part!r:.80}")


_ANYTHING = r"/(.|\n)*/"


def _without(text: str) -> str:
    """Return the suffix that excludes ``text`` from a terminal."""
    return rf" & ~/(.|\n)*{_escaped(text)}(.|\n)*/"


def _regex(pattern: str) -> str:
    """Put a pattern between slashes, and escape its unescaped slashes."""
    inner = re.sub(r"\\.|/", lambda found: found[0].rjust(2, "\\"), pattern, flags=re.DOTALL)
    return f"/{inner}/"


def _escaped(text: str) -> str:
    """Return a regular expression that matches only ``text``."""
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{{{ord(c):x}}}" for c in text)
