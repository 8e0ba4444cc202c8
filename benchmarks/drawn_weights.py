"""Random weights of a trained model's size; a tensor's name determines its values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import click
import torch
from torch import Tensor

from trt_eagle3.errors import EnvironmentMissingError
from trt_eagle3.graph.trt_export import TrtExport
from trt_eagle3.graph.weights import WeightExpr

__all__ = ["device_option", "draw_weight", "read_drawn", "write_drawn"]

# of the vision tower's scores: they spread over several units, so that attention is no mean
_SHARPNESS = 3.0


def _checked(_context: click.Context, _option: click.Parameter, device: str) -> str:
    if device == "cuda" and not torch.cuda.is_available():
        raise EnvironmentMissingError("--device cuda: torch sees no CUDA GPU. Use --device cpu.")
    return device


device_option = click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    default="cuda",
    show_default=True,
    callback=_checked,
    help="Where weights are drawn.",
)


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


def read_drawn(expr: WeightExpr, root: Path, device: torch.device) -> Tensor:
    """Draw a weight of one of our graphs: a ``read_weight`` of ``TorchSession``."""
    del root
    parts = (draw_weight(p.name, p.shape, str(device)).float() * p.scale for p in expr.parts)
    return torch.cat(list(parts)).to(expr.dtype.torch).view(expr.shape)


def write_drawn(ready: TrtExport, file: Path, device: str = "cuda") -> None:
    """Write the weights file of an exported graph, from the tensors of ``read_drawn``."""
    with file.open("wb") as stream:
        for name, expr in ready.weights.items():
            stream.seek(ready.offsets[name])
            drawn = read_drawn(expr, Path(), torch.device(device)).flatten()
            stream.write(drawn.view(torch.uint8).cpu().numpy().tobytes())
