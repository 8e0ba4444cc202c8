"""A real tritonserver on a deployed repository, started through the repository's own launch.sh,
and its clients.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve import free_ports
from tests.tiny import ROOT

ENVIRONMENT = ROOT / ".venv-triton"
READY = "/v2/health/ready"
"""What the written probes ask: the server with all of its models."""
START_S = 90.0
STOP_S = 120.0  # of a machine with other work, for seconds of decoding; EXIT_TIMEOUT stays below

needs_server = pytest.mark.skipif(
    not (ENVIRONMENT / ".ready").is_file(),
    reason=(
        "no Triton server: make .venv-triton/.ready installs one (nvidia-pytriton's wheel, Linux "
        "on x86-64)"
    ),
)


class Server:
    """One server process; use it as a context manager."""

    def __init__(self, repository: Path, model: str = "tiny", **environment: str) -> None:
        self.repository, self.model = repository, model
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        self.log_path = repository.parent / f"{repository.name}-{self.http_port}.log"
        self._environment = environment

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start, and wait until the model is ready and every port is open."""
        environment = {
            **os.environ,
            "TRT_EAGLE3_ENV": str(ENVIRONMENT),
            "HTTP_PORT": str(self.http_port),
            "GRPC_PORT": str(self.grpc_port),
            "METRICS_PORT": str(self.metrics_port),
            "OMP_NUM_THREADS": "1",
            "EXIT_TIMEOUT": "100",
            **self._environment,
        }
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [self.repository / "launch.sh"],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while not (self.ready() and self.has_metrics()):
            assert self.process.poll() is None, (
                f"the server ended while starting:\n{self.log()[-4000:]}"
            )
            assert time.monotonic() < deadline, (
                f"not ready after {START_S} s:\n{self.log()[-4000:]}"
            )
            time.sleep(0.1)

    def ready(self) -> bool:
        """What a readiness probe sees."""
        try:
            return self.get(READY, timeout=10)[0] == 200
        except OSError:
            return False

    def has_metrics(self) -> bool:
        """Whether the port of the metrics is open: Triton opens it after the one of HTTP."""
        try:
            return self.get("/metrics", timeout=10, port=self.metrics_port)[0] == 200
        except OSError:
            return False

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def terminate(self) -> int:
        """SIGTERM to the launcher; returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)

    def kill(self) -> None:
        """Whatever is left of the process group."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def stub(self) -> int:
        """Process id of the Python backend."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if (
                    words[0].endswith(b"triton_python_backend_stub")
                    and str(self.repository).encode() in words[1]
                ):
                    return int(entry.name)
        raise AssertionError("no backend process")

    def get(self, path: str, *, timeout: float = 60, port: int | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection(
            "127.0.0.1", port or self.http_port, timeout=timeout
        )
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def post(self, path: str, body: bytes, *, timeout: float = 60) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=timeout)
        try:
            connection.request("POST", f"/v2/models/{self.model}/{path}", body)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def generate(self, **inputs: Any) -> dict[str, Any]:
        """One answer in one response."""
        status, text = self.post("generate", json.dumps(inputs).encode())
        assert status == 200, text
        found: dict[str, Any] = json.loads(text)
        return found

    def stream(self, **inputs: Any) -> list[dict[str, Any]]:
        """Every event of a streamed answer."""
        status, text = self.post("generate_stream", json.dumps({"stream": True, **inputs}).encode())
        assert status == 200, text
        return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]

    def open_stream(self, **inputs: Any) -> Iterator[dict[str, Any]]:
        """Events as they come; close it to hang up."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=60)
        try:
            body = json.dumps({"stream": True, **inputs}).encode()
            connection.request("POST", f"/v2/models/{self.model}/generate_stream", body)
            for line in connection.getresponse():
                if line.strip():
                    yield json.loads(line.decode().removeprefix("data: "))
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """Our metrics: name, and the labels besides the model's in braces -> value."""
        found = {}
        for line in self.get("/metrics", port=self.metrics_port)[1].splitlines():
            if line.startswith("trt_eagle3_"):
                name, _, value = line.rpartition(" ")
                name, _, labels = name.removesuffix("}").partition("{")
                own = [label for label in labels.split(",") if not label.startswith("model=")]
                found[f"{name}{{{','.join(own)}}}" if own else name] = float(value)
        return found

    def wait_for_prompts(self, count: int, seconds: float = 60) -> None:
        """Until ``count`` requests were accepted since the first start; ``log_prompts`` must be
        set.

        Metrics are published now and then only, and a gauge may rise and fall unseen; a line in the
        log stays.
        """
        deadline = time.monotonic() + seconds
        while (found := len(re.findall(r"trt_eagle3: request \S+: ", self.log()))) != count:
            assert time.monotonic() < deadline, (
                f"{found} requests after {seconds} s, expected {count}"
            )
            time.sleep(0.02)

    def wait_for_metrics(
        self, holds: Callable[[dict[str, float]], bool], seconds: float = 60
    ) -> dict[str, float]:
        """The first metrics that ``holds``, which should be of counters: a gauge may rise and
        fall unseen.
        """
        deadline = time.monotonic() + seconds
        while not holds(found := self.metrics()):
            assert time.monotonic() < deadline, f"after {seconds} s: {found}"
            time.sleep(0.05)
        return found

    def settled_metrics(self) -> dict[str, float]:
        """Metrics that count every request which was answered before.

        They are published series by series now and then: of three changes that are seen one after
        the other, the second publication began after the call and ended before the third.
        """
        prompts = "trt_eagle3_prompt_tokens_total"
        for _ in range(3):
            before = self.metrics()[prompts]
            self.generate(text_input="Hi.", max_tokens=1)
            self.wait_for_metrics(lambda metrics, seen=before: metrics[prompts] > seen)
        return self.metrics()

    def wait_for_metric(self, name: str, value: float) -> None:
        self.wait_for_metrics(lambda metrics: metrics[name] == value)


@dataclass
class GrpcReply:
    """What came for one gRPC request: responses as dicts of lists, and the error after them, if
    any.
    """

    responses: list[dict[str, Any]]
    error: str | None


def grpc(server: Server, requests: Sequence[Mapping[str, Any]], **options: Any) -> list[GrpcReply]:
    """Send ``requests`` at once, from tritonclient in the server's environment; each over a gRPC
    stream of its own.

    Bytes go as bytes. ``one_stream``: all over one. ``cancel_after``: cancel a stream after so many
    responses.
    """
    job = {
        "url": f"127.0.0.1:{server.grpc_port}",
        "model": server.model,
        "requests": requests,
        **options,
    }
    done = subprocess.run(
        [ENVIRONMENT / "bin/python", "-I", Path(__file__).with_name("grpc_client.py")],
        input=json.dumps(job, default=lambda data: {"base64": base64.b64encode(data).decode()}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [GrpcReply(**reply) for reply in json.loads(done.stdout)]


def data_uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
