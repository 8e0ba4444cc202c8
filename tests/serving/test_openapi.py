"""``/openapi.json`` describes every route with valid schemas, and ``/docs`` shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from starlette.applications import Starlette
from starlette.routing import Route

from tests.serving.site import SERVING, Site, serving
from tests.tiny import build_tiny
from trt_eagle3.decode.llm import LLM, load
from trt_eagle3.serving.app import Front, make_app
from trt_eagle3.serving.http_options import HttpOptions

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "stop": "x"}),
    ("/v1/completions", {"prompt": [1, 2], "stop": ["x", "y"], "max_tokens": 2}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
    ("/tokenize", {"prompt": "Hi"}),
    ("/detokenize", {"tokens": [1, 2]}),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with load(build_tiny(tmp_path_factory.mktemp("engines")), media=SERVING.media()) as engine:
        yield engine


@pytest.fixture(scope="module")
def site(engine: LLM) -> Iterator[Site]:
    with serving(engine) as site:
        yield site


@pytest.fixture(scope="module")
def document(site: Site) -> dict[str, Any]:
    status, text, headers = site.request("GET", "/openapi.json")
    assert (status, headers["content-type"]) == (200, "application/json")
    found: dict[str, Any] = json.loads(text)
    return found


def routes_of(engine: LLM, http: HttpOptions) -> set[tuple[str, str]]:
    app: Any = make_app(Front(engine, SERVING, http))
    while not isinstance(app, Starlette):  # inside its middleware
        app = app._app
    routes = [route for route in app.routes if isinstance(route, Route)]
    methods = [(route.path_format, (route.methods or set()) - {"HEAD"}) for route in routes]
    return {(path, method) for path, [method] in methods}


def operations_of(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {(path, m.upper()) for path, item in document["paths"].items() for m in item}


def test_every_route_is_described(engine: LLM, document: dict[str, Any]) -> None:
    assert operations_of(document) == routes_of(engine, HttpOptions())
    with serving(engine, http=HttpOptions(chat_page=False)) as plain:
        found = json.loads(plain.request("GET", "/openapi.json")[1])
    assert operations_of(document) - operations_of(found) == {("/", "GET")}


def test_document_has_valid_schemas_and_references(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1.")
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    names = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document))
    assert set(names) <= schemas.keys()
    assert json.dumps(document).count('"$ref"') == len(names)
    for path, item in document["paths"].items():
        for operation in item.values():
            assert operation["summary"]
            assert operation["responses"]
            parameters = [p["name"] for p in operation.get("parameters", ())]
            assert parameters == re.findall(r"{(\w+)}", path)


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_served_body_fits_its_schema(
    site: Site, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    assert site.request("POST", path, body)[0] == 200
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    validator = Draft202012Validator({**content["schema"], "components": document["components"]})
    validator.validate(body)
    assert not validator.is_valid({**body, "model": 5})


def test_key_is_described_where_it_is_needed(engine: LLM) -> None:
    with serving(engine, api_key="secret") as site:
        status, text, _ = site.request("GET", "/openapi.json")
        assert site.request("GET", "/docs")[0] == status == 200
    paths = json.loads(text)["paths"]
    keyed = {path for path, item in paths.items() for one in item.values() if "security" in one}
    assert keyed == {path for path in paths if path.startswith(("/v1", "/tok", "/detok"))}


def test_docs_page_has_no_scripts_and_loads_nothing(site: Site, document: dict[str, Any]) -> None:
    status, text, headers = site.request("GET", "/docs")
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in headers["content-security-policy"]
    assert not re.findall(r"https?://|<link|<script|src=", text)
    for path, method in operations_of(document):
        assert f"<h2>{method} {path}</h2>" in text
    assert "<code>continue_final_message</code>" in text
