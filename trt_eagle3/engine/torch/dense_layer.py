"""A layer's dense products after attention, and the next layer's q, k and v, as one step.

For few rows one launch computes all of them (``capi.dense_layer_int4``, ``dense_layer_fp8``), and
memory is never idle between two of them. More rows are computed by the single kernels, as without
this step.

Set ``TRT_EAGLE3_DENSE_LAYER=0`` to compare with the single kernels.

Shapes: n rows.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trt_eagle3.engine import capi
from trt_eagle3.engine.torch.fusion import Step, gemm
from trt_eagle3.engine.torch.packed import Fp8Weight, Int4Weight, PackedWeight

__all__ = ["DENSE_LAYER", "with_dense_layers"]

DENSE_LAYER = "DenseLayer"
"""Op of the joined step."""
_VARIABLE = "TRT_EAGLE3_DENSE_LAYER"
_GROUP = 128  # columns of an INT4 scale
_MAX_HIDDEN = 8192


def with_dense_layers(
    steps: Sequence[Step],
    constants: Mapping[str, Any],
    kept: Collection[str],
    device: torch.device,
) -> list[Step]:
    """Return ``steps`` with each layer's dense products joined, if their weights have one form that
    the kernels take. Values in ``kept`` are still computed.
    """
    if os.environ.get(_VARIABLE) == "0":
        return list(steps)
    readers: dict[str, list[int]] = {}
    for i, step in enumerate(steps):
        for name in step.inputs:
            readers.setdefault(name, []).append(i)
    graph = _Graph(steps, constants, kept, readers)
    made: dict[int, Step | None] = {}
    barrier = torch.zeros(1, dtype=torch.int32, device=device)  # launches follow one another
    for i, step in enumerate(steps):
        chain = graph.chain(i) if _is_product(step) else None
        if chain is not None:
            made |= dict.fromkeys(chain)
            made[i] = _joined([steps[j] for j in chain], barrier)
    found = (made.get(i, step) for i, step in enumerate(steps))
    return [step for step in found if step is not None]


def _joined(chain: Sequence[Step], barrier: Tensor) -> Step:
    """Join o, norm, gate_up, silu and down, and the next norm and qkv if they are there."""
    o, norm, gate_up, _, down, *more = chain
    inputs = [o.inputs[0], norm.inputs[2], o.inputs[1], norm.inputs[1], gate_up.inputs[1]]
    inputs.append(down.inputs[1])
    outputs = [norm.outputs[1]]
    for step in more:
        inputs.append(step.inputs[1])
    last = [more[1].outputs[0], more[0].outputs[1]] if more else [down.outputs[0]]
    attributes = {**norm.attributes, "barrier": barrier}
    return Step(_dense_layer, tuple(inputs), (*last, *outputs), attributes, op=DENSE_LAYER)


@dataclass(frozen=True)
class _Graph:
    """The steps to search; see ``with_dense_layers``. ``readers``: value -> positions of steps."""

    steps: Sequence[Step]
    constants: Mapping[str, Any]
    kept: Collection[str]
    readers: Mapping[str, Sequence[int]]

    def chain(self, start: int) -> list[int] | None:
        """Return the positions of a layer's steps, the product o at ``start`` first; None if it is
        no such layer.
        """
        found = [start]
        for is_next in (_is_norm, _is_product, _is_silu_mul, _is_product):
            if not self._extend(found, is_next):
                return None
        if not self._takes(found):
            return None
        longer = [*found]
        is_longer = all(self._extend(longer, is_next) for is_next in (_is_norm, _is_product))
        return longer if is_longer and self._continues(longer) and self._takes(longer) else found

    def _extend(self, found: list[int], is_next: Callable[[Step], bool]) -> bool:
        """Add the only reader of the last step's first output, if it is the next step's kind."""
        name = self.steps[found[-1]].outputs[0]
        readers = self.readers.get(name, ())
        if len(readers) != 1 or name in self.kept:
            return False
        reader = self.steps[readers[0]]
        if reader.inputs[0] != name or not is_next(reader):
            return False
        found.append(readers[0])
        return True

    def _continues(self, found: Sequence[int]) -> bool:
        """Whether the second norm adds the first one's sum, by the same rule."""
        first, second = self.steps[found[1]], self.steps[found[5]]
        return second.inputs[2] == first.outputs[1] and first.attributes == second.attributes

    def _takes(self, found: Sequence[int]) -> bool:
        """Whether the kernels take the weights, and the steps can be computed where o is."""
        steps = [self.steps[i] for i in found]
        weights = [self.constants.get(s.inputs[1]) for s in steps if _is_product(s)]
        norms = [s for s in steps if _is_norm(s)]
        later = {name for step in self.steps[found[0] :] for name in step.outputs}
        return (
            all(isinstance(self.constants.get(s.inputs[1]), Tensor) for s in norms)
            and norms[0].inputs[2] not in later
            and _have_one_form(weights)
        )


