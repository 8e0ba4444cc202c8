"""Dequantise weights to float32, by the definition of each format, whole tensors at a time.

Shares no code with the engine, so a fault in the engine's unpacking or scaling shows here.
Facts: transformers ``finegrained_fp8``, compressed-tensors ``pack_quantized``, AutoAWQ
``packing_utils``, GPTQModel ``TorchLinear``, ModelOpt ``qtensor``. Shapes: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trt_eagle3.checkpoint.experts import ExpertsRef
from trt_eagle3.checkpoint.quantised.weight import QuantisedRef
from trt_eagle3.checkpoint.tensor_index import TensorRef, read_tensor

__all__ = ["read_all", "read_values"]

Stored = Mapping[str, Tensor]
Words = NDArray[np.uint32]


def read_values(ref: TensorRef) -> Tensor:
    """Load the weight at ``ref``: as stored, or float32 [N, K] if quantised; experts [E, N, K].

    Raises:
        UserError: a file is cut short.
    """
    if isinstance(ref, ExpertsRef):
        return _experts(ref)
    if not isinstance(ref, QuantisedRef):
        return read_tensor(ref)
    stored = {role: read_tensor(tensor) for role, tensor in ref.tensors.items()}
    return _VALUES[ref.format](ref, stored)


def read_all(
    refs: Mapping[str, TensorRef], dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor]:
    """Load weights by name to ``device`` in ``dtype``. Integers stay on the CPU as they are.

    Raises:
        UserError: as for ``read_values``.
    """
    read = {name: read_values(ref) for name, ref in refs.items()}
    return {n: w.to(device, dtype) if w.is_floating_point() else w for n, w in read.items()}


def _experts(ref: ExpertsRef) -> Tensor:
    """Load the experts, each [N, K]."""
    read = [read_values(part) for part in ref.parts]
    if ref.transposed:
        read = [part.T for part in read]
    made = torch.empty(ref.shape, dtype=read[0].dtype)
    for expert, rows in enumerate(torch.cat(read).split(ref.shape[1])):
        made[expert] = rows
    return made


def _by_block(ref: QuantisedRef, stored: Stored) -> Tensor:
    """Multiply every block of the codes by its scale."""
    values, scale = stored["codes"].float(), stored["scale"].float()
    rows, columns = ref.block
    grid = (-(-ref.shape[0] // rows), -(-ref.shape[1] // columns))

    def at_each_code(of_blocks: Tensor) -> Tensor:
        wide = of_blocks.reshape(grid).repeat_interleave(columns, dim=1)[:, : ref.shape[1]]
        return wide.repeat_interleave(rows, dim=0)[: ref.shape[0]]

    if "zero_point" in stored:
        values -= at_each_code(stored["zero_point"])
    values *= at_each_code(scale)
    return values


def _nibbles(words: Tensor, order: tuple[int, ...] = tuple(range(8))) -> NDArray[np.int64]:
    """[..., 8 w] of int32 [..., w]; ``order``: index of the value in each nibble."""
    raw: Words = words.contiguous().numpy().view(np.uint32)
    found = np.empty((*raw.shape, 8), dtype=np.int64)
    for place, value in enumerate(order):
        found[..., value] = (raw // np.uint32(16**place)) % np.uint32(16)
    return found.reshape(*raw.shape[:-1], -1)


def _bytes(words: Tensor) -> NDArray[np.int64]:
    """[..., 4 w] of int32 [..., w]."""
    return words.contiguous().numpy().view(np.uint8).astype(np.int64)


def _grouped(
    ref: QuantisedRef,
    stored: Stored,
    codes: NDArray[np.int64],
    zeros: NDArray[np.int64],
    scales: Tensor,
) -> Tensor:
    """By group: (codes [N, K] - zeros [N, G]) * scales [N, G] of the columns' group."""
    index = stored.get("g_idx")
    groups = index if index is not None else torch.arange(ref.shape[1]) // ref.block[1]
    values = torch.full(ref.shape, torch.nan)
    for group in range(scales.shape[1]):
        columns = (groups == group).nonzero().flatten()
        whole = torch.from_numpy(codes[:, columns.numpy()] - zeros[:, [group]])
        values[:, columns] = whole.float() * scales[:, [group]].float()
    return values


def _pack_quantized(ref: QuantisedRef, stored: Stored) -> Tensor:
    wide = ref.format == "int8_packed"
    unpack = _bytes if wide else _nibbles
    rows, columns = ref.shape
    zeros = np.full(stored["scale"].shape, 128 if wide else 8, dtype=np.int64)
    if "zero_point" in stored:
        zeros = unpack(stored["zero_point"].T)[:, :rows].T
    codes = unpack(stored["codes"])[:, :columns]
    return _grouped(ref, stored, codes, zeros, stored["scale"])


def _awq(ref: QuantisedRef, stored: Stored) -> Tensor:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    codes, zeros = (_nibbles(stored[role], order).T for role in ("codes", "zero_point"))
    return _grouped(ref, stored, codes, zeros, stored["scale"].T)


def _gptq(ref: QuantisedRef, stored: Stored) -> Tensor:
    zeros = stored["zero_point"].long()
    if ref.format == "gptq":
        zeros = zeros + 0x11111111
    codes = _nibbles(stored["codes"].T)
    return _grouped(ref, stored, codes, _nibbles(zeros.int()).T, stored["scale"].T)


def _nvfp4(ref: QuantisedRef, stored: Stored) -> Tensor:
    whole = stored["global_scale"].float().reshape(())
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.empty(ref.shape[0], 2 * stored["codes"].shape[1])
    for half, shift in enumerate((1, 16)):
        code = (stored["codes"] // shift % 16).long()
        values[:, half::2] = torch.where(code >= 8, -sizes[code % 8], sizes[code % 8])
    values = values[:, : ref.shape[1]]
    for j in range(stored["scale"].shape[1]):
        scale = stored["scale"][:, j, None].float()
        scale = scale / whole if ref.format == "nvfp4_divided" else scale * whole
        values[:, 16 * j : 16 * j + 16] *= scale
    return values


_VALUES: Mapping[str, Callable[[QuantisedRef, Stored], Tensor]] = {
    "awq": _awq,
    "fp8": _by_block,
    "gptq": _gptq,
    "gptq_v2": _gptq,
    "int4_packed": _pack_quantized,
    "int8": _by_block,
    "int8_packed": _pack_quantized,
    "nvfp4": _nvfp4,
    "nvfp4_divided": _nvfp4,
}
