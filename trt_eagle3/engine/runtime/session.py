"""Session: a loaded graph that can run. It is the only interface to an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trt_eagle3.engine.runtime.backend import RankBackend, backend_named
from trt_eagle3.engine.runtime.collectives import Collectives
from trt_eagle3.errors import UserError
from trt_eagle3.host_copy import to_device
from trt_eagle3.spec import StateSpec

__all__ = [
    "Capabilities",
    "Continuation",
    "Reduction",
    "Session",
    "check_names",
    "open_session",
    "with_picked_rows",
]


@dataclass(frozen=True)
class Reduction:
    """Reduce an output to a smaller tensor, without waiting for the device.

    Attributes:
        name: identifies the function in captured graphs: equal names must mean equal functions.
        function: takes the output, in the type in which it was computed.
    """

    name: str
    function: Callable[[Tensor], Tensor]

    def __call__(self, output: Tensor) -> Tensor:
        """Apply ``function`` to ``output``."""
        return self.function(output)


@dataclass(frozen=True)
class Continuation:
    """Work on a graph's outputs, without waiting for the device.

    Attributes:
        name: identifies the function in captured graphs: equal names must mean equal functions.
        function: takes the outputs and further tensors, both by name; returns tensors by name.
    """

    name: str
    function: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class Capabilities:
    """Optional features of a session that its callers must check beforehand.

    Attributes:
        reduces: ``run_reduced`` computes its functions as parts of the graph, so the outputs that
            they read are never returned.
        mixes: ``run_mixed`` can be called.
    """

    reduces: bool = False
    mixes: bool = False


class Session(ABC):
    """A loaded graph over named tensors.

    Inputs and outputs have the graph's names (``docs/architecture.md``). A tensor given to ``bind``
    is used for that input or output in every later run. Its memory is read or written in place, and
    the caller owns it.

    A backend must implement ``states``, ``bind`` and ``run``. The other methods work for every
    session. A backend may override them with faster ones, and reports in ``capabilities`` what
    callers must know.
    """

    @property
    @abstractmethod
    def states(self) -> tuple[StateSpec, ...]:
        """Layer states that the graph keeps between runs, in the order of the layers."""

    @property
    def capabilities(self) -> Capabilities:
        """Optional features of this session; constant during its life."""
        return Capabilities()

    def check(self, inputs: Mapping[str, Tensor]) -> None:
        """Check the inputs of a run, as far as this can be done before it.

        Raises:
            UserError: as for ``run``.
        """
        del inputs

    @abstractmethod
    def bind(self, name: str, tensor: Tensor) -> None:
        """Use ``tensor`` as the static buffer of input or output ``name``."""

    @abstractmethod
    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run once; return the outputs that have no static buffer.

        The outputs may be the session's own memory, which its next run of the same shapes
        overwrites (as with a captured CUDA graph). A caller that keeps one longer must copy it.

        Raises:
            UserError: an input is missing, unknown, or of another type or shape than the graph's.
        """

    def run_reduced(
        self, inputs: Mapping[str, Tensor], reduced: Mapping[str, Reduction]
    ) -> dict[str, Tensor]:
        """Run once as ``run`` does, but replace each output named in ``reduced`` by what its
        function returns.
        """
        outputs = self.run(inputs)
        return {name: reduced[name](t) if name in reduced else t for name, t in outputs.items()}

    def run_then(
        self, inputs: Mapping[str, Tensor], then: Continuation, further: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Run once as ``run`` does, and continue with ``then``; return what that returns.

        ``further``: the tensors of ``then``, on the session's device.
        """
        return then.function(self.run(inputs), further)

    def run_prompt(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run a target or draft graph over rows of prompts: ``tree_mask`` is lower-triangular.

        ``features_out`` has only the rows in ``logit_rows``: [B, R, Hd]. An override need not
        compute the other rows.
        """
        return with_picked_rows(self.run(inputs), inputs["logit_rows"])

    def run_mixed(
        self, parts: Sequence[Mapping[str, Tensor]], reduced: Sequence[Reduction | None]
    ) -> list[dict[str, Tensor]]:
        """Run ``parts``, rows of prompts and of decoding sequences, as one forward; return the
        outputs of each part. Only a session that ``mixes`` implements this.

        Args:
            parts: each has the inputs of ``run``. reduced: the reduction of each part's logits;
                None keeps them.
        """
        del parts, reduced
        raise AssertionError(f"{type(self).__name__} does not mix")

    def capture_rows(self, most: int, table_len: int, has_room: Callable[[], bool]) -> int:
        """Capture forwards of up to ``most`` rows, of prompts and of sequences in the same batch.

        Capturing stops when ``has_room`` returns False. Returns the number of row counts that have
        graphs; 0 if nothing is captured.

        ``table_len``: pages in a sequence's page table.
        """
        del most, table_len, has_room
        return 0


def with_picked_rows(outputs: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Return ``outputs``, with only the rows ``rows [B, R]`` of ``features_out [B, S, Hd]``."""
    features = outputs.get("features_out")
    if features is None:
        return dict(outputs)
    index = to_device(rows, features.device).to(torch.int64)[..., None]
    picked = features.gather(1, index.expand(-1, -1, features.shape[2]))
    return {**outputs, "features_out": picked}


def check_names(inputs: Collection[str], known: Collection[str], bound: Collection[str]) -> None:
    """Check that ``inputs`` has every input that is not bound, and no unknown or bound one.

    Args:
        known: inputs of the graph. bound: inputs and outputs with a static buffer.
    Raises:
        UserError: an input is missing, unknown or bound; the message names it.
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
    collectives: Collectives | None = None,
) -> Session:
    """Load the graph at ``model`` with ``backend``; its weights are under ``weights_root``.

    ``run`` also returns the intermediate tensors that ``intermediates`` names
    (``layers.3.output``). ``Backend.intermediates`` lists the available ones.

    ``collectives``: open this rank's part of a tensor-parallel target; for a ``RankBackend`` only.
    """
    chosen = backend_named(backend)
    if collectives is None:
        return chosen.open(model, weights_root, intermediates, device)
    assert isinstance(chosen, RankBackend), f"{backend} has no ranks"
    return chosen.open_rank(model, weights_root, intermediates, collectives)
