"""Weights as expressions: the tensors on disk that a weight consists of, and their conversion.

A graph names a weight by one initializer and has no nodes for its preparation. A weight that is
stored in the graph's form is ordinary ONNX external data. Any other is an external initializer at
``DESCRIBED``. The model's metadata hold its expression as JSON, from which
``engine/runtime/weights.py`` computes the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import isfinite, prod
from typing import Annotated, Any

import onnx
from onnx import TensorProto
from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from trt_eagle3.checkpoint.experts import ExpertsRef
from trt_eagle3.checkpoint.quantised.layout import check_layout
from trt_eagle3.checkpoint.quantised.weight import QuantisedRef
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.dtype import DType, dtype_named, dtype_of_onnx, dtype_of_safetensors
from trt_eagle3.errors import UserError, clip, quote
from trt_eagle3.io.validation import problem_text

__all__ = [
    "DESCRIBED",
    "METADATA_KEY",
    "Quantised",
    "StoredTensor",
    "WeightExpr",
    "WeightPart",
    "descriptions",
    "expert_parts",
    "external_weights",
    "part_of",
    "weight_expr",
    "weight_initializer",
    "write_descriptions",
]

METADATA_KEY = "trt_eagle3.weights"
"""The model's metadata entry: a JSON object, initializer name -> ``WeightExpr``."""
DESCRIBED = "trt_eagle3.weights"
"""Location of an initializer described in the metadata. No such file exists: a runtime that does
not support expressions rejects the model instead of reading wrong bytes.
"""


def _dtype(given: Any) -> DType:
    """Return a type by its name or ONNX's enum. Raise a ValueError, which callers reword."""
    if isinstance(given, DType):
        return given
    try:
        return dtype_of_onnx(given) if isinstance(given, int) else dtype_named(str(given))
    except UserError as error:
        raise ValueError(str(error)) from error


