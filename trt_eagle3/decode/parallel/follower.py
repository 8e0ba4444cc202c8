"""The process of a rank other than 0: it runs its part of the target as rank 0 commands.

It holds no requests and no tokens. It ends with the connection to rank 0.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from trt_eagle3.decode.memory.state import LayerStates, StateMoves, layer_states
from trt_eagle3.decode.parallel.commands import (
    Bind,
    CaptureRows,
    Close,
    Commit,
    Done,
    Drop,
    Failed,
    HasRoom,
    Here,
    Join,
    MirrorStates,
    Open,
    Reset,
    Run,
    Start,
    unpacked,
)
from trt_eagle3.engine.runtime.collectives import Collectives, open_collectives
from trt_eagle3.engine.runtime.session import Reduction, Session, open_session
from trt_eagle3.errors import TrtEagle3Error, clip

__all__ = ["Follower", "main"]

_log = logging.getLogger("trt_eagle3")


def main(descriptor: int) -> None:
    """Serve the connection until its end.

    ``descriptor``: of the connection; its first message is ``Start``.
    """
    for sent in (signal.SIGTERM, signal.SIGINT):  # rank 0 ends this process
        signal.signal(sent, lambda *_: None)
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    commands: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, commands), daemon=True).start()
    start = commands.get()
    assert isinstance(start, Start), start
    try:
        torch.set_num_threads(start.num_threads)
        if start.device == "cuda":
            torch.cuda.set_device(start.shard.rank)
            torch.zeros(1, device="cuda")  # what takes long comes before the ranks meet
        connection.send(Here())
        join = commands.get()
        assert isinstance(join, Join), join
        collectives = open_collectives(start.shard, join.folder, start.device)
        connection.send(Done())
        Follower(collectives, commands.get, connection.send).run()
    except BaseException as error:
        connection.send(Failed(_reason(error)))
        connection.close()
        os._exit(1)
    os._exit(0)  # nothing is left to clean up; rank 0 may have left the group already


def _read(connection: Connection, commands: queue.SimpleQueue[object]) -> None:
    """Queue commands; end the process with the connection, even during an exchange."""
    try:
        while True:
            commands.put(connection.recv())
    except BaseException:  # rank 0 is gone
        os._exit(0)


def _reason(error: BaseException) -> str:
    if isinstance(error, TrtEagle3Error):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "its GPU has not enough memory. Lower limits.memory_fraction, or use more GPUs."
    _log.error("a rank failed", exc_info=error)
    return f"{type(error).__name__}: {clip(error)}"


class Follower:
    """The sessions and the states of a rank."""

    def __init__(
        self,
        collectives: Collectives,
        receive: Callable[[], object],
        answer: Callable[[object], None],
    ) -> None:
        """Take commands from ``receive`` until ``Close``."""
        self._collectives = collectives
        self._receive = receive
        self._answer = answer
        self._sessions: dict[int, Session] = {}
        self._states: dict[int, tuple[LayerStates, Mapping[int, Tensor]]] = {}
        self._outputs: Mapping[str, Tensor] = {}

    @torch.inference_mode()
    def run(self) -> None:
        """Carry out commands until ``Close``."""
        while not isinstance(command := self._receive(), Close):
            self._carry_out(command)

    def _carry_out(self, command: object) -> None:
        match command:
            case Run():
                self._run(command)
            case Commit():
                self._commit(command)
            case Bind():
                self._bind(command)
            case Open():
                self._sessions[command.session] = open_session(
                    command.backend,
                    command.model,
                    command.weights_root,
                    command.intermediates,
                    collectives=self._collectives,
                )
                self._answer(Done())
            case MirrorStates():
                self._mirror(command)
                self._answer(Done())
            case CaptureRows():
                session = self._sessions[command.session]
                session.capture_rows(command.most, command.table_len, self._has_room)
                self._answer(Done())
            case Drop():
                self._outputs = {}
                for number in command.sessions:
                    del self._sessions[number]
                for number in command.states:
                    del self._states[number]
            case Reset():
                self._reset()
                self._answer(Done())
            case _:
                raise AssertionError(f"unknown command {command}")

    def _reset(self) -> None:
        on_cuda = self._collectives.device.type == "cuda"
        if on_cuda:
            torch.cuda.synchronize()  # rank 0's launches need the last ones of this rank
        self._sessions.clear()
        self._states.clear()
        self._outputs = {}
        gc.collect()
        if on_cuda:
            torch.cuda.empty_cache()

    def _run(self, command: Run) -> None:
        data = self._received(command.num_bytes)
        parts = [unpacked(forms, data) for forms in command.parts]
        session, reduced = self._sessions[command.session], command.reduced
        self._outputs = {}
        if command.kind == "mixed":
            by_part = [_nothing(reduced.get(str(i))) for i in range(len(parts))]
            session.run_mixed(parts, by_part)
        elif command.kind == "prompt":
            self._outputs = session.run_prompt(parts[0])
        else:
            reductions = {output: Reduction(name, _first) for output, name in reduced.items()}
            self._outputs = session.run_reduced(parts[0], reductions)

    def _commit(self, command: Commit) -> None:
        tensors = unpacked(command.moves, self._received(command.num_bytes))
        states, _ = self._states[command.states]
        states.take(self._outputs)
        states.apply(StateMoves(**tensors))

    def _mirror(self, command: MirrorStates) -> None:
        states = layer_states(
            command.specs,
            command.num_slots,
            self._collectives.device,
            command.max_sequences,
            command.num_snapshots,
        )
        own = dict(states.bindings())
        buffers = {address: own[name] for name, address in command.buffers.items()}
        self._states[command.states] = (states, buffers)

    def _bind(self, command: Bind) -> None:
        found: Any = next(
            buffers[command.buffer]
            for _, buffers in self._states.values()
            if command.buffer in buffers
        )
        self._sessions[command.session].bind(command.name, found)

    def _received(self, num_bytes: int) -> Tensor:
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self._collectives.device)
        if num_bytes:
            self._collectives.broadcast(data)
        return data

    def _has_room(self) -> bool:
        message = self._receive()
        assert isinstance(message, HasRoom), message
        return message.room


def _nothing(name: str | None) -> Reduction | None:
    return None if name is None else Reduction(name, _first)


def _first(output: Tensor) -> Tensor:
    """Take the place of a reduction, whose result only rank 0 needs."""
    return output[..., :1]
