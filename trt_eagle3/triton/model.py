"""The model that Triton's Python backend runs: one engine, many requests in flight, decoupled responses.

``execute`` hands requests to the engine and returns at once. One event loop in a thread of its own does everything with
response senders: it passes chunks on and looks for cancelled requests. (Triton 2.51 crashes when a sender is asked
whether its request is cancelled after the final response, so no two threads may share one.) Another thread publishes
the engine's metrics.
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

import numpy as np
import triton_python_backend_utils as pb_utils
import yaml

from trt_eagle3.decode.engine import load
from trt_eagle3.errors import OverloadedError, UserError
from trt_eagle3.serving import ServingConfig
from trt_eagle3.serving.warm_up import warm_up
from trt_eagle3.triton.libraries import use_libraries
from trt_eagle3.triton.metrics import PublishedMetrics
from trt_eagle3.triton.request import Order, read_order
from trt_eagle3.triton.tensors import INPUTS
from trt_eagle3.triton.watchdog import Watchdog

__all__ = ["TritonPythonModel"]

TICK_S = 0.1
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """What Triton's Python backend calls; see its documentation for the contract of the three methods."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the bundle and answer once. The model is ready when this returns, not before."""
        parameters = _parameters(json.loads(args["model_config"]))
        exits = parameters.pop("exit_on_crash", True)
        self._watchdog = Watchdog() if exits else None
        self._serving = ServingConfig.from_mapping(parameters, "config.pbtxt: parameters")
        folder = Path(args["model_repository"]) / args["model_version"]
        use_libraries(folder)
        self._engine = load(folder / "bundle", media=self._serving.media())
        seconds = warm_up(self._engine)
        self._metrics = PublishedMetrics(self._engine, pb_utils, args["model_name"])
        self._flights: dict[int, _Flight] = {}
        self._closing = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._run_loop, self._publish)]
        for thread in self._threads:
            thread.start()
        pb_utils.Logger.log_info(f"trt_eagle3: {args['model_name']} answers; warm-up took {seconds:.1f} s")

    def execute(self, requests: Sequence[Any]) -> None:
        """Begin answering; responses go out through each request's sender."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                order = read_order(_tensors(request), json.loads(request.parameters()), self._serving)
                flight = _Flight(sender, order, self._engine.submit(order.request))
            except Exception as error:  # any failure is this request's, not the server's
                _refuse(sender, error)
                continue
            self._log(request.request_id(), order)
            asyncio.run_coroutine_threadsafe(self._fly(flight), self._loop)

    def finalize(self) -> None:
        """Answer what is in flight, then stop. The server's own exit timeout bounds how long that may take."""
        self._closing.set()
        self._engine.close(drain=True)
        asyncio.run_coroutine_threadsafe(self._land(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            thread.join()
        if self._watchdog:
            self._watchdog.dismiss()

    async def _land(self) -> None:
        """Wait until the last responses are out."""
        while self._flights:
            await asyncio.sleep(TICK_S)
        self._ticker.cancel()

    async def _fly(self, flight: _Flight) -> None:
        self._flights[id(flight)] = flight
        try:
            await flight.run()
        finally:
            del self._flights[id(flight)]

    def _run_loop(self) -> None:
        self._ticker = self._loop.create_task(self._watch_flights())
        self._loop.run_forever()

    async def _watch_flights(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for flight in list(self._flights.values()):
                flight.cancel_if_unwanted(self._serving.max_request_s)

    def _publish(self) -> None:
        server = os.getppid()
        while not self._closing.wait(TICK_S):
            if os.getppid() != server:  # it died, and would leave this process behind
                os._exit(1)
            self._metrics.publish()
            if not self._engine.ready and not self._closing.is_set():
                pb_utils.Logger.log_error("trt_eagle3: the engine has stopped, so this process ends")
                os._exit(1)  # the watchdog stops the server, and whoever supervises it starts it again

    def _log(self, request_id: str, order: Order) -> None:
        if self._serving.log_prompts:
            prompt = order.request.prompt
            text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
            pb_utils.Logger.log_info(f"trt_eagle3: request {request_id or '-'}: {text!r}")


class _Flight:
    """A request being answered. Everything here happens in the event loop."""

    def __init__(self, sender: Any, order: Order, answer: Any) -> None:
        self._sender = sender
        self._order = order
        self._answer = answer
        self._start = time.monotonic()
        self._late = self._over = False

    async def run(self) -> None:
        """Pass chunks on as they come, or all of them at the end."""
        texts, ids, count = [self._order.echo], [], 0
        try:
            async for chunk in self._answer:
                if chunk.finish_reason == "cancelled":
                    self._end(TimeoutError() if self._late else None)
                    return
                texts.append(chunk.text)
                ids += chunk.token_ids
                count += len(chunk.token_ids)
                if chunk.finish_reason or (self._order.stream and (any(texts) or self._order.return_token_ids)):
                    self._send("".join(texts), ids, count, chunk.finish_reason)
                    texts, ids = [], []
        except Exception as error:
            self._answer.cancel()
            self._end(error)

    def cancel_if_unwanted(self, max_seconds: float) -> None:
        """Stop decoding for a client that has gone or cancelled, or for too long; its pages become free."""
        if self._over:
            return
        self._late = time.monotonic() - self._start > max_seconds
        if self._late or self._sender.is_cancelled():
            self._answer.cancel()

    def _end(self, error: BaseException | None) -> None:
        if not self._over:
            self._over = True
            _refuse(self._sender, error)

    def _send(self, text: str, ids: Sequence[int], count: int, finish_reason: str | None) -> None:
        outputs = [_strings("text_output", text)]
        if self._order.return_token_ids:
            outputs.append(pb_utils.Tensor("token_ids", np.array(ids, dtype=np.int32)))
        if finish_reason:  # every tensor costs, so what is said once is sent once
            outputs += [_strings("finish_reason", finish_reason), *self._summary(count)]
        self._over = finish_reason is not None
        self._sender.send(pb_utils.InferenceResponse(outputs), flags=_FINAL if finish_reason else 0)

    def _summary(self, count: int) -> list[Any]:
        generation = self._answer.generation
        numbers = {"num_input_tokens": generation.prompt_tokens, "num_output_tokens": count}
        outputs = [pb_utils.Tensor(name, np.array([value], dtype=np.int32)) for name, value in numbers.items()]
        if generation.acceptance_length is not None:
            value = np.array([generation.acceptance_length], dtype=np.float32)
            outputs.append(pb_utils.Tensor("acceptance_length", value))
        return outputs


def _strings(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode()], dtype=np.object_))


def _tensors(request: Any) -> dict[str, Any]:
    found = ((name, pb_utils.get_input_tensor_by_name(request, name)) for name in INPUTS)
    return {name: tensor.as_numpy() for name, tensor in found if tensor is not None}


def _parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The model's parameters: YAML values, those of the Python backend itself left out."""
    values = {name: yaml.safe_load(value["string_value"]) for name, value in config["parameters"].items()}
    return {name: value for name, value in values.items() if name.islower()}


def _refuse(sender: Any, error: BaseException | None) -> None:
    """End a request with an error: the client's fault, too much at once, cancelled (None), or ours."""
    codes = pb_utils.TritonError
    match error:
        case None:
            code, message = codes.CANCELLED, "cancelled"
        case TimeoutError():
            code, message = codes.CANCELLED, "cancelled: it took longer than max_request_s"
        case OverloadedError():
            code, message = codes.UNAVAILABLE, str(error)
        case UserError():
            code, message = codes.INVALID_ARG, str(error)
        case _:
            code, message = codes.INTERNAL, f"internal error: {type(error).__name__}."
            pb_utils.Logger.log_error(f"trt_eagle3: a request failed: {type(error).__name__}: {error}")
    message = message.replace("\0", "\\0")  # where it would end in C
    try:
        sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code)), flags=_FINAL)
    except Exception as failure:  # the client may be gone: then there is nobody to tell
        pb_utils.Logger.log_verbose(f"trt_eagle3: a refusal could not be sent: {failure}")
