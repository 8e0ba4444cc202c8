"""The clients of a soak: good, leaving, hostile and half-sent requests over HTTP and gRPC."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trt_eagle3.errors import UserError

__all__ = ["CLIENTS", "TIMEOUT_S", "WORKERS", "ServedCase", "Soak"]

TIMEOUT_S = 60.0  # longest time of an answer or a rejection
WORKERS = {
    "http": 3,
    "grpc": 2,
    "hang up": 1,
    "cancel": 1,
    "hostile http": 1,
    "hostile grpc": 1,
    "half-sent": 1,
}
_HOSTILE: tuple[dict[str, Any], ...] = (
    {"text_input": "x", "max_tokens": 0},
    {"text_input": "x", "temperature": -1.0},
    {"text_input": "word " * 20_000},
    {"text_input": "x", "image_url": "data:image/png;base64,AAAA"},
    {"text_input": "x", "image_url": "data:image/png;base64," + "A" * 4_000_000},
    {"text_input": "x", "image_url": "http://169.254.169.254/"},
    {"text_input": "x", "image_url": "/etc/passwd"},
    {"text_input": "x", "video": '["data:\\ud800"]'},
    {"text_input": "x", "messages": "[]"},
    {"messages": "{"},
    {"messages": "[" * 50_000},
    {"messages": "[" + "{}," * 300_000 + "{}]"},
    {"messages": '[{"role": "user", "content": "\\ud800"}]'},
    {"messages": '[{"role": "\\udfff", "content": "x"}]'},
    {
        "messages": '[{"role": "user", "content": [{"type": "image_url",'
        ' "image_url": {"url": "data:\\ud800"}}]}]'
    },
)


@dataclass(frozen=True)
class ServedCase:
    """A request, and the text of its expected answer."""

    inputs: dict[str, Any]
    text: str


@dataclass
class Soak:
    """State that all clients share."""

    model: str
    http_port: int
    grpc_port: int
    cases: Sequence[ServedCase]
    done: threading.Event = field(default_factory=threading.Event)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0

    def run(self, name: str, seed: int, once: Callable[[Soak, random.Random], None]) -> None:
        """Repeat ``once`` until the time is over; every exception is a fault."""
        draw = random.Random(seed)
        while not self.done.is_set():
            start = time.monotonic()
            try:
                once(self, draw)
            except Exception as error:
                self.wrong.append(f"{name}: {type(error).__name__}: {error!s:.300}")
            self.counts[name] += 1
            self.slowest = max(self.slowest, time.monotonic() - start)

    def connection(self) -> http.client.HTTPConnection:
        """Open a connection to the server's HTTP port."""
        return http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=TIMEOUT_S)

    def post(
        self, connection: http.client.HTTPConnection, inputs: dict[str, Any]
    ) -> http.client.HTTPResponse:
        """Request a stream, or one answer if ``stream`` is missing."""
        path = "generate_stream" if inputs.get("stream") else "generate"
        connection.request("POST", f"/v2/models/{self.model}/{path}", json.dumps(inputs))
        return connection.getresponse()


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _good_http(soak: Soak, draw: random.Random) -> None:
    case, stream = draw.choice(soak.cases), draw.random() < 0.5
    with contextlib.closing(soak.connection()) as connection:
        answer = soak.post(connection, {**case.inputs, **({"stream": True} if stream else {})})
        lines = [line for line in answer.read().decode().splitlines() if line]
    _expect(answer.status == 200, f"status {answer.status}: {lines}")
    text = "".join(json.loads(line.removeprefix("data: "))["text_output"] for line in lines)
    _expect(
        text == case.text,
        f"{case.inputs.get('text_input')!r:.60}: {text!r}, expected {case.text!r}",
    )


def _hang_up(soak: Soak, draw: random.Random) -> None:
    case = draw.choice(soak.cases)
    with contextlib.closing(soak.connection()) as connection:
        answer = soak.post(
            connection, {**case.inputs, "stream": True, "max_tokens": 400, "ignore_eos": True}
        )
        for _ in range(draw.randrange(1, 6)):
            answer.readline()


