"""Rounding: what the reference's own modules lose when they compute in the engine's dtype.

Run only if a tensor leaves its tolerance. Some targets amplify rounding more than those on which
the tolerances were measured. transformers' modules then compute the same rows twice, layer by
layer: in the engine's dtype and in a wider one (float32; for float32 float64).
Shapes: n rows of a sequence, A tokens of an answer, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from trt_eagle3.parity.metrics import row_errors
from trt_eagle3.parity.record.trace import embeds_of
from trt_eagle3.parity.reference.expected import ExpectedAnswer, encode_images, input_embeds
from trt_eagle3.parity.reference.routing import Routes
from trt_eagle3.parity.reference.target import (
    Rope,
    TargetLayer,
    TargetReference,
    VisionStates,
    add_visual_level,
)

__all__ = ["AnswerRounding", "RoundingReference"]


@dataclass
class AnswerRounding:
    """Rounding errors of one answer.

    Attributes:
        steps: errors float64 [n] of each layer alone, from the engine's own input.
        outputs: errors float64 [n] of each layer's output, end to end.
        narrow, wide: logits float32 [A, V] in either dtype.
    """

    steps: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    narrow: Tensor = field(default_factory=lambda: torch.empty(0))
    wide: Tensor = field(default_factory=lambda: torch.empty(0))


class _Stream:
    """One answer on its way through a reference in one dtype."""

    def __init__(self, reference: TargetReference, e: ExpectedAnswer) -> None:
        self._reference, self._e = reference, e
        self._vision: VisionStates | None = encode_images(reference, e) if e.vision else None
        self._rope: Rope = reference.rope(e.positions[:-1].T)
        self.hidden = input_embeds(reference, e, self._vision)

    def alone(
        self, layer: TargetLayer, given: Tensor, experts: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run one layer on ``given``, without any visual level.

        Returns the output [n, H] and the experts int64 [n, k] that it used: ``experts`` if they
        are known; None of a dense layer.
        """
        routes = None if experts is None else Routes(experts, torch.inf)
        with layer.routed(routes) as choices:
            found = layer(given.to(self._reference.device, self._reference.dtype), self._rope)
        return found, next((choice.taken for choice in choices), None)

    def advance(self, layer: TargetLayer, experts: Tensor | None) -> Tensor | None:
        """Set ``hidden`` to the layer's output, end to end; return the experts as ``alone``."""
        found, taken = self.alone(layer, self.hidden, experts)
        levels = self._vision.visual_levels if self._vision else torch.empty(0, 0, 0)
        rows = self._e.answer.visual_rows
        self.hidden = add_visual_level(found, levels, layer.index, rows)
        return taken

    def logits(self) -> Tensor:
        rows = self.hidden[self._e.answer.prompt_len - 1 :]
        return self._reference.head(self._reference.norm(rows)).float()


class RoundingReference:
    """The references ``narrow``, in the engine's dtype, and ``wide``; loaded on first use."""

    def __init__(
        self,
        narrow: Callable[[], TargetReference],
        wide: Callable[[], TargetReference],
        expected: Sequence[ExpectedAnswer],
    ) -> None:
        self._made, self._expected = (narrow, wide), expected

    @cached_property
    def answers(self) -> dict[str, AnswerRounding]:
        """Rounding errors by case."""
        narrow, wide = (make() for make in self._made)
        found = [AnswerRounding() for _ in self._expected]
        streams = [(_Stream(narrow, e), _Stream(wide, e)) for e in self._expected]
        for layers in zip(narrow.layers(), wide.layers(), strict=True):
            for e, pair, rounding in zip(self._expected, streams, found, strict=True):
                _run_layer(e, pair, layers, rounding)
        for pair, rounding in zip(streams, found, strict=True):
            rounding.narrow, rounding.wide = (stream.logits() for stream in pair)
        return {e.answer.name: r for e, r in zip(self._expected, found, strict=True)}


def _run_layer(
    e: ExpectedAnswer,
    streams: tuple[_Stream, _Stream],
    layers: tuple[TargetLayer, TargetLayer],
    rounding: AnswerRounding,
) -> None:
    """Run one layer in both dtypes with the same experts.

    These are the engine's experts, or those of the wider dtype if the engine's are unknown: a
    different choice of experts is no rounding of a tensor.
    """
    (narrow, wide), (narrow_layer, wide_layer) = streams, layers
    k = wide_layer.index
    experts = e.experts.get(k)
    if f"layers.{k}.output" in e.intermediates:
        before = e.intermediates[f"layers.{k - 1}.output"] if k else None
        given = embeds_of(e.answer.autoregressive_forwards) if before is None else before
        theirs, taken = wide.alone(wide_layer, given, experts)
        ours, _ = narrow.alone(narrow_layer, given, taken)
        rounding.steps[k] = row_errors(ours, theirs)
    taken = wide.advance(wide_layer, experts)
    narrow.advance(narrow_layer, taken)
    rounding.outputs[k] = row_errors(narrow.hidden, wide.hidden)
