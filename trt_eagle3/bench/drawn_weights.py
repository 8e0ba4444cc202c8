"""Random weights like a trained model's in size, the same in every session that asks for a
tensor of that name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import onnx
import torch
from torch import Tensor

from trt_eagle3.dtype import dtype_of_onnx
from trt_eagle3.graph.trt_export import TrtExport

__all__ = ["draw_weight", "read_drawn", "write_drawn"]

# of the vision tower's scores: spread over several units, so that its attention is no mean of all
_SHARPNESS = 3.0


def draw_weight(name: str, shape: Sequence[int], device: str = "cuda") -> Tensor:
    """bfloat16 [*shape]: norms near one, biases near zero, matrices of unit gain."""
    generator = torch.Generator(device).manual_seed(crc32(name.encode()))
    drawn = torch.randn(tuple(shape), generator=generator, device=device)
    if len(shape) == 1:
        return (0.1 * drawn if name.endswith(".bias") else 1 + 0.1 * drawn).bfloat16()
    drawn *= shape[-1] ** -0.5
    if name.endswith(".attn.qkv.weight"):
        drawn[: shape[0] // 3] *= _SHARPNESS
    return drawn.bfloat16()


def read_drawn(proto: onnx.TensorProto, root: Path, device: str = "cuda") -> Tensor:
    """Initializer of a graph of ours, drawn where it is a weight: a ``read_weight`` of
    ``TorchSession``.
    """
    del root
    if proto.data_location != onnx.TensorProto.EXTERNAL:
        return torch.from_numpy(onnx.numpy_helper.to_array(proto).copy())
    return draw_weight(_tensor_name(proto.name), proto.dims, device).to(
        dtype_of_onnx(proto.data_type).torch
    )


def write_drawn(ready: TrtExport, file: Path, device: str = "cuda") -> None:
    """The weights file of an exported graph, each weight made of the tensors that ``read_drawn``
    gives.
    """
    with file.open("wb") as stream:
        for weight in ready.weights:
            stream.seek(ready.offsets[weight.name])
            for part in weight.parts:
                values = (
                    draw_weight(_tensor_name(part.name), part.shape, device).float() * part.scale
                )
                typed = values.to(dtype_of_onnx(weight.dtype).torch).flatten()
                stream.write(typed.view(torch.uint8).cpu().numpy().tobytes())


def _tensor_name(name: str) -> str:
    """A graph knows a tensor by its file too."""
    return name.rpartition(":")[2]