def _is_product(step: Step) -> bool:
    return step.function is gemm and len(step.inputs) == 2


def _is_norm(step: Step) -> bool:
    return step.op == "AddRmsNorm" and len(step.inputs) == 3


def _is_silu_mul(step: Step) -> bool:
    return step.op == "SiluMul"


def _have_one_form(weights: Sequence[Any]) -> bool:
    """Whether one launch takes the weights of o, gate_up, down and perhaps qkv."""
    hidden = len(weights[0].codes) if isinstance(weights[0], PackedWeight) else _MAX_HIDDEN + 1
    if hidden > _MAX_HIDDEN or hidden % _GROUP:
        return False
    if all(isinstance(w, Int4Weight) for w in weights):
        groups = (w.codes.shape[1] * 8 // w.scale.shape[1] for w in weights)
        return set(groups) == {_GROUP} and len({w.scale.dtype for w in weights}) == 1
    return all(isinstance(w, Fp8Weight) and not w.takes_bytes for w in weights)


def _dense_layer(
    x: Tensor,
    residual: Tensor,
    o: PackedWeight,
    norm: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    next_norm: Tensor | None = None,
    qkv: PackedWeight | None = None,
    *,
    barrier: Tensor,
    epsilon: float,
    weight_offset: float = 0.0,
) -> tuple[Tensor, ...]:
    """Compute a layer after attention ``x``.

    Returns:
        q, k and v of the next layer, the stream after this layer, and the stream between attention
        and MLP. Without a next layer: the product of ``down``, and the stream before the MLP.
    """
    weights = (o, gate_up, down) if qkv is None else (o, gate_up, down, qkv)
    norms = (norm,) if next_norm is None else (norm, next_norm)
    add_norm = partial(capi.add_rms_norm, epsilon=epsilon, weight_offset=weight_offset)
    if len(x) <= capi.MAX_DENSE_LAYER_ROWS and residual.dtype == x.dtype == norm.dtype:
        with contextlib.suppress(NotImplementedError):  # before Hopper; rows that do not fit
            form = {"epsilon": epsilon, "weight_offset": weight_offset, "prefetch_safe": True}
            rows = _launcher(weights)(x, residual, norms, barrier=barrier, **form)
            found = (rows.total, rows.middle)
            return found if rows.y is None else (rows.y, *found)
    y, middle = add_norm(o.linear(x), norm, residual)
    product = down.linear(capi.silu_mul(gate_up.linear(y)))
    assert middle is not None
    if next_norm is None or qkv is None:
        return product, middle
    y, total = add_norm(product, next_norm, middle)
    assert total is not None
    return qkv.linear(y), total, middle


def _launcher(weights: Sequence[PackedWeight]) -> Any:
    """Return the kernel of the weights' form, with them."""
    if isinstance(weights[0], Int4Weight):
        int4 = [(w.codes, w.scale, w.zero_point) for w in weights if isinstance(w, Int4Weight)]
        return partial(capi.dense_layer_int4, weights=int4)
    fp8 = [(w.codes, w.scale) for w in weights if isinstance(w, Fp8Weight)]
    return partial(capi.dense_layer_fp8, weights=fp8)
