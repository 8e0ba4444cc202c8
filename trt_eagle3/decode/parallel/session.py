"""ParallelSession: a target graph that all ranks run together, as a session of rank 0.

Decoding is not aware of ranks: it calls this session as any other. Each call sends the other ranks
the command and its inputs. Then every rank runs its part of the graph. Their sessions take the same
calls in the same order, so they capture the same CUDA graphs at the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from trt_eagle3.decode.parallel.commands import (
    Bind,
    CaptureRows,
    HasRoom,
    RunKind,
)
from trt_eagle3.engine.runtime.session import Capabilities, Reduction, Session
from trt_eagle3.spec import StateSpec

__all__ = ["Followers", "ParallelSession"]

T = TypeVar("T")


class Followers(Protocol):
    """The other ranks, as a session needs them (``leader.Leader``)."""

    def send(self, command: object) -> None:
        """Send a command to every rank.

        Raises:
            RankFailedError: a rank has failed.
        """
        ...

    def send_run(
        self,
        session: int,
        kind: RunKind,
        parts: Sequence[Mapping[str, Tensor]],
        reduced: Mapping[str, str],
    ) -> None:
        """Send the command ``Run`` and its tensors."""
        ...

    def together(self, work: Callable[[], T]) -> T:
        """Do this rank's part of a command.

        Raises:
            RankFailedError: it failed, or another rank did.
        """
        ...

    def wait(self) -> None:
        """Wait until every rank has answered ``Done``."""
        ...


class ParallelSession(Session):
    """Rank 0's part of a graph, ``local``, and the parts of its ``followers``."""

    def __init__(self, number: int, local: Session, followers: Followers) -> None:
        """``number``: of this session, in commands."""
        self._number = number
        self._local = local
        self._followers = followers

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The states of one rank. Every rank's have the same shapes."""
        return self._local.states

    @property
    def capabilities(self) -> Capabilities:
        """Those of the local session."""
        return self._local.capabilities

    def bind(self, name: str, tensor: Tensor) -> None:
        """Bind ``tensor``, a buffer of mirrored states, and its mirror images."""
        self._followers.send(Bind(self._number, name, tensor.data_ptr()))
        self._local.bind(name, tensor)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Implement ``Session.run``."""
        return self._together("run", [inputs], {}, lambda: self._local.run(inputs))

    def run_reduced(
        self, inputs: Mapping[str, Tensor], reduced: Mapping[str, Reduction]
    ) -> dict[str, Tensor]:
        """Implement ``Session.run_reduced``; only rank 0 computes the reductions."""
        names = {output: reduction.name for output, reduction in reduced.items()}
        return self._together(
            "run", [inputs], names, lambda: self._local.run_reduced(inputs, reduced)
        )

    def run_prompt(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Implement ``Session.run_prompt``."""
        return self._together("prompt", [inputs], {}, lambda: self._local.run_prompt(inputs))

    def run_mixed(
        self, parts: Sequence[Mapping[str, Tensor]], reduced: Sequence[Reduction | None]
    ) -> list[dict[str, Tensor]]:
        """Implement ``Session.run_mixed``."""
        names = {str(i): r.name for i, r in enumerate(reduced) if r is not None}
        return self._together("mixed", parts, names, lambda: self._local.run_mixed(parts, reduced))

    def capture_rows(self, most: int, table_len: int, has_room: Callable[[], bool]) -> int:
        """Implement ``Session.capture_rows``. The memory of rank 0, which also holds the draft,
        limits all ranks.
        """

        def shared() -> bool:
            room = has_room()
            self._followers.send(HasRoom(room))
            return room

        self._followers.send(CaptureRows(self._number, most, table_len))
        count = self._followers.together(lambda: self._local.capture_rows(most, table_len, shared))
        self._followers.wait()
        return count

    def _together(
        self,
        kind: RunKind,
        parts: Sequence[Mapping[str, Tensor]],
        reduced: Mapping[str, str],
        work: Callable[[], T],
    ) -> T:
        for part in parts:  # an error before the command leaves all ranks as they are
            self._local.check(part)
        self._followers.send_run(self._number, kind, parts, reduced)
        return self._followers.together(work)
