"""Write the page ``/docs``: an OpenAPI document as HTML, without scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from trt_eagle3.serving.chat_page import content_hashes

__all__ = ["docs_page"]

_STYLE = """
:root { color-scheme: light dark; --line: #8886; }
body { max-width: 60rem; margin: 0 auto; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; }
h2 { margin: 2rem 0 .3rem; border-top: 1px solid var(--line); padding-top: 1rem; }
h2, code { font-family: ui-monospace, monospace; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; }
summary { cursor: pointer; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .2rem .6rem .2rem 0; }
tr { border-bottom: 1px solid var(--line); }
"""


def docs_page(document: Mapping[str, Any]) -> tuple[str, str]:
    """Return a page with the routes of ``document`` and the fields of their bodies, and its
    ``Content-Security-Policy``: the page's own style and nothing else.
    """
    info, schemas = document["info"], document["components"]["schemas"]
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(info['title'])} API</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f"<p>{escape(info['description'])}</p>",
        '<p>As JSON: <a href="/openapi.json">/openapi.json</a></p>',
    ]
    for path, item in document["paths"].items():
        for method, operation in item.items():
            parts += _operation(method, path, operation, schemas)
    page = "\n".join([*parts, "</body>\n</html>\n"])
    style = content_hashes(page, "style")
    policy = f"default-src 'none'; style-src {style}; frame-ancestors 'none'; base-uri 'none'"
    return page, f"{policy}; form-action 'none'"


def _operation(
    method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]
) -> list[str]:
    parts = [f"<h2>{method.upper()} {escape(path)}</h2>", f"<p>{escape(operation['summary'])}</p>"]
    if "security" in operation:
        parts.append("<p>Needs the header <code>Authorization: Bearer KEY</code>.</p>")
    if "requestBody" in operation:
        [content] = operation["requestBody"]["content"].values()
        parts += _fields(schemas[_name(content["schema"])])
    return parts


def _fields(schema: Mapping[str, Any]) -> list[str]:
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_type(field))}</td>"
        f"<td>{'required' if name in required else _default(field)}</td></tr>"
        for name, field in sorted(
            schema["properties"].items(), key=lambda entry: entry[0] not in required
        )
    ]
    head = "<tr><th>field</th><th>type</th><th>default</th></tr>"
    opening = "<details><summary>Fields of the JSON body</summary>\n<table>"
    return [opening, head, *rows, "</table></details>"]


def _type(schema: Mapping[str, Any]) -> str:
    """Describe the type of a field in words: ``integer``, ``array of string``."""
    if "anyOf" in schema:
        names = [_type(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(names))
    if "$ref" in schema:
        return _name(schema)
    if schema.get("type") == "array":
        inner = _type(schema.get("items", {}))
        return "array" if inner == "any" else f"array of {inner}"
    return str(schema.get("type", "any"))


def _default(schema: Mapping[str, Any]) -> str:
    default = schema.get("default")
    if default is None or isinstance(default, dict):
        return ""
    return f"<code>{escape(json.dumps(default))}</code>"


def _name(schema: Mapping[str, Any]) -> str:
    return str(schema["$ref"]).rpartition("/")[2]
