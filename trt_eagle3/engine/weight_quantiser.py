"""Making quantised weights of a 16-bit target, without data: FP8 and INT8 a scale a row, INT4 a
scale a group, searched for the least squared error.

A weight is read twice, a few megabytes at a time: for its scales, and for its numbers. Only the
scales of all weights are in memory at once (of INT4 a 64th of the 16-bit weights).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from trt_eagle3.checkpoint.quantised.weight import (
    Quantisation,
    QuantisedRef,
    quantised_ref,
    titles,
)
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.checkpoint.tensor_file import Content, ref_content, tensor_content, write_tensors
from trt_eagle3.checkpoint.tensor_index import TensorRef, open_file
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.weights import pieces
from trt_eagle3.errors import UserError
from trt_eagle3.graph.weights import WeightExpr, part_of

__all__ = [
    "SCHEMES",
    "Scheme",
    "check_quantisable",
    "is_quantised_here",
    "made_location",
    "made_target",
    "quantise_target",
]

_PROJECTION = re.compile(r"layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj\.weight")
_HEAD = "lm_head.weight"
_FLOAT32 = dtype_named("float32")
_GROUPS = (128, 64, 32)
_RATIOS = tuple(0.7 + 0.035 * i for i in range(12))
"""What part of a group's largest value is tried as the end of INT4's range."""
_CACHED = 1 << 17
"""Values that are searched at once: what fits into a core's cache."""


