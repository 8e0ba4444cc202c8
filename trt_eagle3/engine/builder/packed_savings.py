"""Memory that quantised weights save if they stay packed."""

from __future__ import annotations

from math import prod

from trt_eagle3.checkpoint.experts import ExpertsRef, matrices
from trt_eagle3.checkpoint.quantised.weight import QuantisedRef
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.config import EngineConfig
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.runtime.backend import backend_named

__all__ = ["packed_savings"]


def packed_savings(spec: TargetCheckpoint, engine: EngineConfig) -> int:
    """Return the bytes that packed weights of the target save against the compute type."""
    backend, item = backend_named(engine.backend), dtype_named(engine.dtype).num_bytes(1)
    saved = 0
    for tensor in spec.tensors.values():
        experts = isinstance(tensor, ExpertsRef)
        for ref in matrices([tensor]):
            if isinstance(ref, QuantisedRef) and backend.keeps_packed(engine, ref, experts=experts):
                saved += item * prod(ref.shape) - sum(t.num_bytes for t in ref.stored)
    return saved
