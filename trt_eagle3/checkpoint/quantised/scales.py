"""Check the values of quantised weights' small tensors: scales and group indices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from trt_eagle3.checkpoint.quantised.layout import grid_of
from trt_eagle3.checkpoint.quantised.weight import QuantisedRef
from trt_eagle3.checkpoint.tensor_file import read_integers
from trt_eagle3.checkpoint.tensor_index import TensorRef, read_tensor
from trt_eagle3.errors import UserError, clip

__all__ = ["checked", "check_scale"]

_SCALES = ("scale", "global_scale", "input_scale")


def checked(ref: QuantisedRef, directory: Path) -> QuantisedRef:
    """Check ``ref``, and drop a ``g_idx`` that only repeats ``block``.

    Raises:
        UserError: a scale is zero, negative or not a number, or a group index is out of range.
    """
    for role in _SCALES:
        if role in ref.tensors:
            # NVFP4's scale of 16 values underflows to 0 if all 16 are close to 0
            check_scale(ref.tensors[role], directory, zero=ref.tensors[role].dtype == "F8_E4M3")
    index = ref.tensors.get("g_idx")
    if index is None:
        return ref
    groups = read_integers(index)
    count = grid_of((ref.shape[0], ref.shape[1]), ref.block)[1]
    if groups.min() < 0 or groups.max() >= count:
        raise UserError(
            f"{directory}: {clip(index.name)}: expected groups 0 to {count - 1}, got "
            f"{groups.min()} to {groups.max()}. Download it again."
        )
    if not np.array_equal(groups, np.arange(len(groups)) // ref.block[1]):
        return ref
    return replace(ref, tensors={r: t for r, t in ref.tensors.items() if r != "g_idx"})


def check_scale(ref: TensorRef, directory: Path, *, zero: bool = False) -> None:
    """Check that a scale tensor holds only positive numbers.

    Raises:
        UserError: naming the tensor and the first invalid value.
    """
    values = read_tensor(ref).float().flatten()
    good = (values >= 0 if zero else values > 0) & (values < float("inf"))
    if not bool(good.all()):
        raise UserError(
            f"{directory}: {clip(ref.name)}: expected scales above 0, got "
            f"{float(values[~good][0]):g}. Its quantisation failed, or the file is damaged: "
            "quantise or download it again."
        )
