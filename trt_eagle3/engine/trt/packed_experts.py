"""Quantised experts that our plugins multiply as stored: ``FusedMoeFp8``, ``FusedMoeInt4``.

Shapes: E experts, a weight [E, N, K], G groups of columns of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import onnx
import torch
from onnx import TensorProto, helper

from trt_eagle3.dtype import LARGEST_FP8, dtype_of_torch
from trt_eagle3.engine.torch.moe import Experts, Fp8Experts, Int4Experts, pack_experts
from trt_eagle3.engine.trt.packed_file import PackedFile, packing_device, words
from trt_eagle3.graph.ops import DOMAIN
from trt_eagle3.graph.plugin_ops import plugin_attributes
from trt_eagle3.graph.trt_export import TrtExport
from trt_eagle3.graph.weights import WeightExpr

__all__ = ["PackExperts", "pack_experts", "pack_mixtures"]

PackExperts = Callable[
    [tuple[WeightExpr, WeightExpr], Path, torch.device], tuple[Experts, Experts] | None
]
_LARGEST_INT4 = 15.0  # code, relative to its zero point


def pack_mixtures(
    ready: TrtExport, root: Path, file: PackedFile, *, pack: PackExperts = pack_experts
) -> tuple[Mapping[str, onnx.NodeProto], list[str]]:
    """Put the experts that our kernels support into ``file``.

    ``engine/torch/moe.py`` defines which those are. The compute type must hold their values,
    because prompts multiply with those.

    Args:
        root: folder of the weights' files. One layer's experts at a time are in memory.
        pack: packs gate_up and down on a device; returns None if the kernels do not support them.
    Returns:
        The nodes that replace ``FusedMoe`` nodes, by output; and the weights that they replace.
    Raises:
        UserError: a file cannot be read, or is cut short.
    """
    made: dict[str, onnx.NodeProto] = {}
    packed: list[str] = []
    for node in ready.model.graph.node:
        if node.op_type != "FusedMoe" or node.domain != DOMAIN:
            continue
        names = list(node.input[2:4])
        exprs = (ready.weights[names[0]], ready.weights[names[1]])
        experts = pack(exprs, root, packing_device())
        if experts is not None and all(map(_fits, experts, exprs)):
            made[node.output[0]] = _node(node, experts, exprs[0].dtype.onnx, file)
            packed += names
    return made, packed


def _fits(experts: Experts, expr: WeightExpr) -> bool:
    """Return whether the compute type holds the largest code times its scale."""
    assert isinstance(experts, (Fp8Experts, Int4Experts)), type(experts)
    largest = LARGEST_FP8 if isinstance(experts, Fp8Experts) else _LARGEST_INT4
    return float(experts.scale.abs().max()) * largest <= torch.finfo(expr.dtype.torch).max


def _node(
    mixture: onnx.NodeProto, experts: tuple[Experts, Experts], compute: int, file: PackedFile
) -> onnx.NodeProto:
    """Return the plugin's node that replaces ``mixture``."""
    weights, zeros, options = [], [], {}
    for name, one in zip(mixture.input[2:4], experts, strict=True):
        if isinstance(one, Fp8Experts):
            kind, words_of_row = "FusedMoeFp8", one.codes.shape[2] // 4
            weights.append(words(file, f"{name}/codes", one.codes, words_of_row))
            weights.append(file.add_tensor(f"{name}/scales", TensorProto.FLOAT, one.scale))
            continue
        assert isinstance(one, Int4Experts), type(one)
        kind, groups = "FusedMoeInt4", one.scale.shape[2]
        options["scale_type"] = dtype_of_torch(one.scale.dtype).onnx
        weights.append(words(file, f"{name}/codes", one.codes, one.codes.shape[2]))
        weights.append(words(file, f"{name}/scales", one.scale, groups))
        if one.zero_point is not None:
            zeros.append(words(file, f"{name}/zero_points", one.zero_point, groups))
    known = {a.name: a.i for a in mixture.attribute if a.name in {"top_k", "renormalise"}}
    return helper.make_node(
        kind,
        [*mixture.input[:2], *weights, *zeros],
        list(mixture.output),
        name=f"{mixture.name.rpartition('/')[0]}/{kind}",
        domain=DOMAIN,
        **known,
        **options,
        **plugin_attributes(compute),
    )
