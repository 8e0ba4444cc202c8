"""Checks of an FP8 KV cache: the stored rows, and attention over them.

Both start from the engine's own q, k and v of a layer, so only the cache lies between.
Shapes: n rows of a sequence, Hq / Hkv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from trt_eagle3.checkpoint.kv_scales import KVScales
from trt_eagle3.parity.checks.check_recorder import Measurements
from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.metrics import RowErrors, row_errors
from trt_eagle3.parity.ops import full_float32
from trt_eagle3.parity.record.fp8_attention import Fp8Attention
from trt_eagle3.parity.reference.fp8_kv import nearest_codes, numbers_of
from trt_eagle3.spec import AttentionSpec

__all__ = ["check_attention", "check_rows", "lacks_fp8"]

_CLOSED = "this backend does not expose tensors inside its graphs"


def lacks_fp8(e: Evidence) -> str:
    """Return why there is no FP8 cache to check; empty if there is one."""
    if e.engine.record.config.engine.kv_dtype != "fp8":
        return "keys and values are cached in the compute type"
    several = e.engine.bundle.tensor_parallel > 1
    return "several ranks hold the heads; run validate on one device" if several else ""


def check_rows(e: Evidence, m: Measurements) -> None:
    """Compare every number in the cache of an answer with its row and the scales of its head."""
    for k, spec, scales, found in _layers(e, m):
        for kind, by_head in zip("kv", scales, strict=True):
            rows = found.tensors[f"layers.{k}.self_attn.{kind}"].unflatten(1, (-1, spec.head_dim))
            codes = found.codes[f"{kind}_cache.{k}"]
            wrong = (_values(nearest_codes(rows, by_head)) != _values(codes)).flatten(1).any(dim=1)
            row = int(wrong.nonzero()[0]) if wrong.any() else None
            m.count(rows=len(wrong))
            name = f"{kind}_cache.{k}"
            m.add(float(wrong.sum()), found.case, name, row, compared=len(wrong))


def check_attention(e: Evidence, m: Measurements) -> None:
    """Compare attention of every layer with float32 attention over the numbers in its cache."""
    for k, spec, scales, found in _layers(e, m):
        prefix = f"layers.{k}.self_attn."
        q = found.tensors[f"{prefix}q"].float().unflatten(1, (-1, spec.head_dim))
        keys, values = (
            numbers_of(found.codes[f"{kind}_cache.{k}"], by_head)
            for kind, by_head in zip("kv", scales, strict=True)
        )
        expected = _attend(q, keys, values, spec)
        errors = row_errors(found.tensors[f"{prefix}out"], expected)
        m.add_rows(RowErrors(found.case, f"{prefix}out", errors))


def _values(codes: Tensor) -> Tensor:
    """Return the numbers of FP8 codes, so that both zeros are equal."""
    return numbers_of(codes, torch.ones(codes.shape[1]))


def _layers(
    e: Evidence, m: Measurements
) -> Iterator[tuple[int, AttentionSpec, tuple[Tensor, Tensor], Fp8Attention]]:
    """Yield layer, geometry, the bundle's scales of keys and values [Hkv], and the record."""
    found = e.record.fp8_attention
    if found is None:
        m.skip(_CLOSED)
        return
    for k, attention in e.spec.attention_layers:
        scales = e.engine.record.kv_scales.get(k, KVScales())
        of_keys, of_values = scales.by_head(attention.num_kv_heads, k)
        yield k, attention, (torch.tensor(of_keys), torch.tensor(of_values)), found


@full_float32()
def _attend(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
    """[n, Hq * D]: causal attention of every row."""
    scale = spec.rope.attention_scaling**2 / spec.head_dim**0.5
    group = spec.num_heads // spec.num_kv_heads
    by_head = [x.repeat_interleave(group, dim=1) for x in (keys, values)]
    heads, k, v = (x.transpose(0, 1)[None] for x in (q, *by_head))
    out = functional.scaled_dot_product_attention(heads, k, v, is_causal=True, scale=scale)
    return out[0].transpose(0, 1).flatten(1)
