"""Memory that quantised weights save if they stay packed."""

from __future__ import annotations

from math import prod

from trt_eagle3.checkpoint.experts import matrices
from trt_eagle3.checkpoint.quantised.weight import QuantisedRef
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.config import EngineConfig
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.runtime.backend import backend_named

__all__ = ["packed_savings"]


def packed_savings(spec: TargetCheckpoint, engine: EngineConfig) -> int:
    """Return the bytes that packed weights of the target save against the compute type."""
    backend, item = backend_named(engine.backend), dtype_named(engine.dtype).num_bytes(1)
    refs = matrices(spec.tensors.values())
    quantised = [ref for ref in refs if isinstance(ref, QuantisedRef)]
    kept = [ref for ref in quantised if backend.keeps_packed(engine, ref)]
    return sum(item * prod(ref.shape) - sum(t.num_bytes for t in ref.stored) for ref in kept)
