"""Quantised weights that our plugins multiply as stored: ``LinearFp8``, ``LinearInt8``,
``LinearInt4``, and those of experts (``packed_experts.py``).

Shapes: a weight [N, K], G groups of columns of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import onnx
import torch
from onnx import TensorProto, helper

from trt_eagle3.atomic_io import atomic_file
from trt_eagle3.dtype import LARGEST_FP8, dtype_of_torch
from trt_eagle3.engine.torch.pack import pack
from trt_eagle3.engine.torch.packed import Fp8Weight, Int4Weight, Int8Weight, PackedWeight
from trt_eagle3.engine.trt.packed_experts import PackExperts, pack_experts, pack_mixtures
from trt_eagle3.engine.trt.packed_file import (
    PACKED_FILE,
    PackedFile,
    is_product,
    packing_device,
    with_packed,
    words,
)
from trt_eagle3.graph.ops import DOMAIN
from trt_eagle3.graph.plugin_ops import plugin_attributes
from trt_eagle3.graph.trt_export import TrtExport
from trt_eagle3.graph.weights import WeightExpr

__all__ = ["keep_packed_products"]

Kept = Fp8Weight | Int8Weight | Int4Weight
Pack = Callable[[WeightExpr, Path, torch.device], PackedWeight | None]

_PLUGINS: Mapping[type[Kept], str] = {
    Fp8Weight: "LinearFp8",
    Int8Weight: "LinearInt8",
    Int4Weight: "LinearInt4",
}
_LARGEST: Mapping[type[Kept], float] = {  # code, relative to its zero point
    Fp8Weight: LARGEST_FP8,
    Int8Weight: 128.0,
    Int4Weight: 15.0,
}


def keep_packed_products(
    ready: TrtExport,
    root: Path,
    folder: Path,
    *,
    pack: Pack = pack,
    pack_experts: PackExperts = pack_experts,
) -> TrtExport:
    """Replace each product and mixture whose weights our kernels support by a plugin node, with the
    weights in ``folder / PACKED_FILE``. Returns ``ready`` itself if there are none.

    ``engine/torch/packed.py`` defines which weights the kernels support. Every reader of a weight
    must be a product without a bias. The compute type must hold its values, because prompts
    multiply with those.

    Args:
        root: folder of the weights' files. One weight at a time is in memory.
        pack: packs a weight on a device; returns None if the kernels do not support it.
        pack_experts: the same for the experts of a layer.
    Raises:
        UserError: a file cannot be read, or is cut short.
    """
    with atomic_file(folder / PACKED_FILE) as stream:
        file = PackedFile(stream)
        mixtures, packed = pack_mixtures(ready, root, file, pack=pack_experts)
        made = dict(mixtures)
        for name, nodes in _readers(ready).items():
            expr = ready.weights[name]
            weight = pack(expr, root, packing_device())
            if isinstance(weight, Kept) and _fits(weight, expr):
                inputs = _add(file, name, weight)
                made |= {node.output[0]: _node(node, inputs, weight, expr) for node in nodes}
                packed.append(name)
    torch.cuda.empty_cache()  # leave the weights' memory to the builder
    if not packed:
        (folder / PACKED_FILE).unlink()
        return ready
    nodes = [made.get(node.output[0], node) for node in ready.model.graph.node]
    return with_packed(ready, nodes, file.tensors, packed)


def _readers(ready: TrtExport) -> Mapping[str, Sequence[onnx.NodeProto]]:
    """Return each weight that only products read -> those products."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    others: set[str] = set()
    for node in ready.model.graph.node:
        plain = is_product(node) and len(node.input) == 2
        for at, name in enumerate(node.input):
            if plain and at == 1 and name in ready.weights:
                readers.setdefault(name, []).append(node)
            else:
                others.add(name)
    return {name: nodes for name, nodes in readers.items() if name not in others}


def _fits(weight: Kept, expr: WeightExpr) -> bool:
    """Return whether the compute type holds the largest code times its scale."""
    largest = float(weight.scale.abs().max()) * _LARGEST[type(weight)]
    return largest <= torch.finfo(expr.dtype.torch).max


def _add(file: PackedFile, name: str, weight: Kept) -> list[str]:
    """Put the constant inputs of the weight's node into ``file``; return their names in order."""
    if not isinstance(weight, Int4Weight):
        codes = words(file, f"{name}/codes", weight.codes, weight.codes.shape[1] // 4)
        return [codes, file.add_tensor(f"{name}/scales", TensorProto.FLOAT, weight.scale)]
    groups = weight.scale.shape[1]
    found = [
        words(file, f"{name}/codes", weight.codes, weight.codes.shape[1]),
        words(file, f"{name}/scales", weight.scale, groups),
    ]
    if weight.zero_point is not None:
        found.append(words(file, f"{name}/zero_points", weight.zero_point, groups))
    return found


def _node(
    product: onnx.NodeProto,
    inputs: Sequence[str],
    weight: Kept,
    expr: WeightExpr,
) -> onnx.NodeProto:
    """Return the plugin's node that replaces ``product``."""
    options: dict[str, str | int] = {}
    if isinstance(weight, Int4Weight):
        options["scale_type"] = dtype_of_torch(weight.scale.dtype).onnx
    kind = _PLUGINS[type(weight)]
    name = f"{product.name.rpartition('/')[0]}/{kind}"
    return helper.make_node(
        kind,
        [product.input[0], *inputs],
        list(product.output),
        name=name,
        domain=DOMAIN,
        **options,
        **plugin_attributes(expr.dtype.onnx),
    )
