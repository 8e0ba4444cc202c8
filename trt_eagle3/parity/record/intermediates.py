"""Intermediates: tensors inside the engine's graphs, for the forwards of its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from trt_eagle3.engine.runtime.backend import backend_named
from trt_eagle3.parity.record.answers import RecordedAnswer
from trt_eagle3.parity.record.engine import RecordingEngine, replay
from trt_eagle3.parity.record.trace import outputs_of

__all__ = ["layer_intermediates", "tensor_names"]

_TENSORS = ("output_pre_deepstack", "output")


def layer_intermediates(
    engine: RecordingEngine,
    bound: Mapping[str, Tensor],
    answers: Sequence[RecordedAnswer],
    progress: Callable[[], object],
) -> list[dict[str, Tensor]]:
    """Run each answer's forwards again over the caches ``bound``, and return layer outputs.

    Returns by answer the outputs [n, H] by name.
    """
    known = tensor_names(engine, "target")
    layers = range(engine.spec.num_layers)
    wanted = [f"layers.{k}.{name}" for k in layers for name in _TENSORS]
    names = [name for name in wanted if name in known]
    if not names:
        return [{} for _ in answers]
    session = engine.open_graph("target", names)
    found = []
    for answer in answers:
        forwards = answer.autoregressive_forwards
        outputs = replay(session, forwards, bound)
        found.append({name: outputs_of(forwards, outputs, name) for name in names})
        progress()
    return found


def tensor_names(engine: RecordingEngine, graph: str) -> frozenset[str]:
    """Return names of the inner tensors that a session of ``graph`` can return."""
    return backend_named(engine.record.engine.backend).intermediates(engine.path / graph)
