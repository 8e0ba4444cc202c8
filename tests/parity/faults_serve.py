"""Faults that only serving meets: of steps that are launched before the host has the last tokens,
and of what is kept between requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tests.parity.fault import MORE_TOKENS, Fault
from tests.parity.planting import Planted
from trt_eagle3.decode.request.encoder_cache import EncoderCache
from trt_eagle3.decode.request.prompt import Vision
from trt_eagle3.decode.step import stepper


def _swapped_roots(p: Planted) -> None:
    true = stepper._roots_after

    def roots_after(*args: Any, **options: Any) -> Tensor:
        return true(*args, **options).roll(1)

    p.fixed_shapes = True
    p.patch.setattr(stepper, "_roots_after", roots_after)


def _never_ahead(p: Planted) -> None:
    p.fixed_shapes = True
    p.patch.setattr(stepper.Stepper, "_forward_after", lambda *_: None)
    p.patch.setattr(stepper.Stepper, "_launch_ahead", lambda *_: None)


def _one_image(p: Planted) -> None:
    true = EncoderCache.get
    p.patch.setattr(EncoderCache, "put", _put_first(EncoderCache.put))
    p.patch.setattr(EncoderCache, "get", lambda self, _, client: true(self, b"", client))


def _put_first(true: Any) -> Any:
    def put(self: EncoderCache, _: bytes, vision: Vision, client: str) -> None:
        true(self, b"", vision, client)

    return put


SERVE: Mapping[str, Fault] = {
    "roots of another sequence": Fault(
        "a step that is launched ahead begins with the last token of another sequence",
        "serve.tokens",
        "tokens",
        _swapped_roots,
        looks=("serve",),
        max_tokens=MORE_TOKENS,
    ),
    "never ahead": Fault(
        "no step is launched ahead of the host, so that nothing is proved",
        "serve.tokens",
        "tokens",
        _never_ahead,
        looks=("serve",),
    ),
    "one image for all": Fault(
        "kept embeddings of one image are found for every image of its size",
        "serve.tokens",
        "tokens",
        _one_image,
        looks=("serve",),
        max_tokens=MORE_TOKENS,
    ),
}
