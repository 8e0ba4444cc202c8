"""Session: a graph that can run. All that the rest of the program knows of an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trt_eagle3.engine.runtime.backend import backend_named
from trt_eagle3.errors import UserError
from trt_eagle3.host_copy import to_device
from trt_eagle3.spec import StateSpec

__all__ = [
    "Capabilities",
    "Reduction",
    "Session",
    "check_names",
    "open_session",
    "with_picked_rows",
]


@dataclass(frozen=True)
class Reduction:
    """Makes a smaller tensor of an output, without a wait for the device.

    Attributes:
        name: tells captured graphs apart: one name, one function.
        function: of the output, in the type in which it was computed.
    """

    name: str
    function: Callable[[Tensor], Tensor]

    def __call__(self, output: Tensor) -> Tensor:
        """``function`` of ``output``."""
        return self.function(output)


@dataclass(frozen=True)
class Capabilities:
    """What a session can do that its callers must know beforehand.

    Attributes:
        reduces: ``run_reduced`` computes its functions as parts of the graph, so that the outputs
            they read are never returned.
        mixes: ``run_mixed`` can be called.
    """

    reduces: bool = False
    mixes: bool = False


class Session(ABC):
    """A loaded graph over named tensors.

    Inputs and outputs are called as the graph calls them (``docs/architecture.md``). A tensor given
    to ``bind`` stands for that input or output in every later run: its memory is read or written in
    place, and the caller keeps it.

    A backend must implement ``states``, ``bind`` and ``run``. The other methods work for every
    session; a backend overrides those that it can do better, and names in ``capabilities`` what
    callers must know of that.
    """

    @property
    @abstractmethod
    def states(self) -> tuple[StateSpec, ...]:
        """What the graph's layers keep between runs, in the order of the layers."""

    @property
    def capabilities(self) -> Capabilities:
        """What this session can do with its graph; the same for as long as it lives."""
        return Capabilities()

    @abstractmethod
    def bind(self, name: str, tensor: Tensor) -> None:
        """Let ``tensor`` be the static buffer of input or output ``name``."""

    @abstractmethod
    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run once; returns the outputs that have no static buffer.

        They may be the session's own memory, which its next run of the same shapes overwrites (a
        captured CUDA graph has such outputs). A caller that keeps one longer keeps a copy.

        Raises:
            UserError: an input is missing, unknown, or of another type or shape than the graph's.
        """

    def run_reduced(
        self, inputs: Mapping[str, Tensor], reduced: Mapping[str, Reduction]
    ) -> dict[str, Tensor]:
        """``run``, but return of the outputs named in ``reduced`` what their functions make of
        them.
        """
        outputs = self.run(inputs)
        return {name: reduced[name](t) if name in reduced else t for name, t in outputs.items()}

    def run_prompt(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``run`` a target or draft graph over rows of prompts: ``tree_mask`` is lower-triangular.

        ``features_out`` has the rows in ``logit_rows`` alone: [B, R, Hd]. A session that overrides
        this need not compute the others.
        """
        return with_picked_rows(self.run(inputs), inputs["logit_rows"])

    def run_mixed(
        self, parts: Sequence[Mapping[str, Tensor]], reduced: Sequence[Reduction | None]
    ) -> list[dict[str, Tensor]]:
        """Run ``parts``, rows of prompts and of decoding sequences, as one forward; returns the
        outputs of each part. Only a session that ``mixes`` has this.

        Args:
            parts: each has the inputs of ``run``. reduced: what to make of each part's logits;
                None: nothing.
        """
        del parts, reduced
        raise AssertionError(f"{type(self).__name__} does not mix")

    def capture_rows(self, most: int, table_len: int, has_room: Callable[[], bool]) -> int:
        """Capture forwards of up to ``most`` rows, of prompts and of what runs beside them, while
        ``has_room``; returns for how many row counts there are graphs. 0 where nothing is captured.

        ``table_len``: pages in a sequence's page table.
        """
        del most, table_len, has_room
        return 0


def with_picked_rows(outputs: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """``outputs``, with the rows ``rows [B, R]`` of ``features_out [B, S, Hd]`` alone."""
    features = outputs.get("features_out")
    if features is None:
        return dict(outputs)
    index = to_device(rows, features.device).to(torch.int64)[..., None]
    picked = features.gather(1, index.expand(-1, -1, features.shape[2]))
    return {**outputs, "features_out": picked}


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
