"""``deploy`` and ``serve`` on the command line."""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from click.testing import CliRunner

from benchmarks.serve import free_ports
from tests.tiny import ROOT, build_tiny
from tests.waiting import wait_for
from trt_eagle3 import program
from trt_eagle3.cli import cli
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.errors import UserError
from trt_eagle3.io.assignments import parse_assignments
from trt_eagle3.serving import ServingConfig, server
from trt_eagle3.serving.engine_process import EngineJob
from trt_eagle3.serving.http_options import HttpOptions

pytestmark = pytest.mark.usefixtures("wide_console")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("engines"))


def run(*words: object) -> str:
    return (
        CliRunner()
        .invoke(cli, [str(word) for word in words], catch_exceptions=False, standalone_mode=False)
        .output
    )


def test_deploy_says_what_it_wrote_and_what_is_next(bundle: Path, tmp_path: Path) -> None:
    output = run(
        "deploy", bundle, "--repository", tmp_path / "r", "--set", "allowed_hosts=[cdn.example.com]"
    )
    assert f"wrote {tmp_path}/r/tiny" in output
    assert re.search(rf"^next: .*{re.escape(str(tmp_path))}/r/launch\.sh$", output, re.MULTILINE)
    assert "cdn.example.com" in (tmp_path / "r/tiny/config.pbtxt").read_text()
    found = json.loads(
        run("deploy", bundle, "--repository", tmp_path / "r", "--name", "other", "--json")
    )
    assert found["name"] == "other"
    assert Path(found["model"], "config.pbtxt").is_file()


def test_deploy_writes_for_the_other_runtime(bundle: Path, tmp_path: Path) -> None:
    words = ("--target", "tensorrt-llm", "--runtime-version", "1.2", "--tensor-parallel-size", "2")
    assert "for TensorRT-LLM 1.2" in run("deploy", bundle, "--repository", tmp_path / "r", *words)
    assert "tensor_parallel_size: 2" in (tmp_path / "r/llm_api.yaml").read_text()


