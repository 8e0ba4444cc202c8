"""``quant_method: modelopt``: NVIDIA's ModelOpt, in ``config.json`` or ``hf_quant_config.json``.

FP8: ``X.weight`` e4m3 [out, in] times ``X.weight_scale`` of tensor, channel, or block of 128 x 128.
NVFP4: ``X.weight`` uint8 [out, in / 2], ``X.weight_scale`` e4m3 [out, in / 16], and
``X.weight_scale_2``, which multiplies.
"""

from __future__ import annotations

from typing import Any

from trt_eagle3.checkpoint.quantised.claim import Claim
from trt_eagle3.checkpoint.quantised.producer import Found, need
from trt_eagle3.checkpoint.quantised.weight import QuantisedRef, quantised_ref
from trt_eagle3.errors import UserError, clip, quote

__all__ = ["ModelOpt"]

_FP8_BLOCKS = {
    "FP8": None,
    "FP8_PER_CHANNEL_PER_TOKEN": "channel",
    "FP8_PB_WO": "block",
    "FP8_PB_REAL": "block",
}
_NVFP4 = ("NVFP4", "W4A16_NVFP4")
_ACTIVATIONS = {"FP8": "FP8, static", "NVFP4": "NVFP4", "FP8_PER_CHANNEL_PER_TOKEN": "FP8, dynamic"}


class ModelOpt:
    """Implements ``Producer``."""

    suffixes = frozenset({"weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale"})

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        self._algorithm = claim.get("quant_algo", "text", "")
        known = (*_FP8_BLOCKS, *_NVFP4, "MIXED_PRECISION")
        claim.expect("quant_algo", self._algorithm, *known)
        keys = ("exclude_modules", "ignore")
        self.excluded = tuple(name for key in keys for name in claim.get(key, "texts", []))
        self._layers: dict[str, Any] = claim.get("quantized_layers", "object", {})

    def weight(self, module: str, found: Found) -> QuantisedRef:
        if "pre_quant_scale" in found:
            raise UserError(
                f"{self._claim.directory}: {clip(module)}.pre_quant_scale: activations that are "
                "scaled before the product: not supported"
            )
        algorithm = self._algorithm_of(module)
        codes = need(self._claim, module, found, "weight")
        if len(codes.shape) != 2:
            raise UserError(
                f"{self._claim.directory}: {clip(codes.name)}: expected a matrix, got "
                f"{list(codes.shape)}"
            )
        tensors = {"codes": codes, "scale": need(self._claim, module, found, "weight_scale")}
        if "input_scale" in found:
            tensors["input_scale"] = found["input_scale"]
        rows, columns = codes.shape
        if algorithm in _NVFP4:
            tensors["global_scale"] = need(self._claim, module, found, "weight_scale_2")
            shape, block, name = (rows, 2 * columns), (1, 16), "nvfp4"
        else:
            blocks = {None: (rows, columns), "channel": (1, columns), "block": (128, 128)}
            shape, block, name = (rows, columns), blocks[_FP8_BLOCKS[algorithm]], "fp8"
        return quantised_ref(name, shape, block, tensors, self._claim.directory)

    def _algorithm_of(self, module: str) -> str:
        if self._algorithm != "MIXED_PRECISION":
            return str(self._algorithm)
        layer = self._layers.get(module)
        algorithm = layer.get("quant_algo") if isinstance(layer, dict) else None
        if algorithm not in (*_FP8_BLOCKS, *_NVFP4):
            raise self._claim.error(
                f"quantized_layers: {clip(module)}: expected one of "
                f"{', '.join((*_FP8_BLOCKS, *_NVFP4))}, got {quote(algorithm)}: not supported"
            )
        return str(algorithm)

    def provenance(self) -> str:
        version = self._claim.get("producer", "any")
        number = version.get("version") if isinstance(version, dict) else None
        return f"ModelOpt{f' {clip(number, 40)}' if number else ''}, {self._algorithm}"

    def activations(self) -> str:
        return _ACTIVATIONS.get(self._algorithm, "16-bit")

    def kv_cache(self) -> str:
        algorithm = self._claim.get("kv_cache_quant_algo", "text", "")
        scheme = self._claim.get("kv_cache_scheme", "object")
        return algorithm or (f"{scheme.get('num_bits', '?')} bits" if scheme else "")
