"""``trt-eagle3 serve`` over an engine of this process, on a port of its own, and a client."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.waiting import wait_for
from trt_eagle3.serving import ServingConfig
from trt_eagle3.serving.engine import Engine
from trt_eagle3.serving.http_options import HttpOptions
from trt_eagle3.serving.server import Server

SERVING = ServingConfig(max_body_bytes=1 << 20, max_media=4)


@dataclass
class Site:
    port: int
    server: Server

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, str, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), dict(answer.getheaders())
        finally:
            connection.close()

    def chat(self, **body: Any) -> tuple[int, dict[str, Any]]:
        status, text, _ = self.request("POST", "/v1/chat/completions", body)
        return status, json.loads(text)

    @contextmanager
    def hang_up_later(self, body: dict[str, Any]) -> Iterator[None]:
        """Ask, and go away at the end of the block without having read anything."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        try:
            yield
        finally:
            connection.close()

    def events(self, **body: Any) -> list[Any]:
        status, text, _ = self.request("POST", "/v1/chat/completions", {"stream": True, **body})
        assert status == 200, text
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


@contextmanager
def serving(
    engine: Engine,
    config: ServingConfig = SERVING,
    api_key: str | None = None,
    http: HttpOptions | None = None,
    hosts: frozenset[str] | None = None,
) -> Iterator[Site]:
    options = HttpOptions(api_key=api_key) if http is None else http
    server = Server(engine, config, options, hosts=hosts)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield Site(server.servers[0].sockets[0].getsockname()[1], server)
    finally:
        server.should_exit = True
        thread.join(60)
