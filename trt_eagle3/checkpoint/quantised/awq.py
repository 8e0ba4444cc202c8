"""``quant_method: awq``: AutoAWQ's ``gemm`` layout.

``X.qweight`` int32 [in, out / 8], packed along ``out`` in the order 0, 2, 4, 6, 1, 3, 5, 7;
``X.qzeros`` int32 [groups, out / 8], packed in the same order; ``X.scales`` [groups, out].
"""

from __future__ import annotations

from trt_eagle3.checkpoint.quantised.claim import Claim
from trt_eagle3.checkpoint.quantised.producer import Found, need
from trt_eagle3.checkpoint.quantised.weight import QuantisedRef, quantised_ref
from trt_eagle3.errors import UserError, clip, quote

__all__ = ["Awq", "group_columns"]


class Awq:
    """Implements ``Producer``."""

    suffixes = frozenset({"qweight", "qzeros", "scales"})

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        claim.expect("bits", claim.get("bits", "whole", claim.get("w_bit", "whole", 4)), 4)
        claim.expect("version", claim.get("version", "text", "gemm").lower(), "gemm")
        self._group = claim.values.get("group_size", claim.values.get("q_group_size", 128))
        self.excluded = tuple(claim.get("modules_to_not_convert", "texts", []))

    def weight(self, module: str, found: Found) -> QuantisedRef:
        roles = {"codes": "qweight", "scale": "scales", "zero_point": "qzeros"}
        tensors = {role: need(self._claim, module, found, name) for role, name in roles.items()}
        codes = tensors["codes"]
        if len(codes.shape) != 2:
            raise UserError(
                f"{self._claim.directory}: {clip(codes.name)}: expected [in, out / 8], got "
                f"{list(codes.shape)}"
            )
        shape = (codes.shape[1] * 8, codes.shape[0])
        block = (1, group_columns(self._claim, self._group, shape[1]))
        return quantised_ref("awq", shape, block, tensors, self._claim.directory)

    def provenance(self) -> str:
        return "AutoAWQ's layout"

    def activations(self) -> str:
        return "16-bit"

    def kv_cache(self) -> str:
        return ""


def group_columns(claim: Claim, group: object, columns: int) -> int:
    """Return the columns of a group; -1 or None is one group for all columns.

    Raises:
        UserError: the number is below 1 and not -1.
    """
    if group is None or group == -1:
        return columns
    if isinstance(group, bool) or not isinstance(group, int) or not 1 <= group < 1 << 31:
        raise claim.error(f"group_size: expected columns of a group, or -1, got {quote(group, 80)}")
    return min(group, columns)