def _hostile_http(soak: Soak, draw: random.Random) -> None:
    inputs = draw.choice(_HOSTILE)
    with contextlib.closing(soak.connection()) as connection:
        answer = soak.post(connection, inputs)
        text = answer.read().decode()
    _expect(
        answer.status in {400, 503} and "error" in json.loads(text), f"{answer.status} {text:.200}"
    )


def _half_sent(soak: Soak, draw: random.Random) -> None:
    head = f"POST /v2/models/{soak.model}/generate HTTP/1.1\r\nHost: x\r\n"
    head += "Content-Length: 100000\r\n\r\n"
    data = head.encode() + b'{"text_input": "' + b"x" * 50_000
    with socket.create_connection(("127.0.0.1", soak.http_port)) as client:
        client.sendall(data[: draw.randrange(len(data))])
        soak.done.wait(0.2)


def _grpc_inputs(inputs: dict[str, Any]) -> list[Any]:
    import tritonclient.grpc as triton

    kinds: dict[type, tuple[Any, str]] = {
        bool: (np.bool_, "BOOL"),
        int: (np.int32, "INT32"),
        float: (np.float32, "FP32"),
    }
    found = []
    for name, value in inputs.items():
        values = value if isinstance(value, list) else [value]
        kind, word = (
            (np.uint64, "UINT64")
            if name == "seed"
            else kinds.get(type(values[0]), (np.object_, "BYTES"))
        )
        array = np.array([v.encode() if isinstance(v, str) else v for v in values], dtype=kind)
        tensor = triton.InferInput(name, list(array.shape), word)
        tensor.set_data_from_numpy(array)
        found.append(tensor)
    return found


def _grpc_stream(soak: Soak, inputs: dict[str, Any], cancel_after: int | None = None) -> str:
    """Return the text of an answer; raise the server's error."""
    import tritonclient.grpc as triton

    arrived: queue.Queue[tuple[Any, Any]] = queue.Queue()
    text, count = "", 0
    with triton.InferenceServerClient(f"127.0.0.1:{soak.grpc_port}") as client:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        client.async_stream_infer(
            soak.model, _grpc_inputs(inputs), enable_empty_final_response=True
        )
        while cancel_after is None or count < cancel_after:
            result, error = arrived.get(timeout=TIMEOUT_S)
            if error is not None:
                raise UserError(str(error))
            response = result.get_response()
            if response.outputs:
                text += result.as_numpy("text_output")[0].decode()
                count += 1
            if response.parameters["triton_final_response"].bool_param:
                break
        client.stop_stream(cancel_requests=cancel_after is not None)
    return text


def _good_grpc(soak: Soak, draw: random.Random) -> None:
    case = draw.choice(soak.cases)
    text = _grpc_stream(soak, {**case.inputs, "stream": draw.random() < 0.5})
    _expect(
        text == case.text,
        f"{case.inputs.get('text_input')!r:.60}: {text!r}, expected {case.text!r}",
    )


def _cancel(soak: Soak, draw: random.Random) -> None:
    inputs = {
        **draw.choice(soak.cases).inputs,
        "stream": True,
        "max_tokens": 400,
        "ignore_eos": True,
    }
    _grpc_stream(soak, inputs, cancel_after=draw.randrange(1, 6))


def _hostile_grpc(soak: Soak, draw: random.Random) -> None:
    inputs = draw.choice(_HOSTILE)
    try:
        text = _grpc_stream(soak, inputs)
    except UserError:
        return
    raise AssertionError(f"{inputs!r:.80} was answered: {text!r:.80}")


CLIENTS: dict[str, Callable[[Soak, random.Random], None]] = {
    "http": _good_http,
    "grpc": _good_grpc,
    "hang up": _hang_up,
    "cancel": _cancel,
    "hostile http": _hostile_http,
    "hostile grpc": _hostile_grpc,
    "half-sent": _half_sent,
}
