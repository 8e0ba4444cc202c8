"""Producer: the interface of the readers of quantised checkpoints."""

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
    """A reader of one ``quant_method``, created from a checkpoint's claim.

    Attributes:
        suffixes: last parts of the names of its tensors, except ``weight``.
        excluded: patterns of modules that it did not quantise.
    """

    suffixes: frozenset[str]
    excluded: tuple[str, ...]

    def weight(self, module: str, found: Found) -> QuantisedRef:
        """Read the weight of ``module``, by its name in the checkpoint.

        Raises:
            UserError: its tensors contradict each other or the claim.
        """
        ...

    def provenance(self) -> str:
        """Describe the program that wrote the checkpoint, as far as it is known."""
        ...

    def activations(self) -> str:
        """Describe how activations were quantised."""
        ...

    def kv_cache(self) -> str:
        """Describe the claim about the KV cache; empty if there is none."""
        ...


def need(claim: Claim, module: str, found: Found, name: str) -> TensorRef:
    """Return the tensor ``module.name``.

    Raises:
        UserError: it is missing.
    """
    if name not in found:
        raise UserError(
            f"{claim.directory}: {clip(module)}.{name} is missing, required by {claim.place}. Use "
            "the whole checkpoint."
        )
    return found[name]
