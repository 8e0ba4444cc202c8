"""What a producer's reader is: it says which tensors are its own, and makes weights of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from trt_eagle3.checkpoint.quantised.claim import Claim
from trt_eagle3.checkpoint.quantised.weight import QuantisedRef
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.errors import UserError, clip

__all__ = ["Found", "Producer", "need"]

Found = Mapping[str, TensorRef]
"""The tensors of one module, by the last part of their names."""


class Producer(Protocol):
    """A reader of one ``quant_method``, made of a checkpoint's claim.

    Attributes:
        suffixes: last parts of the names of its tensors, ``weight`` aside.
        excluded: patterns of modules that it left alone.
    """

    suffixes: frozenset[str]
    excluded: tuple[str, ...]

    def weight(self, module: str, found: Found) -> QuantisedRef:
        """The weight of ``module``, by its name in the checkpoint.

        Raises:
            UserError: its tensors contradict each other or the claim.
        """
        ...

    def provenance(self) -> str:
        """Who wrote it, as far as it says so."""
        ...

    def activations(self) -> str:
        """How activations were quantised, in words."""
        ...

    def kv_cache(self) -> str:
        """What it says of the KV cache; empty where nothing."""
        ...


def need(claim: Claim, module: str, found: Found, name: str) -> TensorRef:
    """The tensor ``module.name``.

    Raises:
        UserError: it is missing.
    """
    if name not in found:
        raise UserError(
            f"{claim.directory}: {clip(module)}.{name} is missing; {claim.place} promises it. Use "
            "the whole checkpoint."
        )
    return found[name]
