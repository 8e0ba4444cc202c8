"""``out = silu(gate) * up``; gate and up are the two halves of gate_up's columns.

Shapes: gate_up T [n, 2 W]; out T [n, W].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.graph.ops.kernel import Kernel, KernelCall
from trt_eagle3.graph.ops.op import Op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KERNEL", "SILU_MUL", "silu_mul", "silu_mul_call"]

KERNEL = Kernel(
    name="silu_mul",
    params="SiluMulParams",
    doc="out = silu(gate) * up.",
    tensors={"gate_up": "T [n, 2 * width], gate first", "out": "T [n, width]"},
    writes=("out",),
    scalars={},
    sizes="""
    int32_t num_rows;
    int32_t width;
    DType dtype;
    """,
)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` of the halves of ``gate_up [n, 2 W]``: ``[n, W]``."""
    from torch.nn import functional

    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def silu_mul_call(gate_up: Tensor, out: Tensor | None = None) -> KernelCall[Tensor]:
    """Build the kernel call: ``silu(gate) * up`` of T [n, 2 * width], gate first, T [n, width].

    Raises:
        ValueError: a tensor does not fit; the message names it.
    """
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2) if out is None else out
    return KernelCall(KERNEL, {"gate_up": gate_up, "out": out}, {}, out)


SILU_MUL = Op(
    inputs={"": ("gate_up",)},
    outputs={"": ("out",)},
    lowering={
        "": """
            gate, up = Split <axis = -1, num_outputs = 2> (gate_up)
            opened = Sigmoid (gate)
            silu = Mul (gate, opened)
            out = Mul (silu, up)
        """
    },
    lowering_17={
        "": """
            gate, up = Split <axis = -1> (gate_up)
            opened = Sigmoid (gate)
            silu = Mul (gate, opened)
            out = Mul (silu, up)
        """
    },
    torch_function=silu_mul,
    kernel=KERNEL,
    kernel_call=silu_mul_call,
    plugin="SiluMul",
)