@dataclass(frozen=True)
class Scheme:
    """How weights are made.

    Attributes:
        format: a key of ``WEIGHT_FORMATS``. names: of the codes' and the scales' tensor.
        block: of a weight of so many columns. scales: float32 [n, G] of rows [n, in], as stored.
        codes: of rows and their scales, as stored.
    """

    format: str
    names: tuple[str, str]
    dtype: str
    block: Callable[[int], int]
    scales: Callable[[Tensor, int], Tensor]
    codes: Callable[[Tensor, Tensor, int], Tensor]
    packed: int = 1

    def content(self, ref: TensorRef) -> dict[str, Content]:
        """The tensors of the weight at ``ref``, by the last part of their names."""
        rows, columns = ref.shape
        block = self.block(columns)
        scales = torch.cat([self.scales(values, block) for values in _rows(ref)])

        def chunks() -> Iterator[bytes]:
            done = 0
            for values in _rows(ref):
                own = scales[done : done + len(values)].float()
                done += len(values)
                yield from tensor_content(self.codes(values, own, block)).chunks()

        codes = Content(self.dtype, (rows, -(-columns // self.packed)), chunks)
        return dict(zip(self.names, (codes, tensor_content(scales)), strict=True))


def _rows(ref: TensorRef) -> Iterable[Tensor]:
    """float32 [n, in]: consecutive rows of a 16-bit weight."""
    expr = WeightExpr((part_of(ref, lambda r: r.file.name),), _FLOAT32)
    return (piece.values for piece in pieces(expr, ref.file.parent, _FLOAT32))


def _row_scales(most: float) -> Callable[[Tensor, int], Tensor]:
    def scales(values: Tensor, block: int) -> Tensor:
        del block
        largest = values.abs().amax(dim=1, keepdim=True)
        return torch.where(largest > 0, largest / most, torch.ones_like(largest))

    return scales


def _fp8_codes(values: Tensor, scales: Tensor, _block: int) -> Tensor:
    return (values / scales).clamp(-448, 448).to(torch.float8_e4m3fn)


def _int8_codes(values: Tensor, scales: Tensor, _block: int) -> Tensor:
    return (values / scales).round().clamp(-127, 127).to(torch.int8)


def _int4_scales(values: Tensor, block: int) -> Tensor:
    """bfloat16 [n, G]: of the candidates the one with the least squared error."""
    groups = values.reshape(-1, block)
    found = [_best_int4_scales(part) for part in groups.split(max(1, _CACHED // block))]
    return torch.cat(found).view(len(values), -1)


def _best_int4_scales(groups: Tensor) -> Tensor:
    """bfloat16 [g] of groups float32 [g, block]."""
    largest = groups.abs().amax(dim=1)
    best, least = torch.ones_like(largest).bfloat16(), torch.full_like(largest, torch.inf)
    for ratio in _RATIOS:
        scale = (largest * (ratio / 7.5)).clamp(min=1e-12).bfloat16()
        wide = scale.float()[:, None]
        rounded = (groups / wide).round_().clamp_(-8, 7).mul_(wide)
        error = rounded.sub_(groups).square_().sum(dim=1)
        better = (error < least) & (largest > 0)
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return best


def _int4_codes(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """int32 [n, in / 8]: the numbers + 8, lowest bits first."""
    groups = values.unflatten(1, (-1, block)) / scales[..., None]
    numbers = (groups.round().clamp(-8, 7) + 8).flatten(1).int().unflatten(1, (-1, 8))
    shifted: Tensor = numbers << torch.arange(0, 32, 4, dtype=torch.int32)
    return shifted.sum(dim=-1).int()


def _int4_block(columns: int) -> int:
    block = next((group for group in _GROUPS if columns % group == 0), None)
    if block is None:
        raise UserError(
            f"engine.weights: int4 cuts rows into groups of {', '.join(map(str, _GROUPS))}; this "
            f"target has rows of {columns}. Use int8 or fp8."
        )
    return block


_NAMES = ("weight", "weight_scale")
SCHEMES: Mapping[str, Scheme] = {
    "fp8": Scheme("fp8", _NAMES, "F8_E4M3", int, _row_scales(448), _fp8_codes),
    "int8": Scheme("int8", _NAMES, "I8", int, _row_scales(127), _int8_codes),
    "int4": Scheme(
        "int4_packed",
        ("weight_packed", "weight_scale"),
        "I32",
        _int4_block,
        _int4_scales,
        _int4_codes,
        packed=8,
    ),
}
"""``engine.weights`` -> how they are made; tensors are named as compressed-tensors names them."""


def is_quantised_here(name: str, *, head: bool = False) -> bool:
    """Whether ``quantise_target`` quantises the weight of this canonical name: projections of
    decoder layers, and the ``head`` where asked. All else stays as it is.
    """
    return _PROJECTION.fullmatch(name) is not None or (head and name == _HEAD)


def _module(name: str, ref: TensorRef) -> str:
    """The name of a made weight's module in the file; a tied head's is not the token table's."""
    return _HEAD.removesuffix(".weight") if name == _HEAD else ref.name.removesuffix(".weight")


def made_location(weights: str) -> str:
    """Where the made weights are in a bundle."""
    return f"weights/target/quantised-{weights}.safetensors"


def check_quantisable(spec: TargetCheckpoint, weights: str) -> None:
    """Refuse a target that ``quantise_target`` cannot quantise.

    Raises:
        UserError: it is quantised already, or has rows that cannot be cut into groups.
    """
    if spec.quantisation is not None:
        raise UserError(
            f"engine.weights: {weights}, and {spec.path} is quantised already "
            f"({spec.quantisation.provenance}). Leave it out, or use the 16-bit checkpoint."
        )
    for name, ref in spec.tensors.items():
        if is_quantised_here(name, head=True):
            SCHEMES[weights].block(ref.shape[1])


def quantise_target(
    spec: TargetCheckpoint,
    weights: str,
    file: Path,
    show: Callable[[str], object] = str,
    *,
    head: bool = False,
) -> TargetCheckpoint:
    """Write all tensors of ``spec`` to ``file``, its projections quantised; returns the target
    that is read from there.

    Args:
        show: told how far it is. head: quantise the head too.
    Raises:
        UserError: the target is quantised already, or a value is no number.
    """
    check_quantisable(spec, weights)
    scheme = SCHEMES[weights]
    contents: dict[str, Content] = {}
    for i, (name, ref) in enumerate(spec.tensors.items()):
        show(f"scales of {weights}: tensor {i} of {len(spec.tensors)}")
        if is_quantised_here(name, head=head):
            module = _module(name, ref)
            contents |= {f"{module}.{k}": c for k, c in scheme.content(ref).items()}
        else:
            contents[ref.name] = ref_content(ref)
    show(f"writing {file.name}")
    write_tensors(file, contents)
    return made_target(spec, weights, file, head=head)


def made_target(
    spec: TargetCheckpoint, weights: str, file: Path, *, head: bool = False
) -> TargetCheckpoint:
    """``spec``, its tensors in the ``file`` that ``quantise_target`` wrote.

    Raises:
        UserError: the file holds other tensors.
    """
    index, scheme = open_file(file), SCHEMES[weights]
    tensors: dict[str, TensorRef] = {}
    for name, ref in spec.tensors.items():
        if is_quantised_here(name, head=head):
            tensors[name] = _made_ref(scheme, _module(name, ref), ref.shape, index, file)
        else:
            tensors[name] = _indexed(index, ref.name, file)
    quantisation = Quantisation(
        "engine.weights",
        f"trt-eagle3 build, engine.weights: {weights}",
        weights=titles(tensors.values()),
    )
    return replace(spec, tensors=tensors, quantisation=quantisation)


def _made_ref(
    scheme: Scheme,
    module: str,
    shape: tuple[int, ...],
    index: Mapping[str, TensorRef],
    file: Path,
) -> QuantisedRef:
    roles = zip(("codes", "scale"), scheme.names, strict=True)
    stored = {role: _indexed(index, f"{module}.{name}", file) for role, name in roles}
    block = (1, scheme.block(shape[1]))
    fp8 = scheme.format == "fp8"
    sizes = (shape[0], shape[1])
    return quantised_ref(scheme.format, sizes, block, stored, file.parent, fp8_activations=fp8)


def _indexed(index: Mapping[str, TensorRef], name: str, file: Path) -> TensorRef:
    if name not in index:
        raise UserError(f"{file}: holds no {name}. Rebuild: trt-eagle3 build")
    return index[name]