_DTypeField = Annotated[DType, PlainValidator(_dtype), PlainSerializer(str)]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk; ``role``: its role in a quantised weight (``codes``, ``scale``)."""

    role: str
    name: str
    location: str
    offset: int
    num_bytes: int
    dtype: _DTypeField
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_bytes(self.dtype, self.shape, self.num_bytes)


@dataclass(frozen=True)
class Quantised:
    """The properties of a quantised part other than its numbers.

    Attributes:
        shape: [out, in] of its values.
        block: rows and columns of values that share a scale.
        tensors: all tensors that it is read from, its numbers (``codes``) first.
        fp8_activations: whether its input should be FP8 too. A backend may compute with 16 bits if
            that is equally fast.
    """

    shape: tuple[int, int]
    block: tuple[int, int]
    tensors: tuple[StoredTensor, ...]
    fp8_activations: bool = False


@dataclass(frozen=True)
class WeightPart:
    """A tensor on disk, and the part of it that a weight uses.

    Rows and columns are sliced first, then transposed, then scaled.

    Attributes:
        name: name of the tensor in its file.
        location: location of the file under the weights root.
        offset, num_bytes: of the whole tensor in the file.
        dtype, shape: as stored, row-major.
        rows, columns: first and end on the stored first and second axis; None: all.
        transpose: whether the two axes of a matrix are swapped.
        scale: factor of every value, in float32; a power of two if it must be exact.
        quantised: converts its numbers to values; None if they are the values. With it, the fields
            above describe its numbers, except ``rows``, which refers to the values.
    """

    name: str
    location: str
    offset: int
    num_bytes: int
    dtype: _DTypeField
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    transpose: bool = False
    scale: float = 1.0
    quantised: Quantised | None = None
    columns: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not self.shape:
            raise ValueError(f"type {self.dtype} and shape [] do not make a weight")
        _check_bytes(self.dtype, self.shape, self.num_bytes)
        shape = quote(list(self.values_shape))
        if self.columns and len(self.values_shape) != 2:
            raise ValueError(f"shape {shape} has no columns to take")
        ranges = (("rows", self.row_range), ("columns", self.column_range))
        for (axis, (first, end)), size in zip(ranges, self.values_shape, strict=False):
            if not 0 <= first <= end <= size:
                raise ValueError(f"{axis} {first} to {end} are not in shape {shape}")
        if self.transpose and len(self.shape) != 2:
            raise ValueError(f"shape {quote(list(self.shape))} has no two axes to transpose")
        if not isfinite(self.scale) or self.scale == 0:
            raise ValueError(f"scale {self.scale} is no factor")

    @property
    def values_shape(self) -> tuple[int, ...]:
        """Shape of the values: as stored, or [out, in] of a quantised part."""
        return self.quantised.shape if self.quantised else self.shape

    @property
    def stored(self) -> tuple[StoredTensor, ...]:
        """All tensors on disk that the part is read from."""
        if self.quantised:
            return self.quantised.tensors
        place = (self.name, self.location, self.offset, self.num_bytes)
        return (StoredTensor("codes", *place, self.dtype, self.shape),)

    @property
    def row_range(self) -> tuple[int, int]:
        """First and end row on the first axis of the values."""
        return self.rows or (0, self.values_shape[0])

    @property
    def column_range(self) -> tuple[int, int]:
        """First and end column on the second axis of the values; (0, 0) for a vector."""
        return self.columns or (0, self.values_shape[1] if len(self.values_shape) > 1 else 0)

    @property
    def made_shape(self) -> tuple[int, ...]:
        """Shape of the part that the weight uses."""
        first, end = self.row_range
        rest = self.values_shape[1:]
        if self.columns:
            rest = (self.columns[1] - self.columns[0],)
        taken = (end - first, *rest)
        return taken[::-1] if self.transpose else taken

    @property
    def is_whole(self) -> bool:
        """Whether the part is the stored tensor without any change."""
        rows = self.row_range == (0, self.values_shape[0])
        everything = rows and self.columns is None
        return everything and not self.transpose and self.scale == 1.0


@dataclass(frozen=True)
class WeightExpr:
    """A weight: ``parts`` stacked along the first axis, in type ``dtype``.

    Attributes:
        experts: number of matrices that the stacked rows belong to. The shape is then [experts,
            rows per matrix, columns]. 0: the weight is the stacked parts.
        format: format of the parts' numbers: ``dense``, or a key of ``WEIGHT_FORMATS``.
    """

    parts: tuple[WeightPart, ...]
    dtype: _DTypeField
    format: str = "dense"
    experts: int = 0

    def __post_init__(self) -> None:
        if self.experts < 0 or (self.experts and self.stacked_shape[0] % self.experts):
            shape = quote(list(self.stacked_shape))
            raise ValueError(f"shape {shape} cannot be cut into {self.experts} experts")
        if len({part.made_shape[1:] for part in self.parts}) != 1:
            shapes = quote([list(part.made_shape) for part in self.parts])
            raise ValueError(f"parts of shapes {shapes} cannot be stacked")
        for part in self.parts:
            _check_format(self.format, part)

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """Shape of the stacked parts."""
        rows = sum(part.made_shape[0] for part in self.parts)
        return rows, *self.parts[0].made_shape[1:]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight, row-major."""
        rows, *rest = self.stacked_shape
        return (self.experts, rows // self.experts, *rest) if self.experts else (rows, *rest)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.dtype.num_bytes(prod(self.shape))

    @property
    def is_stored(self) -> bool:
        """Whether the bytes on disk are the weight: one whole dense tensor of its type."""
        first = self.parts[0]
        single = len(self.parts) == 1 and first.is_whole and first.dtype == self.dtype
        return single and self.format == "dense"


def part_of(ref: TensorRef, resolve: Callable[[TensorRef], str], scale: float = 1.0) -> WeightPart:
    """Create a part of the whole weight at ``ref``; ``resolve`` returns its files' locations."""
    if not isinstance(ref, QuantisedRef):
        stored = _stored("codes", ref, resolve)
        place = (stored.name, stored.location, stored.offset, stored.num_bytes)
        return WeightPart(*place, stored.dtype, stored.shape, scale=scale)
    roles = sorted(ref.tensors, key=lambda role: role != "codes")
    tensors = tuple(_stored(role, ref.tensors[role], resolve) for role in roles)
    codes = tensors[0]
    shape = (ref.shape[0], ref.shape[1])
    quantised = Quantised(shape, ref.block, tensors, ref.fp8_activations)
    place = (codes.name, codes.location, codes.offset, codes.num_bytes)
    return WeightPart(*place, codes.dtype, codes.shape, scale=scale, quantised=quantised)


def expert_parts(
    ref: ExpertsRef, resolve: Callable[[TensorRef], str], half_scale: float = 1.0
) -> tuple[WeightPart, ...]:
    """Create the parts of the experts at ``ref``.

    ``half_scale``: factor of the second half of each expert's rows (``up`` of gate and up).
    """
    parts = [part_of(part, resolve) for part in ref.parts]
    if ref.transposed:
        parts = [replace(part, transpose=True) for part in parts]
    if half_scale == 1.0:
        return tuple(parts)
    half, row, found = ref.shape[1] // 2, 0, []
    for part in parts:
        for first in range(0, part.made_shape[0], half):
            own = replace(part, scale=half_scale if row // half % 2 else 1.0)
            taken = (first, first + half)
            found.append(
                replace(own, columns=taken) if part.transpose else replace(own, rows=taken)
            )
            row += half
    return tuple(found)


def _stored(role: str, ref: TensorRef, resolve: Callable[[TensorRef], str]) -> StoredTensor:
    dtype = dtype_of_safetensors(ref.dtype)
    return StoredTensor(role, ref.name, resolve(ref), ref.offset, ref.num_bytes, dtype, ref.shape)


def _check_bytes(dtype: DType, shape: tuple[int, ...], num_bytes: int) -> None:
    if min(shape, default=0) < 0 or dtype.num_bytes(prod(shape)) != num_bytes:
        raise ValueError(
            f"type {dtype} and shape {quote(list(shape))} do not make {num_bytes} bytes"
        )


def _check_format(name: str, part: WeightPart) -> None:
    """Check that a part has the format ``name``.

    Raises:
        ValueError: stating what was expected.
    """
    if part.quantised is None:
        if name != "dense":
            raise ValueError(f"weight format {quote(name)}: expected dense, or quantised parts")
        return
    stored = {t.role: (t.dtype.safetensors, t.shape) for t in part.quantised.tensors}
    if len(stored) != len(part.quantised.tensors):
        raise ValueError("two tensors of one role")
    check_layout(name, part.quantised.shape, part.quantised.block, stored)


def weight_initializer(name: str, expr: WeightExpr) -> TensorProto:
    """Create the initializer ``name`` that represents ``expr`` in a graph."""
    proto = TensorProto(name=name, data_type=expr.dtype.onnx, dims=expr.shape)
    proto.data_location = TensorProto.EXTERNAL
    entries: dict[str, object] = {"location": DESCRIBED}
    if expr.is_stored:
        part = expr.parts[0]
        entries = {"location": part.location, "offset": part.offset, "length": part.num_bytes}
    for key, value in entries.items():
        proto.external_data.add(key=key, value=str(value))
    return proto


def write_descriptions(model: onnx.ModelProto, weights: Mapping[str, WeightExpr]) -> None:
    """Write the expressions that are not stored as they are to the metadata of ``model``."""
    described = {name: expr for name, expr in weights.items() if not expr.is_stored}
    if described:
        text = _adapter().dump_json(described, exclude_defaults=True).decode()
        model.metadata_props.add(key=METADATA_KEY, value=text)


def descriptions(model: onnx.ModelProto) -> dict[str, WeightExpr]:
    """Read the described weights of ``model`` by initializer name.

    Raises:
        UserError: the metadata is not what ``write_descriptions`` writes.
    """
    text = next((p.value for p in model.metadata_props if p.key == METADATA_KEY), "{}")
    try:
        return _adapter().validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = clip(".".join(map(str, first["loc"])))
        raise UserError(f"metadata {METADATA_KEY}: {where}: {clip(problem_text(first))}") from error


def external_weights(model: onnx.ModelProto) -> dict[str, WeightExpr]:
    """Read all weights of ``model``, stored and described, by initializer name.

    Raises:
        UserError: one is neither stored nor described.
    """
    described = descriptions(model)
    found = {}
    for proto in model.graph.initializer:
        if proto.data_location == TensorProto.EXTERNAL:
            try:
                found[proto.name] = weight_expr(proto, described)
            except ValueError as error:
                raise UserError(f"{clip(proto.name)}: {error}") from error
    return found


def weight_expr(proto: TensorProto, described: Mapping[str, WeightExpr]) -> WeightExpr:
    """Return the expression of an external initializer.

    Raises:
        ValueError: it has no expression of its type and shape.
    """
    entries = {entry.key: entry.value for entry in proto.external_data}
    if entries.get("location") != DESCRIBED:
        return _stored_expr(proto, entries)
    expr = described.get(proto.name)
    if expr is None:
        raise ValueError(f"metadata {METADATA_KEY} does not describe it")
    if (expr.dtype.onnx, expr.shape) != (proto.data_type, tuple(proto.dims)):
        got = f"{proto.data_type} {quote(list(proto.dims))}"
        expected = f"{expr.dtype.onnx} {quote(list(expr.shape))}"
        raise ValueError(f"expected {expected} as its metadata describe it, got {got}")
    return expr


def _stored_expr(proto: TensorProto, entries: Mapping[str, str]) -> WeightExpr:
    location = entries.get("location", "")
    try:
        offset, length = int(entries["offset"]), int(entries["length"])
    except (KeyError, ValueError) as error:
        raise ValueError("its external data has no offset and length in bytes") from error
    # the file is part of a weight's name in the graph
    name = proto.name.removeprefix(f"{location}:")
    dtype = _dtype(proto.data_type)
    part = WeightPart(name, location, offset, length, dtype, tuple(proto.dims))
    return WeightExpr((part,), dtype)


@cache
def _adapter() -> TypeAdapter[dict[str, WeightExpr]]:
    return TypeAdapter(dict[str, WeightExpr])
