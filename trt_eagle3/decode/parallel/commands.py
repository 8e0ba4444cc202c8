"""What rank 0 sends to the other ranks, and what they answer.

A command goes over a connection between the processes. Tensors on the ranks' device follow as one
broadcast of all their bytes, in the order of the device's work: rank 0 does not wait for them.
Tensors on the host (of a CUDA engine) are part of the command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from trt_eagle3.sharding import Shard
from trt_eagle3.spec import StateSpec

__all__ = [
    "Bind",
    "CaptureRows",
    "Close",
    "Commit",
    "Done",
    "Drop",
    "Failed",
    "Forms",
    "HasRoom",
    "Here",
    "Join",
    "MirrorStates",
    "Open",
    "Reset",
    "Run",
    "RunKind",
    "Start",
    "TensorForm",
    "packed",
    "unpacked",
]

RunKind = Literal["run", "prompt", "mixed"]
_ALIGNED = 16  # bytes


@dataclass(frozen=True)
class TensorForm:
    """A tensor of a command.

    Attributes:
        dtype: its name in torch. shape: of the tensor.
        base: shape of what is sent: 1 in dimensions along which the tensor repeats.
        place: offset in the broadcast bytes; or the bytes themselves.
    """

    dtype: str
    shape: tuple[int, ...]
    base: tuple[int, ...]
    place: int | bytes

    @property
    def num_bytes(self) -> int:
        """Bytes that are sent."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return prod(self.base) * dtype.itemsize


Forms = Mapping[str, TensorForm]


@dataclass(frozen=True)
class Start:
    """Become a rank: import what it needs, and answer ``Here``. ``num_threads``: on a CPU."""

    shard: Shard
    device: str
    num_threads: int


@dataclass(frozen=True)
class Join:
    """Meet the other ranks in ``folder``."""

    folder: Path


@dataclass(frozen=True)
class Open:
    """Open this rank's part of a graph as session ``session``; answer ``Done``."""

    session: int
    backend: str
    model: Path
    weights_root: Path
    intermediates: tuple[str, ...]


@dataclass(frozen=True)
class MirrorStates:
    """Allocate layer states like those of rank 0; answer ``Done``.

    ``buffers``: graph name -> the address that names this buffer in ``Bind``.
    """

    states: int
    specs: tuple[StateSpec, ...]
    num_slots: int
    max_sequences: int
    num_snapshots: int
    buffers: Mapping[str, int]


@dataclass(frozen=True)
class Bind:
    """Bind a buffer to an input or output of a session."""

    session: int
    name: str
    buffer: int


@dataclass(frozen=True)
class Run:
    """Run a session. A broadcast of ``num_bytes`` follows.

    ``reduced``: names of the reductions: by output; of ``mixed`` by the index of the part.
    """

    session: int
    kind: RunKind
    parts: tuple[Forms, ...]
    reduced: Mapping[str, str]
    num_bytes: int


@dataclass(frozen=True)
class Commit:
    """Apply ``StateMoves`` to mirrored states, after the last run. A broadcast follows."""

    states: int
    moves: Forms
    num_bytes: int


@dataclass(frozen=True)
class CaptureRows:
    """Capture forwards (``Session.capture_rows``); answer ``Done``.

    ``HasRoom`` follows for each forward.
    """

    session: int
    most: int
    table_len: int


@dataclass(frozen=True)
class HasRoom:
    """Whether rank 0 has room for another captured forward."""

    room: bool


@dataclass(frozen=True)
class Drop:
    """Release sessions and mirrored states."""

    sessions: tuple[int, ...]
    states: tuple[int, ...]


@dataclass(frozen=True)
class Reset:
    """Release everything: the engine has closed; answer ``Done``."""


@dataclass(frozen=True)
class Close:
    """End the process."""


@dataclass(frozen=True)
class Here:
    """The process is ready to ``Join``."""


@dataclass(frozen=True)
class Done:
    """A command that rank 0 waits for is done."""


@dataclass(frozen=True)
class Failed:
    """A command failed, and the process ends; ``reason`` in one line."""

    reason: str


def packed(
    parts: Sequence[Mapping[str, Tensor]], device: torch.device
) -> tuple[tuple[Forms, ...], Tensor]:
    """Return the forms of tensors, and the bytes of those on ``device`` for one broadcast."""
    sent: list[tuple[int, Tensor]] = []
    found: list[dict[str, TensorForm]] = []
    size = 0
    for part in parts:
        forms = {}
        for name, tensor in part.items():
            base = _base(tensor)
            here = base.device.type == device.type
            place: int | bytes = size if here else _bytes(base).numpy().tobytes()
            dtype = str(base.dtype).removeprefix("torch.")
            forms[name] = TensorForm(dtype, tuple(tensor.shape), tuple(base.shape), place)
            if here:
                sent.append((size, _bytes(base)))
                size += -(-base.nbytes // _ALIGNED) * _ALIGNED
        found.append(forms)
    data = torch.empty(size, dtype=torch.uint8, device=device)
    if sent:
        there = [data[start : start + len(raw)] for start, raw in sent]
        torch._foreach_copy_(there, [raw for _, raw in sent])
    return tuple(found), data


def unpacked(forms: Forms, data: Tensor) -> dict[str, Tensor]:
    """Return the tensors of ``forms``; ``data``: the broadcast bytes, which they share."""
    found = {}
    for name, form in forms.items():
        if isinstance(form.place, bytes):
            raw = torch.frombuffer(bytearray(form.place), dtype=torch.uint8) if form.place else None
            raw = torch.empty(0, dtype=torch.uint8) if raw is None else raw
        else:
            raw = data[form.place : form.place + form.num_bytes]
        values = raw.view(getattr(torch, form.dtype)).view(form.base)
        found[name] = values.expand(form.shape)
    return found


def _base(tensor: Tensor) -> Tensor:
    """Return ``tensor`` without its repetitions."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    repeats = [stride == 0 and size > 1 for stride, size in pairs]
    for dim, repeated in enumerate(repeats):
        if repeated:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor.contiguous()


def _bytes(tensor: Tensor) -> Tensor:
    # a single repeated element counts as contiguous, with any stride
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
