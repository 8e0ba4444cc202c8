"""Layouts of quantised weights: the tensors that store a weight [out, in], and their shapes.

Names and packings are those of the producers' own writers: transformers' FineGrainedFP8,
compressed-tensors, AutoAWQ, GPTQModel and ModelOpt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from trt_eagle3.checkpoint.tensor_index import FLOAT_DTYPES
from trt_eagle3.errors import quote

__all__ = ["LAYOUTS", "Layout", "Role", "check_layout", "grid_of"]

Shape = tuple[int, ...]
_FLOATS = FLOAT_DTYPES


@dataclass(frozen=True)
class Role:
    """One tensor of a weight.

    Attributes:
        shape: row-major.
        dtypes: safetensors names of the permitted types.
        optional: whether it may be absent.
        squeezed: axes of length 1 may be omitted or inserted.
    """

    shape: Shape
    dtypes: tuple[str, ...]
    optional: bool = False
    squeezed: bool = False

    def takes(self, shape: Shape) -> bool:
        """Return whether a tensor of ``shape`` may have this role."""
        if not self.squeezed:
            return shape == self.shape
        long = [n for n in self.shape if n != 1]
        return prod(shape) == prod(self.shape) and [n for n in shape if n != 1] == long


@dataclass(frozen=True)
class Layout:
    """The storage of a weight.

    Attributes:
        title: name for messages.
        kind: kind of its numbers.
        bits: bits of a number.
        packing: producer whose order of numbers within an element applies; empty if an element
            holds one number.
    """

    title: str
    kind: str
    bits: int
    packing: str = ""

    def roles(self, shape: tuple[int, int], block: tuple[int, int]) -> Mapping[str, Role]:
        """Return the tensors of a weight of ``shape`` [out, in], with a scale per ``block``."""
        return _ROLES[self.packing or self.kind](self.bits, shape, grid_of(shape, block))


def grid_of(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Return the number of scales on both axes of a weight; the last block may be short."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def check_layout(
    name: str,
    shape: tuple[int, int],
    block: tuple[int, int],
    tensors: Mapping[str, tuple[str, Shape]],
) -> None:
    """Check that tensors form a weight of layout ``name``.

    Args:
        tensors: role -> safetensors name of the type, and shape.
    Raises:
        ValueError: naming the role, what was expected, and what was got.
    """
    layout = LAYOUTS.get(name)
    if layout is None:
        raise ValueError(f"weight format {quote(name)}: expected one of {', '.join(LAYOUTS)}")
    if len(shape) != 2 or min(*shape, *block) < 1:
        raise ValueError(f"shape {quote(list(shape))} and block {quote(list(block))} are no weight")
    roles = layout.roles(shape, block)
    for role in tensors.keys() - roles.keys():
        raise ValueError(f"{layout.title} has no {quote(role)}")
    for role, expected in roles.items():
        if role not in tensors:
            if not expected.optional:
                raise ValueError(f"its {role} is missing")
            continue
        dtype, got = tensors[role]
        if dtype not in expected.dtypes or not expected.takes(got):
            wanted = f"{' or '.join(expected.dtypes)} {list(expected.shape)}"
            raise ValueError(f"its {role}: expected {wanted}, got {dtype} {quote(list(got))}")


_INPUT_SCALE = Role((1,), _FLOATS, optional=True, squeezed=True)
"""Scale of calibrated activations. No kernel reads it yet."""


def _scaled(codes: str, shape: tuple[int, int], grid: tuple[int, int]) -> dict[str, Role]:
    scale = Role(grid, _FLOATS, squeezed=True)
    return {"codes": Role(shape, (codes,)), "scale": scale, "input_scale": _INPUT_SCALE}


def _fp8(_bits: int, shape: tuple[int, int], grid: tuple[int, int]) -> dict[str, Role]:
    return _scaled("F8_E4M3", shape, grid)


def _int8(_bits: int, shape: tuple[int, int], grid: tuple[int, int]) -> dict[str, Role]:
    roles = _scaled("I8", shape, grid)
    return {**roles, "zero_point": replace(roles["scale"], dtypes=("I8",), optional=True)}


def _nvfp4(_bits: int, shape: tuple[int, int], grid: tuple[int, int]) -> dict[str, Role]:
    return {
        "codes": Role((shape[0], -(-shape[1] // 2)), ("U8",)),
        "scale": Role(grid, ("F8_E4M3",)),
        "global_scale": Role((1,), ("F32",), squeezed=True),
        "input_scale": _INPUT_SCALE,
    }


def _pack_quantized(bits: int, shape: tuple[int, int], grid: tuple[int, int]) -> dict[str, Role]:
    each = 32 // bits
    return {
        "codes": Role((shape[0], -(-shape[1] // each)), ("I32",)),
        "scale": Role(grid, _FLOATS),
        "zero_point": Role((-(-shape[0] // each), grid[1]), ("I32",), optional=True),
        "g_idx": Role((shape[1],), ("I32", "I64"), optional=True),
    }


def _awq(bits: int, shape: tuple[int, int], grid: tuple[int, int]) -> dict[str, Role]:
    each = 32 // bits
    return {
        "codes": Role((shape[1], -(-shape[0] // each)), ("I32",)),
        "scale": Role((grid[1], shape[0]), _FLOATS),
        "zero_point": Role((grid[1], -(-shape[0] // each)), ("I32",)),
    }


def _gptq(bits: int, shape: tuple[int, int], grid: tuple[int, int]) -> dict[str, Role]:
    each = 32 // bits
    return {
        "codes": Role((-(-shape[1] // each), shape[0]), ("I32",)),
        "scale": Role((grid[1], shape[0]), _FLOATS),
        "zero_point": Role((grid[1], -(-shape[0] // each)), ("I32",)),
        "g_idx": Role((shape[1],), ("I32", "I64"), optional=True),
    }


_ROLES = {
    "fp8": _fp8,
    "int8": _int8,
    "nvfp4": _nvfp4,
    "pack-quantized": _pack_quantized,
    "awq": _awq,
    "gptq": _gptq,
}
LAYOUTS: Mapping[str, Layout] = {
    "fp8": Layout("FP8 (e4m3)", "fp8", 8),
    "int8": Layout("INT8", "int8", 8),
    "int4_packed": Layout("INT4 (pack-quantized)", "integer", 4, "pack-quantized"),
    "int8_packed": Layout("INT8 (pack-quantized)", "integer", 8, "pack-quantized"),
    "awq": Layout("INT4 (AWQ)", "integer", 4, "awq"),
    "gptq": Layout("INT4 (GPTQ)", "integer", 4, "gptq"),
    "gptq_v2": Layout("INT4 (GPTQ v2)", "integer", 4, "gptq"),
    "nvfp4": Layout("NVFP4", "nvfp4", 4),
    "nvfp4_divided": Layout("NVFP4 (global scale divides)", "nvfp4", 4),
}
"""Weight formats other than ``dense``; keys of ``graph.weight_formats.WEIGHT_FORMATS``."""