def test_hosts_are_allowed_as_the_page_on_serving_says(bundle: Path, tmp_path: Path) -> None:
    words = re.findall(r"`--set ('allowed_hosts=.+?')`", (ROOT / "docs/serving.md").read_text())
    assert words
    for word in words:
        run("deploy", bundle, "--repository", tmp_path, "--set", *shlex.split(word))
        [written] = re.findall(
            r'"allowed_hosts" value: { string_value: "(.+)" }',
            (tmp_path / "tiny/config.pbtxt").read_text(),
        )
        config = ServingConfig.from_mapping(
            {"allowed_hosts": yaml.safe_load(written)}, "config.pbtxt"
        )
        assert config == ServingConfig.from_mapping(parse_assignments(shlex.split(word)), "--set")
        assert config.allowed_hosts == tuple(re.findall(r"[*\w.-]+\.[a-z]+(?::\d+)?", word))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--target", "tensorrt-llm", "--name", "x"), "--target tensorrt-llm: does not use name"),
        (("--tensor-parallel-size", "2"), "--target triton: does not use tensor_parallel_size"),
        (("--target", "tensorrt-llm", "--runtime-version", "1.3"), "--runtime-version 1.3"),
        (("--set", "max_media"), "expected KEY=VALUE"),
        (("--set", "max_media=many"), "--set: max_media"),
    ],
)
def test_bad_words_are_refused_in_one_line(
    bundle: Path, tmp_path: Path, words: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(UserError) as caught:
        run("deploy", bundle, "--repository", tmp_path / "r", *words)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_serve_refuses_what_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no bundle here"):
        run("serve", tmp_path, "--port", *free_ports(1))
    with pytest.raises(UserError, match="max_pixls: unknown"):
        run("serve", tmp_path, "--set", "max_pixls=3")


def test_handlers_of_the_program_that_calls_serve_are_left_as_they_are(tmp_path: Path) -> None:
    handlers = logging.getLogger().handlers[:]
    filters = [handler.filters[:] for handler in handlers]
    with pytest.raises(UserError, match="no bundle here"):
        run("serve", tmp_path, "--port", *free_ports(1))
    assert logging.getLogger().handlers == handlers
    assert [handler.filters for handler in handlers] == filters


def test_address_that_cannot_be_listened_on_is_refused_before_the_engine_is_loaded(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("trt_eagle3.serving.server.RemoteEngine", loaded)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError, match=rf"127\.0\.0\.1:{port}: cannot listen: Address already in use"
        ):
            run("serve", bundle, "--port", port)
    with pytest.raises(UserError, match="cannot listen"):
        run("serve", bundle, "--host", "203.0.113.7")


def test_serve_warns_of_settings_that_hurt_before_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Engine(AbstractContextManager[Any]):
        def __init__(self, _: EngineJob) -> None:
            """No process."""

        def __exit__(self, *_: object) -> None:
            """Nothing runs."""

        def attach(self, bundle: Path, **_: object) -> None:
            self.bundle = LoadedBundle.open(bundle)

        def wait_until_ready(self) -> None:
            raise UserError("enough")

    monkeypatch.setattr(server, "RemoteEngine", Engine)
    limits = {"max_batch_size": 1, "max_seq_len": 96, "max_visual_tokens": 97}
    for changes, named in (
        (
            {"limits": limits, "draft": None},
            ["limits.max_batch_size", "limits.max_visual", "draft"],
        ),
        ({}, []),
    ):
        caplog.clear()
        bundle = build_tiny(tmp_path, **changes)
        with pytest.raises(UserError, match="enough"):
            run("serve", bundle, "--port", *free_ports(1))
        warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
        found = [record.getMessage() for record in warnings]
        assert [line[: len(name)] for line, name in zip(found, named, strict=True)] == named


def test_empty_key_does_not_open_the_door(bundle: Path) -> None:
    with pytest.raises(UserError, match="--api-key: it is empty"):
        run("serve", bundle, "--api-key", "")


PICTURE = next((ROOT / "examples/tiny/images").glob("*.png"))
QUESTION = [{"role": "user", "content": "What is 12 plus 30?"}]


@contextmanager
def serving(
    bundle: Path, *words: str, drain_s: int = 30, environment: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """``trt-eagle3 serve`` as a process, and its port, once it says that it answers."""
    (port,) = free_ports(1)
    code = (  # what a shell runs in the background begins with SIGINT ignored
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from trt_eagle3 import cli; from trt_eagle3.serving import server; server.DRAIN_S = "
        f"{drain_s}; cli.main()"
    )
    program = [sys.executable, "-c", code, "serve", str(bundle), "--port", str(port), *words]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            lines = [process.stderr.readline() for _ in range(3)]
            assert f"loading {bundle}" in lines[0]
            assert "warming up" in lines[1]
            line = lines[2]
            assert f"tiny answers on http://127.0.0.1:{port}/v1; " in line
            assert f"chat page on http://127.0.0.1:{port}/; " in line
            assert "8 sequences at once, KV cache of 8,192 tokens" in line
            yield process, port
        finally:
            process.kill()


def ask(port: int, key: str = "", **body: Any) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps({"messages": QUESTION, "ignore_eos": True, **body}),
        {"Authorization": f"Bearer {key}"},
    )
    return connection


def metric(port: int, name: str) -> list[str]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", "/metrics")
        return re.findall(
            rf"^trt_eagle3_{name}.* (\S+)$", connection.getresponse().read().decode(), re.MULTILINE
        )


@dataclass
class Served:
    """What is left of a server that was asked twice and then told to end.

    Attributes:
        counted: requests by outcome before the first. stream: the answer that SIGTERM met.
        children: command line -> environment of each process that it had. home: its user's.
    """

    counted: list[str]
    stream: bytes
    status: int
    log: str
    children: dict[str, str]
    home: Path


@pytest.fixture(scope="module")
def served(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    home = tmp_path_factory.mktemp("home")
    environment = {name: os.environ[name] for name in os.environ if name != "ORT_DISABLE_TELEMETRY"}
    environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    environment |= {"TRT_EAGLE3_API_KEY": "sesame", "HF_TOKEN": "sesame"}
    url = f"data:image/png;base64,{b64encode(PICTURE.read_bytes()).decode()}"
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    with serving(bundle, "--set", "log_prompts=true", environment=environment) as (process, port):
        counted = metric(port, "requests_total")
        constrained = {"response_format": {"type": "json_object"}, "max_tokens": 2}
        with closing(ask(port, "sesame", messages=picture, **constrained)) as connection:
            assert connection.getresponse().status == 200
        children = {
            Path(f"/proc/{pid}/cmdline").read_text(): Path(f"/proc/{pid}/environ").read_text()
            for pid in _descendants(process.pid)
        }
        with closing(ask(port, "sesame", max_tokens=150, stream=True)) as connection:
            answer = connection.getresponse()
            assert b"assistant" in answer.readline()
            process.terminate()
            stream = answer.read()
        status = process.wait(60)
        assert process.stderr is not None
        return Served(counted, stream, status, process.stderr.read(), children, home)


def _descendants(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(n) for task in tasks for n in (task / "children").read_text().split()]
    return children + [below for child in children for below in _descendants(child)]


def test_sigterm_lets_a_stream_end(served: Served) -> None:
    assert served.counted == ["0.0"] * 5  # the warm-up is nobody's request
    assert served.stream.endswith(b"data: [DONE]\n\n")
    assert served.status == 0
    assert "What is 12 plus 30?" in served.log  # log_prompts asked for it


@pytest.mark.parametrize(
    "program", ["engine_process", "decoder_process", "template_worker", "grammar_worker"]
)
def test_child_process_has_no_key_in_its_environment(served: Served, program: str) -> None:
    found = [env for command, env in served.children.items() if program in command]
    assert found
    assert not [env for env in found if "sesame" in env or "PATH=" not in env]


def test_engine_leaves_no_telemetry_in_the_users_cache(served: Served) -> None:
    assert not [path for path in served.home.rglob("*") if "onnxruntime" in path.name]


def _is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
    except ConnectionRefusedError:
        return False
    return True


def test_second_ctrl_c_ends_the_server_at_once_and_without_a_traceback(bundle: Path) -> None:
    long = {"stream": True, "n": 16, "max_tokens": 900}  # of which the client reads a part only
    with serving(bundle) as (process, port), closing(ask(port, **long)) as connection:
        answer = connection.getresponse()
        for _ in range(100):
            answer.readline()
        process.send_signal(signal.SIGINT)
        while _is_open(port):  # it has heard of the first
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr is not None
        said = process.stderr.read()
        assert said.endswith("interrupted\n")
        assert "Traceback" not in said


def _engine_of(server: int) -> int:
    command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(server)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    [line] = [line for line in found.stdout.splitlines() if "engine_process" in line]
    return int(line.split()[0])


def test_engine_that_is_killed_is_told_to_clients_and_ends_the_server(bundle: Path) -> None:
    """By SIGTERM it is not: a service manager sends that to every process, and answers may end."""
    long = {"stream": True, "n": 16, "max_tokens": 900}
    with serving(bundle) as (process, port), closing(ask(port, **long)) as connection:
        answer = connection.getresponse()
        answer.readline()
        engine = _engine_of(process.pid)
        os.kill(engine, signal.SIGTERM)
        for _ in range(100):
            assert b"error" not in answer.readline()
        os.kill(engine, signal.SIGKILL)
        last = answer.read().decode().splitlines()[-2]
        assert "the engine's process ended" in json.loads(last[6:])["error"]["message"]
        assert process.wait(60) == 1
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()
        assert [line.split(maxsplit=2)[2] for line in lines if " INFO " not in line] == [
            "ERROR engine: its process was ended by SIGKILL. Is there enough memory?"
        ]


def test_sigterm_before_the_server_answers_ends_it_with_status_0(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first process of a container it would not hear of it otherwise."""

    def load(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
        raise AssertionError

    def ours(*_: object) -> None:
        pass

    monkeypatch.setattr(server, "_start_engine", load)
    before = signal.signal(signal.SIGTERM, ours)
    try:
        with pytest.raises(SystemExit) as ended:
            server.serve(
                bundle,
                serving=ServingConfig(),
                http=HttpOptions(),
                host="127.0.0.1",
                port=free_ports(1)[0],
            )
        assert ended.value.code == 0
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, before)


def test_tool_format_reaches_the_server_and_its_engine(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StartedError(Exception):
        """Enough was seen."""

    class Engine(AbstractContextManager[Any]):
        def __init__(self, job: EngineJob) -> None:
            self.job = job

        def __exit__(self, *_: object) -> None:
            """Nothing runs."""

        def attach(self, _: Path, **options: Any) -> None:
            llm = cast("partial[LLM]", self.job.open_engine)
            raise StartedError(llm.keywords["tool_format"], options["tool_format"])

    monkeypatch.setattr(server, "RemoteEngine", Engine)
    for words, expected in {(): "auto", ("--tool-format", "qwen3_coder"): "qwen3_coder"}.items():
        with pytest.raises(StartedError) as found:
            run("serve", bundle, "--port", free_ports(1)[0], *words)
        assert found.value.args == (expected, expected)


def test_ctrl_c_while_the_program_is_imported_is_one_line() -> None:
    code = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'trt_eagle3.commands':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from trt_eagle3.program import main\n"
        "main()\n"
    )
    program = [sys.executable, "-c", code]
    found = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stderr) == (130, "interrupted\n")


def test_ctrl_c_while_the_interpreter_ends_is_one_line() -> None:
    code = (
        "import atexit, os, signal, sys\n"
        "from trt_eagle3.program import main\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['trt-eagle3', '--version']\n"
        "main()\n"
    )
    program = [sys.executable, "-c", code]
    found = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stderr) == (130, "interrupted\n")


def test_ctrl_c_again_while_the_interpreter_ends_says_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[object] = []

    def interrupted() -> None:
        raise SystemExit(130)

    monkeypatch.setattr("trt_eagle3.cli.main", interrupted)
    monkeypatch.setattr(os, "write", lambda *said: done.append(said))
    monkeypatch.setattr(os, "_exit", done.append)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            program.main()
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == [130]


def test_answers_that_are_not_ready_when_the_server_must_stop_end_with_an_error(
    bundle: Path,
) -> None:
    with (
        ExitStack() as stack,
        serving(bundle, "--no-access-log", drain_s=0) as (process, port),
        closing(ask(port, stream=True)) as s,
    ):
        streamed = s.getresponse()
        whole = stack.enter_context(closing(ask(port, n=16)))  # many seconds of work
        wait_for(lambda: metric(port, "requests_running") == ["8.0"])
        process.terminate()
        answer = whole.getresponse()
        assert (answer.status, "stopping" in answer.read().decode()) == (503, True)
        last = streamed.read().decode().splitlines()[-2]
        assert "stopping" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
