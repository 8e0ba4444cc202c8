"""``quant_method: compressed-tensors``, the output of llm-compressor.

FP8 and INT8: ``X.weight`` [out, in] times ``X.weight_scale`` of tensor, channel, group or block.
W4A16 and W8A16: ``X.weight_packed`` int32 [out, in / 8], a code is the value + 8;
``X.weight_scale`` [out, groups]; ``X.weight_zero_point`` int32 [out / 8, groups] packed along
``out``; ``X.weight_shape``. NVFP4: ``X.weight_packed`` uint8, ``X.weight_global_scale`` divides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trt_eagle3.checkpoint.quantised.awq import group_columns
from trt_eagle3.checkpoint.quantised.claim import Claim
from trt_eagle3.checkpoint.quantised.module_patterns import ModulePatterns
from trt_eagle3.checkpoint.quantised.producer import Found, need
from trt_eagle3.checkpoint.quantised.weight import QuantisedRef, quantised_ref
from trt_eagle3.checkpoint.tensor_file import read_integers
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.errors import UserError, clip, quote

__all__ = ["CompressedTensors"]

_FORMATS = (
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mixed-precision",
)
_PACKED = {4: "int4_packed", 8: "int8_packed"}


@dataclass(frozen=True)
class _Group:
    """A group of ``config_groups``: its modules and their quantisation.

    ``linear``: the group covers every linear module that no other group names.
    """

    name: str
    targets: ModulePatterns
    linear: bool
    weights: Mapping[str, Any]
    activations: Mapping[str, Any] | None
    format: str

    def of(self, key: str, default: object = None) -> Any:
        """Return a setting of the weights."""
        value = self.weights.get(key)
        return default if value is None else value


class CompressedTensors:
    """Implements ``Producer``."""

    suffixes = frozenset(
        {
            "weight_scale",
            "weight_zero_point",
            "weight_packed",
            "weight_shape",
            "weight_g_idx",
            "weight_global_scale",
            "input_scale",
            "input_zero_point",
            "input_global_scale",
        }
    )

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        status = claim.get("quantization_status", "text", "compressed")
        claim.expect("quantization_status", status, "compressed", "frozen")
        if claim.get("sparsity_config.format", "text", "dense") != "dense":
            raise claim.error("sparsity_config: sparse weights: not supported")
        if claim.get("transform_config.config_groups", "object"):
            raise claim.error("transform_config: rotated weights: not supported")
        self.excluded = tuple(claim.get("ignore", "texts", []))
        groups = claim.get("config_groups", "object", {})
        self._groups = [self._group(name, values) for name, values in groups.items()]
        if not self._groups:
            raise claim.error("config_groups: expected at least one, got none")

    def _group(self, name: str, values: Any) -> _Group:
        weights = values.get("weights") if isinstance(values, dict) else None
        targets = values.get("targets", ["Linear"]) if isinstance(values, dict) else None
        texts = isinstance(targets, list) and all(isinstance(t, str) for t in targets)
        if not isinstance(weights, dict) or not texts:
            raise self._claim.error(f"config_groups.{clip(name, 80)}: expected targets and weights")
        stored = values.get("format") or self._claim.get("format", "text", "naive-quantized")
        self._claim.expect("format", stored, *_FORMATS)
        activations = values.get("input_activations")
        given = activations if isinstance(activations, dict) else None
        assert targets is not None
        for key in ("type", "num_bits", "strategy"):
            if not isinstance(weights.get(key), str | int | None):
                raise self._claim.error(
                    f"config_groups.{clip(name, 80)}: {key}: expected a word or a number, got "
                    f"{quote(weights[key], 80)}"
                )
        meant = ModulePatterns(targets, self._claim)
        return _Group(name, meant, "Linear" in targets, weights, given, stored)

    def weight(self, module: str, found: Found) -> QuantisedRef:
        group = self._group_of(module)
        kind = (group.of("type", "int"), group.of("num_bits", 8))
        if kind == ("float", 4):
            return self._nvfp4(module, found, group)
        if "weight_packed" in found:
            return self._packed(module, found, group)
        format_name = {("float", 8): "fp8", ("int", 8): "int8"}.get(kind)
        if format_name is None:
            raise self._unknown(group)
        roles = {"codes": "weight", "scale": "weight_scale"}
        tensors = {role: need(self._claim, module, found, name) for role, name in roles.items()}
        if format_name == "int8" and not group.of("symmetric", True):
            tensors["zero_point"] = need(self._claim, module, found, "weight_zero_point")
        if "input_scale" in found:
            tensors["input_scale"] = found["input_scale"]
        shape = _matrix(self._claim, tensors["codes"])
        block = self._block(group, shape)
        fp8 = format_name == "fp8" and _activations(group.activations) == "FP8, dynamic"
        place = (tensors, self._claim.directory)
        return quantised_ref(format_name, shape, block, *place, fp8_activations=fp8)

    def _packed(self, module: str, found: Found, group: _Group) -> QuantisedRef:
        bits = group.of("num_bits", 8)
        if group.of("type", "int") != "int" or bits not in _PACKED:
            raise self._unknown(group)
        roles = {"codes": "weight_packed", "scale": "weight_scale"}
        tensors = {role: need(self._claim, module, found, name) for role, name in roles.items()}
        if not group.of("symmetric", True):
            tensors["zero_point"] = need(self._claim, module, found, "weight_zero_point")
        if "weight_g_idx" in found:
            tensors["g_idx"] = found["weight_g_idx"]
        shape = self._told_shape(need(self._claim, module, found, "weight_shape"))
        block = self._block(group, shape)
        return quantised_ref(_PACKED[bits], shape, block, tensors, self._claim.directory)

    def _told_shape(self, ref: TensorRef) -> tuple[int, int]:
        """Read the values of ``weight_shape``."""
        told = read_integers(ref).tolist() if ref.shape == (2,) else []
        if len(told) != 2 or min(told) < 1:
            raise UserError(
                f"{self._claim.directory}: {clip(ref.name)}: expected [out, in], got {quote(told)}"
            )
        return told[0], told[1]

    def _nvfp4(self, module: str, found: Found, group: _Group) -> QuantisedRef:
        if group.of("group_size", 16) != 16:
            raise self._unknown(group)
        names = {
            "codes": "weight_packed",
            "scale": "weight_scale",
            "global_scale": "weight_global_scale",
        }
        tensors = {role: need(self._claim, module, found, name) for role, name in names.items()}
        rows, columns = _matrix(self._claim, tensors["codes"])
        if "input_global_scale" in found:
            tensors["input_scale"] = found["input_global_scale"]
        shape = (rows, 2 * columns)
        return quantised_ref("nvfp4_divided", shape, (1, 16), tensors, self._claim.directory)

    def _group_of(self, module: str) -> _Group:
        """Find the group of ``module``, by its name first, then by its class."""
        named = [g for g in self._groups if g.targets.first(module)]
        classes = [g for g in self._groups if g.linear]
        found = named or classes
        if not found:
            raise self._claim.error(
                f"config_groups: none targets {clip(module)}, whose weight is quantised"
            )
        if len(found) > 1 and any(g.weights != found[0].weights for g in found):
            raise self._claim.error(
                f"config_groups: {found[0].name} and {found[1].name} both target {clip(module)}"
            )
        return found[0]

    def _block(self, group: _Group, shape: tuple[int, int]) -> tuple[int, int]:
        strategy = group.of("strategy", "group" if group.of("group_size") else "tensor")
        if strategy == "block":
            block = group.of("block_structure", [])
            if isinstance(block, str):  # "128x128", written by older versions
                block = [int(n) if n.isdecimal() and len(n) < 10 else n for n in block.split("x")]
            wholes = isinstance(block, list) and len(block) == 2
            if not wholes or not all(isinstance(n, int) and n > 0 for n in block):
                raise self._claim.error(
                    f"block_structure: expected rows and columns, got {quote(block, 80)}"
                )
            return block[0], block[1]
        blocks = {
            "tensor": shape,
            "channel": (1, shape[1]),
            "group": (1, group_columns(self._claim, group.of("group_size", -1), shape[1])),
        }
        if strategy not in blocks:
            raise self._unknown(group)
        return blocks[strategy]

    def _unknown(self, group: _Group) -> UserError:
        keys = ("type", "num_bits", "strategy", "group_size")
        values = {key: group.of(key) for key in keys}
        settings = ", ".join(f"{k} {clip(v, 40)}" for k, v in values.items() if v is not None)
        return self._claim.error(f"config_groups.{clip(group.name, 80)}: {settings}: not supported")

    def provenance(self) -> str:
        version = self._claim.get("version", "any")
        by = f" {clip(version, 40)}" if isinstance(version, str) else ""
        return f"compressed-tensors{by}, format {self._groups[0].format}"

    def activations(self) -> str:
        return ", ".join(dict.fromkeys(_activations(g.activations) for g in self._groups))

    def kv_cache(self) -> str:
        scheme = self._claim.get("kv_cache_scheme", "object")
        return f"{scheme.get('num_bits', '?')} bits {scheme.get('type', '')}" if scheme else ""


def _activations(given: Mapping[str, Any] | None) -> str:
    if given is None:
        return "16-bit"
    kind = "FP" if given.get("type") == "float" else "INT"
    when = "dynamic" if given.get("dynamic") else "static"
    return f"{kind}{clip(given.get('num_bits', '?'), 8)}, {when}"


def _matrix(claim: Claim, ref: TensorRef) -> tuple[int, int]:
    if len(ref.shape) != 2:
        raise UserError(
            f"{claim.directory}: {clip(ref.name)}: expected a matrix, got {list(ref.shape)}"
        )
    return ref.shape[0], ref.shape[1]
