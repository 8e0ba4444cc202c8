"""The target's reference, from its family: the one place that parity imports it from."""

from trt_eagle3.parity.target import (
    Rope,
    TargetLayer,
    TargetReference,
    VisionStates,
    add_deepstack,
)

__all__ = ["Rope", "TargetLayer", "TargetReference", "VisionStates", "add_deepstack"]
