"""Estimate the peak memory of a calibration on its device, before it begins.

All values are float32. Shapes: N outputs and K channels of a weight, H hidden, I inner width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from trt_eagle3.calibration.activations import MAX_SAMPLES, inputs_of_layer
from trt_eagle3.calibration.prompts import CalibrationPrompts
from trt_eagle3.calibration.search import MAX_OUTPUTS
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.engine.builder.calibration import expert_names
from trt_eagle3.engine.builder.weight_quantiser import is_quantised_here
from trt_eagle3.spec import LayerSpec, SparseMoe

__all__ = ["Product", "products_of_layer", "reckon_bytes"]

_PATCHES_AT_ONCE = 16384
_INVERSES = 3  # matrices of an inversion in memory at once: damped products, factor, inverse
_ROUNDED = 5  # copies of a weight: scaled, left, values, transposed, codes
_TRIED = 4  # copies of the weights in one search of scales
_GPU_INVERSES, _GPU_TRIED = 5, 7  # with the copies of cuSOLVER, and of rounding in large parts


@dataclass(frozen=True)
class Product:
    """Weights [N, K] of one input.

    Attributes:
        count: number of experts with such weights, else 1.
        share: share of all rows that each multiplies.
    """

    outputs: tuple[int, ...]
    width: int
    count: int = 1
    share: float = 1.0


def products_of_layer(spec: TargetCheckpoint, index: int) -> Iterator[Product]:
    """Yield the products of a layer by input, in the order in which they are quantised."""
    layer = spec.layers[index]
    for weights in inputs_of_layer(layer, index).values():
        shapes = [spec.tensors[n].shape for n in weights if n not in expert_names(index)]
        if shapes:
            yield Product(tuple(n for n, _ in shapes), shapes[0][1])
    if isinstance(layer.mlp, SparseMoe):
        share = layer.mlp.top_k / layer.mlp.num_experts
        for name in expert_names(index):
            count, outputs, width = spec.tensors[name].shape
            yield Product((outputs,), width, count, share)


def reckon_bytes(
    spec: TargetCheckpoint, prompts: CalibrationPrompts, device: str, *, weights: bool
) -> int:
    """Return the peak bytes on ``device``; ``weights``: whether weights are quantised."""
    kept = prompts.num_tokens + (1 + spec.num_visual_levels) * prompts.num_visual_tokens
    layers = range(spec.num_layers)
    most = max(_layer_values(spec, i, prompts, device, weights=weights) for i in layers)
    return 4 * (kept * spec.hidden_size + max(most, _tower_values(spec, prompts)))


def _tower_values(spec: TargetCheckpoint, prompts: CalibrationPrompts) -> int:
    """Return values in the tower for the patches that it encodes at once."""
    if not spec.vision or not prompts.num_visual_tokens:
        return 0
    patches = prompts.num_visual_tokens * spec.vision.spatial_merge_size**2
    width = 8 * spec.vision.hidden_size + 2 * spec.vision.intermediate_size
    return min(patches, _PATCHES_AT_ONCE) * width


def _layer_values(
    spec: TargetCheckpoint, index: int, prompts: CalibrationPrompts, device: str, *, weights: bool
) -> int:
    """Return a layer's weights, kept inputs, and the values of its largest step."""
    names = [n for n in spec.tensors if n.startswith(f"layers.{index}.")]
    own = sum(prod(spec.tensors[n].shape) for n in names)
    forward = max(len(x.token_ids) for x in prompts.inputs) * _row_values(spec, index)
    if not weights:
        return own + forward
    layer, products = spec.layers[index], list(products_of_layer(spec, index))
    shared = [p for p in products if p.count == 1]
    widths = [p.width for p in shared]
    if isinstance(layer.mlp, SparseMoe):  # the input rows of the experts are kept
        if not layer.mlp.shared_expert_width:
            widths.append(spec.hidden_size)
        own += prompts.num_tokens * spec.hidden_size
    own += sum(k**2 + min(MAX_SAMPLES, prompts.num_tokens) * k for k in widths)
    if device == "cpu":  # INT4 codes and scales are kept there
        own += sum(prod(spec.tensors[n].shape) for n in names if is_quantised_here(n)) // 3
    steps = [forward, *(_made_values(p, device) for p in products)]
    steps += [_expert_values(layer, products, prompts.num_tokens)]
    return own + max(steps)


def _row_values(spec: TargetCheckpoint, index: int) -> int:
    """Return the values of one row while a layer runs and all of its tensors are kept."""
    layer = spec.layers[index]
    mixer, mlp = layer.mixer.row_width, layer.mlp.row_width
    return 8 * spec.hidden_size + 3 * mixer + 6 * mlp + 2 * max(spec.hidden_size, mlp)


def _made_values(product: Product, device: str) -> int:
    """Return the largest of: search of scales, inversion of channel products, rounding."""
    inverses, tried = (_INVERSES, _TRIED) if device == "cpu" else (_GPU_INVERSES, _GPU_TRIED)
    sampled = sum(min(n, MAX_OUTPUTS) for n in product.outputs)
    return max(
        tried * sampled * product.width,
        (inverses - 1) * product.width**2,  # the products themselves are already counted
        product.width**2 + _ROUNDED * max(product.outputs) * product.width,
    )


def _expert_values(layer: LayerSpec, products: list[Product], num_tokens: int) -> int:
    """Return the values of one expert that receives all rows, and of its channel products."""
    own = [p for p in products if p.count > 1]
    if not own or not isinstance(layer.mlp, SparseMoe):
        return 0
    rows = num_tokens * (3 * own[0].width + 4 * layer.mlp.expert_width)
    squares = sum(p.width**2 for p in own)
    return rows + squares + max(_made_values(p, "cuda") for p in own)
