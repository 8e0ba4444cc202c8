"""Fp8Attention: inputs and outputs of an engine's attention over FP8 keys and values.

Shapes: n rows of a sequence, Hq / Hkv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.parity.record.answers import RecordedAnswer
from trt_eagle3.parity.record.engine import RecordingEngine, replay
from trt_eagle3.parity.record.intermediates import tensor_names
from trt_eagle3.parity.record.trace import outputs_of, rows_of

__all__ = ["Fp8Attention", "record_fp8_attention"]

_TENSORS = ("q", "k", "v", "out")


@dataclass(frozen=True)
class Fp8Attention:
    """Attention of one answer, in every attention layer.

    Attributes:
        tensors: q and out [n, Hq * D], k and v [n, Hkv * D], by graph name.
        codes: uint8 [n, Hkv, D], what the caches hold afterwards, by state.
    """

    case: str
    tensors: Mapping[str, Tensor]
    codes: Mapping[str, Tensor]


def record_fp8_attention(
    engine: RecordingEngine, bound: Mapping[str, Tensor], answer: RecordedAnswer
) -> Fp8Attention | None:
    """Run the answer's forwards again over the caches ``bound``.

    None if the caches are not FP8, if the backend does not expose tensors inside its graphs, or if
    several ranks hold the heads.
    """
    if engine.bundle.tensor_parallel > 1:
        return None
    known = tensor_names(engine, "target")
    layers = [k for k, _ in engine.spec.attention_layers]
    names = [f"layers.{k}.self_attn.{name}" for k in layers for name in _TENSORS]
    if engine.record.config.engine.kv_dtype != "fp8" or not known.issuperset(names):
        return None
    forwards = answer.autoregressive_forwards
    outputs = replay(engine.open_graph("target", names), forwards, bound)
    tensors = {name: outputs_of(forwards, outputs, name) for name in names}
    rows, last = rows_of(forwards[-1]), forwards[-1].inputs
    count, size = rows.start + rows.count, engine.page_size
    row = torch.arange(count)
    slots = last["page_table"][rows.batch].long()[row // size] * size + row % size
    caches = {f"{kind}_cache.{k}" for k in layers for kind in "kv"}
    codes = {name: bound[name].cpu()[slots] for name in caches}
    return Fp8Attention(answer.case.name, tensors, codes)
