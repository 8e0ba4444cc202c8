"""``quant_method: gptq``: AutoGPTQ's and GPTQModel's layout.

``X.qweight`` int32 [in / 8, out], packed along ``in``; ``X.qzeros`` int32 [groups, out / 8], in
version 1 each minus 1; ``X.scales`` [groups, out]; ``X.g_idx`` int32 [in], group of each column.
"""

from __future__ import annotations

from trt_eagle3.checkpoint.quantised.awq import group_columns
from trt_eagle3.checkpoint.quantised.claim import Claim
from trt_eagle3.checkpoint.quantised.producer import Found, need
from trt_eagle3.checkpoint.quantised.weight import QuantisedRef, quantised_ref
from trt_eagle3.checkpoint.tensor_file import read_integers
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.errors import UserError, clip

__all__ = ["Gptq"]

_EIGHTS = {"gptq": 0x77777777, "gptq_v2": 0x88888888}
"""Eight zero points of 8 in an element of ``qzeros``."""


class Gptq:
    """Implements ``Producer``."""

    suffixes = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        claim.expect("bits", claim.get("bits", "whole", 4), 4)
        layout = claim.get("checkpoint_format", "text", "gptq")
        claim.expect("checkpoint_format", layout, *_EIGHTS)
        self._layout = layout
        self._symmetric = claim.get("sym", "flag", False)
        self._group = claim.values.get("group_size", 128)
        excluded = claim.get("dynamic", "object", {})
        self.excluded = tuple(f"re:{k[2:]}" for k in excluded if k.startswith("-:"))
        if any(not key.startswith("-:") for key in excluded):
            raise claim.error("dynamic: settings of single modules: not supported")

    def weight(self, module: str, found: Found) -> QuantisedRef:
        roles = {"codes": "qweight", "scale": "scales", "zero_point": "qzeros"}
        tensors = {role: need(self._claim, module, found, name) for role, name in roles.items()}
        tensors |= {"g_idx": found["g_idx"]} if "g_idx" in found else {}
        codes = tensors["codes"]
        if len(codes.shape) != 2:
            raise UserError(
                f"{self._claim.directory}: {clip(codes.name)}: expected [in / 8, out], got "
                f"{list(codes.shape)}"
            )
        shape = (codes.shape[1], codes.shape[0] * 8)
        block = (1, group_columns(self._claim, self._group, shape[1]))
        made = quantised_ref(self._layout, shape, block, tensors, self._claim.directory)
        if self._symmetric:
            self._check_symmetric(tensors["zero_point"])
        return made

    def _check_symmetric(self, zeros: TensorRef) -> None:
        """Check that all zero points are 8. Otherwise the version is the other one."""
        if not (read_integers(zeros) & 0xFFFFFFFF == _EIGHTS[self._layout]).all():
            raise UserError(
                f"{self._claim.directory}: {clip(zeros.name)}: {self._claim.place} has sym, "
                f"and as {self._layout} its zero points are not 8. Correct sym or "
                "checkpoint_format."
            )

    def provenance(self) -> str:
        meta = self._claim.get("meta.quantizer", "any")
        by = f", by {clip(', '.join(map(str, meta)), 80)}" if isinstance(meta, list) else ""
        return f"GPTQ, {self._layout}{by}"

    def activations(self) -> str:
        return "16-bit"

    def kv_cache(self) -> str:
        return ""
