"""Quantise the weights of a 16-bit target, with or without calibration.

A weight is read twice, a few megabytes at a time: once for its scales, once for its numbers. Only
the scales of all weights are in memory at once (for INT4, a 64th of the 16-bit weights).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

from torch import Tensor

from trt_eagle3.checkpoint.experts import ExpertsRef, matrices
from trt_eagle3.checkpoint.quantised.weight import (
    Quantisation,
    QuantisedRef,
    quantised_ref,
    titles,
)
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.checkpoint.tensor_file import Content, ref_content, tensor_content, write_tensors
from trt_eagle3.checkpoint.tensor_index import TensorRef, open_file, read_tensor
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.builder.calibration import Calibration, ChannelScales
from trt_eagle3.engine.builder.weight_schemes import SCHEMES, Scheme
from trt_eagle3.engine.runtime.weights import materialise, pieces
from trt_eagle3.errors import UserError
from trt_eagle3.graph.weights import WeightExpr, expert_parts, part_of

__all__ = [
    "check_quantisable",
    "is_quantised_here",
    "made_location",
    "made_target",
    "quantise_target",
    "read_channel_scales",
    "rows_of",
]

_MLP = r"mlp\.(shared_expert\.)?(gate|up|down)"
_EXPERTS = r"mlp\.experts\.(gate_up|down)_proj"
_LINEAR = r"linear_attn\.(in_proj_(qkvz?|z)|out_proj)\.weight"  # a and b are small, and exponents
_PROJECTION = re.compile(
    rf"layers\.\d+\.(((self_attn\.[qkvo]|{_MLP})_proj\.weight)|({_EXPERTS})|({_LINEAR}))"
)
_HEAD = "lm_head.weight"
_FLOAT32 = dtype_named("float32")
_CHANNEL_SCALE = ".channel_scale"
"""Suffix of the tensors that hold a calibration's scales; the producer's name precedes it."""


def is_quantised_here(name: str, *, head: bool = False) -> bool:
    """Return whether ``quantise_target`` quantises the weight of this canonical name.

    It quantises projections of decoder layers, and the ``head`` if requested.
    """
    return _PROJECTION.fullmatch(name) is not None or (head and name == _HEAD)


def _module(name: str, ref: TensorRef) -> str:
    """Return the module name of a quantised weight in the file. A tied head's differs from the
    token table's, and experts have their own.
    """
    own = name == _HEAD or isinstance(ref, ExpertsRef)
    return (name if own else ref.name).removesuffix(".weight")


def made_location(weights: str) -> str:
    """Return the location of the quantised weights in a bundle."""
    return f"weights/target/quantised-{weights}.safetensors"


def check_quantisable(spec: TargetCheckpoint, weights: str) -> None:
    """Check that ``quantise_target`` can quantise the target.

    Raises:
        UserError: it is quantised already, or has rows that cannot be cut into groups.
    """
    if spec.quantisation is not None:
        raise UserError(
            f"engine.weights: {weights}: {spec.path} is quantised already "
            f"({spec.quantisation.provenance}). Leave it out, or use the 16-bit checkpoint."
        )
    for name, ref in spec.tensors.items():
        if is_quantised_here(name, head=True):
            SCHEMES[weights].block(ref.shape[-1])


def quantise_target(
    spec: TargetCheckpoint,
    weights: str,
    file: Path,
    show: Callable[[str], object] = str,
    *,
    head: bool = False,
    calibration: Calibration | None = None,
) -> TargetCheckpoint:
    """Write all tensors of ``spec`` to ``file``, with quantised projections; return the target that
    reads from it.

    Args:
        show: called with the progress. head: quantise the head too.
        calibration: weights that are already quantised, and scales to fold into norms.
    Raises:
        UserError: the target is quantised already, or a value is not a number.
    """
    check_quantisable(spec, weights)
    scheme = SCHEMES[weights]
    contents: dict[str, Content] = {}
    for i, (name, ref) in enumerate(spec.tensors.items()):
        show(f"scales of {weights}: tensor {i} of {len(spec.tensors)}")
        if is_quantised_here(name, head=head):
            made = _content(scheme, name, ref, calibration)
            contents |= {f"{_module(name, ref)}.{k}": c for k, c in made.items()}
        else:
            contents[ref.name] = _dense_content(name, ref, calibration)
    if calibration is not None:
        contents |= {
            f"{spec.tensors[name].name}{_CHANNEL_SCALE}": tensor_content(scales)
            for name, scales in calibration.scales.by_producer.items()
        }
    show(f"writing {file.name}")
    write_tensors(file, contents)
    return made_target(spec, weights, file, head=head)


def _content(
    scheme: Scheme, name: str, ref: TensorRef, calibration: Calibration | None
) -> dict[str, Content]:
    """Return the tensors of a quantised weight, by the last part of their names."""
    if calibration is not None and name in calibration.weights:
        return {last: ref_content(made) for last, made in calibration.weights[name].items()}
    return scheme.content(lambda: rows_of(ref), _rows_and_columns(ref.shape))


def _rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a matrix, or of all experts' matrices stacked."""
    *rows, columns = shape
    return prod(rows), columns


