"""Run the model of Triton's Python backend: one engine, concurrent requests, decoupled responses.

``execute`` submits requests to the engine and returns at once. One event loop in its own thread
uses the response senders: it sends chunks and checks for cancelled requests. No two threads may
share a sender: Triton 2.51 crashes on a cancellation check after the final response. Another thread
publishes the engine's metrics.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
import yaml

from trt_eagle3.decode.llm import load
from trt_eagle3.errors import UserError, as_failure, clip
from trt_eagle3.serving import ServingConfig
from trt_eagle3.serving.json_reader import parse_request_json
from trt_eagle3.serving.served_model import ServedModel
from trt_eagle3.serving.warm_up import warm_up
from trt_eagle3.triton.libraries import use_libraries
from trt_eagle3.triton.metrics import PublishedMetrics
from trt_eagle3.triton.request import ParsedRequest, read_order
from trt_eagle3.triton.response_stream import ResponseStream, refuse
from trt_eagle3.triton.tensors import INPUTS
from trt_eagle3.triton.watchdog import Watchdog

__all__ = ["TritonPythonModel"]

TICK_S = 0.1  # between checks of requests in flight; a cancelled one decodes this much longer
# after the last response: when the model exits, the server drops unsent responses
FLUSH_S = 0.5
PUBLISH_S = 0.5  # between updates of the metrics: each changed series is a message to the server


class TritonPythonModel:
    """The model of Triton's Python backend; its documentation has the methods' contract."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the bundle and warm up. The model is ready when this returns."""
        parameters = _parameters(json.loads(args["model_config"]))
        exits = parameters.pop("exit_on_crash", True)
        self._serving = ServingConfig.from_mapping(parameters, "config.pbtxt: parameters")
        folder = Path(args["model_repository"]) / args["model_version"]
        use_libraries(folder)
        self._engine = load(
            folder / "bundle",
            media=self._serving.media(),
            media_cache=self._serving.media_cache(),
            max_step_ms=self._serving.max_step_ms,
            split_special_tokens=self._serving.split_special_tokens,
            tool_format=self._serving.tool_format,
        )
        seconds = warm_up(self._engine)
        self._served = ServedModel.of(self._engine, self._serving)
        self._metrics = PublishedMetrics(self._engine, pb_utils, args["model_name"])
        self._metrics.publish()
        self._flights: dict[int, ResponseStream] = {}
        self._closing = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._threads = [
            threading.Thread(target=run, daemon=True) for run in (self._run_loop, self._publish)
        ]
        for thread in self._threads:
            thread.start()
        self._watchdog = Watchdog() if exits else None  # a model that fails to load is not a crash
        pb_utils.Logger.log_info(
            f"trt_eagle3: {args['model_name']} answers; warm-up took {seconds:.1f} s"
        )

    def execute(self, requests: Sequence[Any]) -> None:
        """Start answering; each request's sender sends its responses."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                parsed = self._read(request)
                answer = self._engine.submit(parsed.request)
                stream = ResponseStream(sender, parsed, answer, self._serving, self._served)
                self._log(request.request_id(), parsed)
            except BaseException as error:  # a failure must end this request only, not the server
                refuse(sender, as_failure(error))
                continue
            asyncio.run_coroutine_threadsafe(self._serve(stream), self._loop)

    def is_ready(self) -> bool:
        """Return whether the engine answers and finishes steps.

        Servers from 26.03 on call this for their own readiness checks. Older ones never do.
        """
        limit = self._serving.max_step_s
        stalled = limit is not None and self._engine.stall(limit) is not None
        return self._engine.ready and not stalled

    def finalize(self) -> None:
        """Answer requests in flight, then stop.

        The server's own exit timeout limits the time.
        """
        self._closing.set()
        self._engine.close(drain=True)
        asyncio.run_coroutine_threadsafe(self._drain(), self._loop).result()
        time.sleep(FLUSH_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            thread.join()
        if self._watchdog:
            self._watchdog.dismiss()

    async def _drain(self) -> None:
        """Wait until the last responses are sent."""
        while self._flights:
            await asyncio.sleep(TICK_S)
        self._ticker.cancel()

    async def _serve(self, stream: ResponseStream) -> None:
        self._flights[id(stream)] = stream
        try:
            await stream.run()
        finally:
            del self._flights[id(stream)]

    def _run_loop(self) -> None:
        self._ticker = self._loop.create_task(self._watch_flights())
        self._loop.run_forever()

    async def _watch_flights(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for stream in list(self._flights.values()):
                stream.look_after()

    def _publish(self) -> None:
        server = os.getppid()
        while not self._closing.wait(PUBLISH_S):
            if os.getppid() != server:  # the server died, and this process would stay
                os._exit(1)
            self._metrics.publish()
            if not self._engine.ready and not self._closing.is_set():
                pb_utils.Logger.log_error(
                    "trt_eagle3: the engine has stopped, so this process exits"
                )
                # the watchdog stops the server, and its supervisor restarts it
                os._exit(1)

    def _read(self, request: Any) -> ParsedRequest:
        try:
            parameters = _request_parameters(request, self._serving)
            return read_order(_tensors(request), parameters, self._serving, self._served)
        except UserError:  # the engine counts every refused prompt
            self._engine.count_rejected()
            raise

    def _log(self, request_id: str, parsed: ParsedRequest) -> None:
        if self._serving.log_prompts:
            text = parsed.request.prompt_text
            pb_utils.Logger.log_info(f"trt_eagle3: request {clip(request_id) or '-'}: {text!r}")


def _tensors(request: Any) -> dict[str, Any]:
    found = ((name, pb_utils.get_input_tensor_by_name(request, name)) for name in INPUTS)
    return {name: tensor.as_numpy() for name, tensor in found if tensor is not None}


def _request_parameters(request: Any, serving: ServingConfig) -> Any:
    try:
        text = request.parameters()
    except UnicodeError as error:
        raise UserError("request: a parameter is not UTF-8. Encode it as UTF-8.") from error
    return (
        parse_request_json(text.encode("utf-8", "surrogatepass"), "request: parameters", serving)
        if text
        else {}
    )


def _parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the model's parameters as YAML values, without those of the Python backend."""
    values = {
        name: yaml.safe_load(value["string_value"]) for name, value in config["parameters"].items()
    }
    return {name: value for name, value in values.items() if name.islower()}
