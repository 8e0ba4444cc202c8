"""What a planted fault is, and what many of them are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tests.parity.planting import MANIFEST, SPEC, Planted, Seam, Tensors
from trt_eagle3.spec import LayerSpec, NormSpec, RopeSpec, TargetSpec

STEP = "target.layer_steps"
MAX_TOKENS, MORE_TOKENS = 12, 20


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        check: the first that fails. also: others that must fail with it. tensor: what the diagnosis
            names.
        looks: stages beside the plain ones that must run for it (``conftest.OPTIONAL``).
        bundle: the bundle that it is planted in: a quantised one, or one with a block draft; empty:
            that of the tiny pair.
        max_tokens: of an answer, so many that it shows.
    """

    what: str
    check: str
    tensor: str
    plant: Callable[[Planted], None]
    also: tuple[str, ...] = ()
    looks: tuple[str, ...] = ()
    bundle: str = ""
    max_tokens: int = MAX_TOKENS


def layers_of(change: Callable[[LayerSpec], LayerSpec]) -> TargetSpec:
    return dataclasses.replace(SPEC, layers=tuple(map(change, SPEC.layers)))


def eps_of(eps: float) -> TargetSpec:
    """Every norm of the decoder with another epsilon."""
    norm = NormSpec(eps)

    def change(layer: LayerSpec) -> LayerSpec:
        mixer = dataclasses.replace(layer.mixer, qk_norm=norm)
        return dataclasses.replace(layer, mixer=mixer, norm=norm)

    return dataclasses.replace(layers_of(change), norm=norm)


def rope_of(
    layout: Any = "interleaved", sections: tuple[int, ...] = (12, 10, 10), base: float = 5e6
) -> TargetSpec:
    rope = RopeSpec.plain(64, base, layout, sections)
    return layers_of(
        lambda layer: dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, rope=rope))
    )


def swapped(left: str, right: str) -> TargetSpec:
    tensors = {**SPEC.tensors, left: SPEC.tensors[right], right: SPEC.tensors[left]}
    return dataclasses.replace(SPEC, tensors=tensors)


def reweigh(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Planted], None]:
    return lambda p: p.reweigh("target", SPEC.tensors[name], change)


def reweigh_draft(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Planted], None]:
    return lambda p: p.reweigh("draft", MANIFEST.tensors[name], change)


def draft_of(graph: str = "draft", **changes: Any) -> Callable[[Planted], None]:
    return lambda p: p.rebuild(graph, draft=dataclasses.replace(MANIFEST, **changes))


def given(
    side: str, graph: str, change: Callable[[Seam, Tensors], Tensors]
) -> Callable[[Planted], None]:
    return lambda p: getattr(p, side).update({graph: Seam(None, given=change)})


def decoding(inputs: Tensors) -> bool:
    """A forward over rows after a prompt: prompts here are prefilled in one forward."""
    return int(inputs["past_lengths"][0]) > 0


def moved(inputs: Tensors, name: str, change: Callable[[Tensor], Tensor]) -> Tensors:
    return {**inputs, name: change(inputs[name])}


def rewrite(name: str, old: str, new: str) -> Callable[[Planted], None]:
    def plant(p: Planted) -> None:
        text = (p.bundle / name).read_text()
        assert old in text
        p.write(name, text.replace(old, new).encode())

    return plant


def gives(graph: str, change: Callable[[Tensors, Tensors], Tensors]) -> Callable[[Planted], None]:
    """The graph gives something else: ``change(what it was given, what it gave)``."""

    def gave(_: Seam, inputs: Any, outputs: Tensors) -> Tensors:
        return change(dict(inputs), dict(outputs))

    return lambda p: p.inside.update({graph: Seam(None, gave=gave)})  # type: ignore[arg-type]


def row_spoilt(name: str, axis: int, more_than: int = 20) -> Callable[[Tensors, Tensors], Tensors]:
    """Row 10 of ``more_than`` so many of an output is half again as large."""

    def change(_: Tensors, outputs: Tensors) -> Tensors:
        values = outputs[name].clone()
        if values.shape[axis] > more_than:
            values.select(axis, 10).mul_(1.5)
        return {**outputs, name: values}

    return change