def rows_of(ref: TensorRef) -> Iterator[Tensor]:
    """Yield consecutive rows float32 [n, K] of a 16-bit weight, a few megabytes at a time.

    Transposed experts are read one at a time.

    Raises:
        UserError: a value is not a number.
    """

    def place(ref: TensorRef) -> str:
        return ref.file.name

    experts = isinstance(ref, ExpertsRef)
    parts = expert_parts(ref, place) if isinstance(ref, ExpertsRef) else (part_of(ref, place),)
    for part in parts:
        expr = WeightExpr((part,), _FLOAT32)
        if experts and part.transpose:
            yield materialise(expr, ref.file.parent, _FLOAT32)
        else:
            yield from (piece.values for piece in pieces(expr, ref.file.parent, _FLOAT32))


def _dense_content(name: str, ref: TensorRef, calibration: Calibration | None) -> Content:
    """Return a tensor that is not quantised. It is unchanged, except for a norm that scales are
    folded into, and a router that reads the norm.
    """
    if calibration is None or not calibration.scales.changes(name):
        return ref_content(ref)
    stored = read_tensor(ref)
    return tensor_content(calibration.scales.scaled(name, stored.float()).to(stored.dtype))


def read_channel_scales(spec: TargetCheckpoint, file: Path) -> ChannelScales:
    """Read the scales that a calibration folded into the weights in ``file``; empty without one."""
    index = open_file(file)
    stored = {name: f"{ref.name}{_CHANNEL_SCALE}" for name, ref in spec.tensors.items()}
    found = {name: read_tensor(index[to]) for name, to in stored.items() if to in index}
    return ChannelScales(spec, found)


def made_target(
    spec: TargetCheckpoint, weights: str, file: Path, *, head: bool = False
) -> TargetCheckpoint:
    """Return ``spec`` with its tensors in the ``file`` that ``quantise_target`` wrote.

    Raises:
        UserError: the file lacks a tensor.
    """
    index, scheme = open_file(file), SCHEMES[weights]
    tensors: dict[str, TensorRef] = {}
    for name, ref in spec.tensors.items():
        if is_quantised_here(name, head=head):
            made: TensorRef = _made_ref(
                scheme, _module(name, ref), _rows_and_columns(ref.shape), index, file
            )
            experts = isinstance(ref, ExpertsRef)
            tensors[name] = ExpertsRef.of(ref.shape, [made]) if experts else made
        else:
            tensors[name] = _indexed(index, ref.name, file)
    calibrated = any(name.endswith(_CHANNEL_SCALE) for name in index)
    quantisation = Quantisation(
        "engine.weights",
        f"trt-eagle3 build, engine.weights: {weights}{', calibrated' if calibrated else ''}",
        weights=titles(matrices(tensors.values())),
    )
    return replace(spec, tensors=tensors, quantisation=quantisation)


def _made_ref(
    scheme: Scheme,
    module: str,
    shape: tuple[int, int],
    index: Mapping[str, TensorRef],
    file: Path,
) -> QuantisedRef:
    roles = zip(("codes", "scale"), scheme.names, strict=True)
    stored = {role: _indexed(index, f"{module}.{name}", file) for role, name in roles}
    block = (1, scheme.block(shape[1]))
    fp8 = scheme.format == "fp8"
    return quantised_ref(scheme.format, shape, block, stored, file.parent, fp8_activations=fp8)


def _indexed(index: Mapping[str, TensorRef], name: str, file: Path) -> TensorRef:
    if name not in index:
        raise UserError(f"{file}: holds no {name}. Rebuild: trt-eagle3 build")
    return index[name]
