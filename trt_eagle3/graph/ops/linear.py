"""``y = x . weight^T``: a Gemm without a bias, for a plugin.

No graph of ours contains it: ``graph/trt_export.py`` substitutes it on request.

Shapes: x T [n, K]; weight T [N, K]; y T [n, N].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.graph.ops.kernel import Kernel, KernelCall
from trt_eagle3.graph.ops.op import Op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KERNEL", "LINEAR", "MAX_LINEAR_ROWS", "linear", "linear_call"]

MAX_LINEAR_ROWS = 64  # rows of ``x``

KERNEL = Kernel(
    name="linear",
    params="LinearParams",
    doc="""y = x . weight^T, for few rows of x, as in decoding. TE3_NOT_SUPPORTED for float32, for K
that is not a multiple of 32, and for more than 64 rows. On Hopper, 9 to 16 rows whose x does not
fit into shared memory are computed only if K is a multiple of 128. More than 16 rows also need a
weight of 64 MiB or more. Before Hopper x must fit.

prefetch_safe = 1 promises that no launch that may still be running writes the weight, so that it is
read while the launch before this one drains. Launches of this library start before the one before
them has ended. Any other launch, copy or CUDA graph waits for all earlier ones, and memory written
before it is prefetch-safe.""",
    tensors={"x": "T [M, K]", "weight": "T [N, K]", "y": "T [M, N]"},
    writes=("y",),
    scalars={"prefetch_safe": (int, "")},
    sizes="""
    int32_t num_rows;  // M
    int32_t inner;     // K
    int32_t outer;     // N
    DType dtype;
    """,
)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``x @ weight.T``."""
    from torch.nn import functional

    return functional.linear(x, weight)


def linear_call(
    x: Tensor, weight: Tensor, *, prefetch_safe: bool = False, out: Tensor | None = None
) -> KernelCall[Tensor]:
    """Build the kernel call for ``x @ weight.T`` with few rows, as in decoding.

    Args:
        x: T [M, K], M at most ``MAX_LINEAR_ROWS``.
        weight: T [N, K], K a multiple of 32.
        prefetch_safe: no launch that may still run writes ``weight``, so it is read while the
            launch before drains. Our launches start before the one before them has ended. Any other
            launch, copy or CUDA graph waits for all earlier ones. Memory written before it is
            prefetch-safe.
    Raises:
        ValueError: a tensor does not fit; the message names it.
        NotImplementedError: float32, too many rows, an unsupported K, or a shape that cuBLAS
            computes equally fast (``KERNEL.doc``).
    """
    out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    tensors = {"x": x, "weight": weight, "y": out}
    return KernelCall(KERNEL, tensors, {"prefetch_safe": prefetch_safe}, out)


LINEAR = Op(
    inputs={"": ("x", "weight")},
    outputs={"": ("y",)},
    lowering={"": "y = Gemm <transB = 1> (x, weight)"},
    lowering_17={"": "y = Gemm <transB = 1> (x, weight)"},
    torch_function=linear,
    kernel=KERNEL,
    plugin="Linear",
)
