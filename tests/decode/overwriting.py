"""An engine whose graphs overwrite their outputs with the next run of the same shapes, as
captured CUDA graphs do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from trt_eagle3 import LLM, Request
from trt_eagle3.decode.loaded_bundle import LoadedBundle, open_graph_of
from trt_eagle3.engine.runtime.session import Capabilities, Reduction, Session
from trt_eagle3.engine.torch.capture.whole import shapes_of
from trt_eagle3.spec import StateSpec

__all__ = ["OverwritingSession", "ask_together", "overwriting_llm"]


class OverwritingSession(Session):
    """Another session, whose outputs are static."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._outputs: dict[object, dict[str, Tensor]] = {}

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return self._session.states

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(reduces=True, mixes=self._session.capabilities.mixes)

    def bind(self, name: str, tensor: Tensor) -> None:
        self._session.bind(name, tensor)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.run_reduced(inputs, {})

    def run_reduced(
        self, inputs: Mapping[str, Tensor], reduced: Mapping[str, Reduction]
    ) -> dict[str, Tensor]:
        found = self._session.run_reduced(inputs, reduced)
        static = self._outputs.setdefault(
            (shapes_of(inputs), *(f.name for f in reduced.values())),
            {name: tensor.clone() for name, tensor in found.items()},
        )
        for name, tensor in found.items():
            static[name].copy_(tensor)
        return dict(static)

    def run_mixed(
        self, parts: Sequence[Mapping[str, Tensor]], reduced: Sequence[Reduction | None]
    ) -> list[dict[str, Tensor]]:
        return self._session.run_mixed(parts, reduced)


def overwriting_llm(path: Path) -> LLM:
    """An LLM over such sessions, whose shapes come again as on CUDA."""
    return LLM(replace(LoadedBundle.open(path, sessions=_open), fixed_shapes=True))


def _open(bundle: LoadedBundle, graph: str, intermediates: Sequence[str]) -> Session:
    return OverwritingSession(open_graph_of(bundle, graph, intermediates))


def ask_together(engine: LLM, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    """Tokens of requests that one pass admits together, as far as they fit in a batch."""
    answers = engine._started().submit_together(requests, engine)
    return [answer.finish().token_ids for answer in answers]
