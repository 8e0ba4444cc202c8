"""QuantisedRef: a quantised weight's place on disk; Quantisation: a checkpoint's claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trt_eagle3.checkpoint.quantised.layout import LAYOUTS, check_layout
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.errors import UserError, clip

__all__ = ["Quantisation", "QuantisedRef", "quantised_ref"]


@dataclass(frozen=True)
class QuantisedRef(TensorRef):
    """A weight [out, in] stored in several tensors.

    The fields of ``TensorRef`` describe its numbers, ``tensors["codes"]``, except ``shape``, which
    is the weight's.

    Attributes:
        format: a key of ``LAYOUTS``.
        block: rows and columns of values that share a scale.
        tensors: role -> place on disk.
        fp8_activations: whether its input is also quantised to FP8 at run time, by row or by the
            columns of a block.
    """

    format: str
    block: tuple[int, int]
    tensors: Mapping[str, TensorRef]
    fp8_activations: bool = False

    @property
    def stored(self) -> tuple[TensorRef, ...]:
        """Every tensor on disk that the weight is read from."""
        return tuple(self.tensors.values())

    @property
    def title(self) -> str:
        """The format and the values that share a scale, for messages."""
        rows, columns = self.block
        whole_rows, whole_columns = rows >= self.shape[0], columns >= self.shape[1]
        shared = f"block {rows} x {columns}" if rows > 1 else f"group {columns}"
        if whole_columns:
            shared = "per tensor" if whole_rows and self.shape[0] > 1 else "per channel"
        zeros = ", zero points" if "zero_point" in self.tensors else ""
        order = ", act order" if "g_idx" in self.tensors else ""
        return f"{LAYOUTS[self.format].title} {shared}{zeros}{order}"


@dataclass(frozen=True)
class Quantisation:
    """A checkpoint's claims about its quantised weights.

    Attributes:
        method: ``quant_method``.
        provenance: the program that wrote it, and the file with that claim.
        activations: description of how activations were quantised in calibration or training.
        excluded: modules that it lists as not quantised.
        weights: title of a format -> number of weights in it.
        kv_scales: canonical name -> place, of scales of keys and values.
        kv_cache: description of its KV cache.
    """

    method: str
    provenance: str
    activations: str = "16-bit"
    excluded: tuple[str, ...] = ()
    weights: Mapping[str, int] = field(default_factory=dict)
    kv_scales: Mapping[str, TensorRef] = field(default_factory=dict)
    kv_cache: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain JSON values."""
        return {
            "method": self.method,
            "provenance": self.provenance,
            "weights": dict(self.weights),
            "activations": self.activations,
            "excluded": list(self.excluded),
            "kv_cache": self.kv_cache,
            "kv_scales": len(self.kv_scales),
        }


def titles(refs: Iterable[TensorRef]) -> dict[str, int]:
    """Count ``refs`` by title, for ``Quantisation.weights``."""
    return dict(Counter(ref.title for ref in refs if isinstance(ref, QuantisedRef)))


def quantised_ref(
    format_name: str,
    shape: tuple[int, int],
    block: tuple[int, int],
    tensors: Mapping[str, TensorRef],
    directory: Path,
    *,
    fp8_activations: bool = False,
) -> QuantisedRef:
    """Create the weight of ``shape`` that ``tensors`` (role -> place) store.

    Raises:
        UserError: they do not form a weight. The message has the tensor, the expected and the got.
    """
    codes = tensors["codes"]
    try:
        told = {role: (ref.dtype, ref.shape) for role, ref in tensors.items()}
        check_layout(format_name, shape, block, told)
    except ValueError as error:
        raise UserError(f"{directory}: {clip(codes.name)}: {error}.") from error
    place = (codes.name, codes.file, codes.offset, codes.num_bytes, codes.dtype)
    return QuantisedRef(*place, shape, format_name, block, tensors, fp8_activations)
