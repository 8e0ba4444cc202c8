"""Session: a graph that can run. All that the rest of the program knows of an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from trt_eagle3.engine.backend import backend_named
from trt_eagle3.errors import UserError
from trt_eagle3.host_copy import to_device
from trt_eagle3.spec import StateSpec

__all__ = [
    "CapturingSession",
    "MixedSession",
    "PromptSession",
    "ReducingSession",
    "Reduction",
    "Session",
    "capture_rows",
    "check_names",
    "open_session",
    "run_prompt",
    "run_reduced",
    "with_picked_rows",
]


Reduction = Callable[[Tensor], Tensor]
"""Makes a smaller tensor of an output, without a wait for the device."""


@runtime_checkable
class ReducingSession(Protocol):
    """A session that computes functions of outputs within its graph."""

    def run_reduced(
        self, inputs: Mapping[str, Tensor], reduced: Mapping[str, Reduction]
    ) -> dict[str, Tensor]:
        """Run once, as ``run_reduced`` of this module says."""
        ...


@runtime_checkable
class PromptSession(Protocol):
    """A session that leaves out what nobody reads of a prompt's chunk."""

    def run_prompt(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run once, as ``run_prompt`` of this module says."""
        ...


@runtime_checkable
class MixedSession(Protocol):
    """A session that runs rows of prompts and of decoding sequences in one forward."""

    @property
    def mixes(self) -> bool:
        """Whether it does so with its graph."""
        ...

    def run_mixed(
        self, parts: Sequence[Mapping[str, Tensor]], reduced: Sequence[Reduction | None]
    ) -> list[dict[str, Tensor]]:
        """Run ``parts``, each with the inputs of ``Session.run``, as one forward; returns the
        outputs of each. ``reduced``: what to make of each part's logits, None: nothing.
        """
        ...


@runtime_checkable
class CapturingSession(Protocol):
    """A session that captures forwards of prompts ahead."""

    def capture_rows(self, most: int, table_len: int, has_room: Callable[[], bool]) -> int:
        """Capture what can be of forwards of up to ``most`` rows, of prompts and what runs beside
        them, while ``has_room``; how many numbers of rows there are graphs of. ``table_len``: pages
        in a sequence's page table.
        """
        ...


@runtime_checkable
class Session(Protocol):
    """A loaded graph over named tensors.

    Inputs and outputs are called as the graph calls them (``docs/architecture.md``). A tensor given
    to ``bind`` stands for that input or output in every later run: its memory is read or written in
    place, and the caller keeps it.
    """

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """What the graph's layers keep between runs, in the order of the layers."""
        ...

    def bind(self, name: str, tensor: Tensor) -> None:
        """Let ``tensor`` be the static buffer of input or output ``name``."""
        ...

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run once; returns the outputs that have no static buffer.

        They may be the session's own memory, which its next run of the same shapes overwrites (a
        captured CUDA graph has such outputs): who keeps one longer keeps a copy.

        Raises:
            UserError: an input is missing, unknown, or of another type or shape than the graph's.
        """
        ...


def run_reduced(
    session: Session, inputs: Mapping[str, Tensor], reduced: Mapping[str, Reduction]
) -> dict[str, Tensor]:
    """``session.run``, and of the outputs named in ``reduced`` only what their functions make of
    them.

    A session that has a ``run_reduced`` of its own never returns those outputs, nor keeps memory
    for them.
    """
    if isinstance(session, ReducingSession):
        return session.run_reduced(inputs, reduced)
    outputs = session.run(inputs)
    return {name: reduced[name](t) if name in reduced else t for name, t in outputs.items()}


def run_prompt(session: Session, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``session.run`` of a target or draft graph over rows of prompts: ``tree_mask`` is
    lower-triangular.

    ``features_out`` is of the rows in ``logit_rows`` alone: [B, R, Hd]. A session that has a
    ``run_prompt`` of its own need not compute the others.
    """
    if isinstance(session, PromptSession):
        return session.run_prompt(inputs)
    return with_picked_rows(session.run(inputs), inputs["logit_rows"])


def with_picked_rows(outputs: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """``outputs``, of whose ``features_out [B, S, Hd]`` only ``rows [B, R]`` are wanted."""
    features = outputs.get("features_out")
    if features is None:
        return dict(outputs)
    index = to_device(rows, features.device).to(torch.int64)[..., None]
    picked = features.gather(1, index.expand(-1, -1, features.shape[2]))
    return {**outputs, "features_out": picked}


def capture_rows(session: Session, most: int, table_len: int, has_room: Callable[[], bool]) -> None:
    """As ``CapturingSession`` says, where ``session`` is one."""
    if isinstance(session, CapturingSession):
        session.capture_rows(most, table_len, has_room)


def check_names(inputs: Collection[str], known: Collection[str], bound: Collection[str]) -> None:
    """Refuse ``inputs`` that lack one, or that have one which is unknown or has a static buffer.

    Args:
        known: inputs of the graph. bound: inputs and outputs with a static buffer.
    Raises:
        UserError: naming it.
    """
    missing = [name for name in known if name not in inputs and name not in bound]
    if missing:
        raise UserError(f"{', '.join(missing)}: input not given")
    for name in inputs:
        if name not in known:
            raise UserError(f"{name}: the graph has no such input; it has {', '.join(known)}")
        if name in bound:
            raise UserError(f"{name}: has a static buffer; write there, or give it no buffer")


def open_session(
    backend: str,
    model: Path,
    weights_root: Path,
    intermediates: Sequence[str] = (),
    device: str = "cpu",
) -> Session:
    """Load the graph at ``model``, whose weights lie under ``weights_root``, with ``backend``.

    ``intermediates`` names intermediate tensors of the graph (``layers.3.output``) that ``run``
    shall return too; ``Backend.intermediates`` lists the available ones.
    """
    return backend_named(backend).open(model, weights_root, intermediates, device)
