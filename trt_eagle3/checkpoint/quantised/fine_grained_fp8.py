"""``quant_method: fp8``: transformers' fine-grained FP8, as published by Qwen.

``X.weight`` e4m3 [out, in] times ``X.weight_scale_inv``, a scale per block of 128 x 128. Despite
its name, the scale multiplies. The block size is read from the config: for sizes that are not
multiples of it, shape / grid differs.
"""

from __future__ import annotations

from trt_eagle3.checkpoint.quantised.claim import Claim
from trt_eagle3.checkpoint.quantised.producer import Found, need
from trt_eagle3.checkpoint.quantised.weight import QuantisedRef, quantised_ref
from trt_eagle3.errors import UserError, clip

__all__ = ["FineGrainedFp8"]

_INPUT_SCALES = ("activation_scale", "input_scale")


class FineGrainedFp8:
    """Implements ``Producer``."""

    suffixes = frozenset({"weight_scale_inv", *_INPUT_SCALES})

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        claim.expect("fmt", claim.get("fmt", "text", "e4m3"), "e4m3", "float8_e4m3fn")
        scheme = claim.get("activation_scheme", "text", "dynamic")
        claim.expect("activation_scheme", scheme, "dynamic", "static")
        self._scheme = scheme
        self._block = claim.get("weight_block_size", "wholes")
        if self._block is not None and (len(self._block) != 2 or min(self._block) < 1):
            raise claim.error(f"weight_block_size: expected rows and columns, got {self._block}")
        keys = ("modules_to_not_convert", "ignored_layers")
        self.excluded = tuple(name for key in keys for name in claim.get(key, "texts", []))

    def weight(self, module: str, found: Found) -> QuantisedRef:
        codes = need(self._claim, module, found, "weight")
        scale = need(self._claim, module, found, "weight_scale_inv")
        if len(codes.shape) != 2:
            raise UserError(
                f"{self._claim.directory}: {clip(codes.name)}: expected [out, in], got "
                f"{list(codes.shape)}"
            )
        shape = (codes.shape[0], codes.shape[1])
        rows, columns = self._block or shape
        tensors = {"codes": codes, "scale": scale}
        calibrated = [found[name] for name in _INPUT_SCALES if name in found]
        tensors |= dict(zip(["input_scale"], calibrated, strict=False))
        dynamic = self._scheme == "dynamic"
        place = (tensors, self._claim.directory)
        return quantised_ref("fp8", shape, (rows, columns), *place, fp8_activations=dynamic)

    def provenance(self) -> str:
        return "transformers' fine-grained FP8"

    def activations(self) -> str:
        return f"FP8, {self._scheme}"

    def kv_cache(self) -> str:
        return ""
