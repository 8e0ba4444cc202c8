"""Drawn dense layers: their packed weights, and what they compute in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.engine import capi
from trt_eagle3.engine.torch.packed import Fp8Weight, Int4Weight
from trt_eagle3.engine.torch.packing import pack_fp8, pack_int4

__all__ = ["KINDS", "LayerCase", "draw_layer", "reference", "worst_difference"]

KINDS = ("int4", "int4 zeros", "int4 float16", "fp8 channel", "fp8 tensor", "fp8 block")
EPSILON, OFFSET = 1e-6, 0.25


@dataclass(frozen=True)
class LayerCase:
    """Weights of o, gate_up, down and qkv: packed, and their ``values`` in float64.

    ``norms``: T [H], two. ``barrier``: int32 [1].
    """

    weights: tuple[Int4Weight, ...] | tuple[Fp8Weight, ...]
    values: tuple[Tensor, ...]
    norms: tuple[Tensor, Tensor]
    barrier: Tensor

    def rows(self, num_rows: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Draw attention's output and the residual stream."""
        gen = torch.Generator(self.barrier.device).manual_seed(seed)
        hidden, attended = self.values[0].shape
        sizes = ((num_rows, attended), (num_rows, hidden))
        device, dtype = self.barrier.device, self.norms[0].dtype
        x, residual = (torch.randn(*s, generator=gen, device=device).to(dtype) for s in sizes)
        return x, residual

    def run(
        self,
        x: Tensor,
        residual: Tensor,
        *,
        has_next: bool = True,
        prefetch_safe: bool = True,
        slots: int = 0,
    ) -> tuple[Tensor, ...]:
        """Launch the kernel with poisoned outputs. Returns middle, inner, total and perhaps y.

        Raises:
            NotImplementedError: no kernel on this chip, or for these sizes.
        """
        hidden, width, columns = len(self.values[0]), self.values[2].shape[1], len(self.values[3])

        def poisoned(n: int) -> Tensor:
            return torch.full((len(x), n), torch.nan, device=x.device, dtype=x.dtype)

        inner, y = poisoned(width), poisoned(columns) if has_next else None
        out = capi.DenseLayerRows(poisoned(hidden), poisoned(hidden), y)
        weights, norms = self.weights[: 3 + has_next], self.norms[: 1 + has_next]
        shared = {"epsilon": EPSILON, "weight_offset": OFFSET, "slots": slots}
        rows = (x, residual, norms)
        if isinstance(weights[0], Int4Weight):
            int4 = [(w.codes, w.scale, w.zero_point) for w in weights if isinstance(w, Int4Weight)]
            capi.dense_layer_int4(
                *rows,
                int4,
                self.barrier,
                **shared,
                prefetch_safe=prefetch_safe,
                out=out,
                inner=inner,
            )
        else:
            fp8 = [(w.codes, w.scale) for w in weights if isinstance(w, Fp8Weight)]
            capi.dense_layer_fp8(
                *rows,
                fp8,
                self.barrier,
                **shared,
                prefetch_safe=prefetch_safe,
                out=out,
                inner=inner,
            )
        found = (out.middle, inner, out.total)
        return found if out.y is None else (*found, out.y)


def draw_layer(
    kind: str, sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> LayerCase:
    """A layer of ``sizes``: A, H, I, N. Products are about as large as the stream."""
    attended, hidden, width, columns = sizes
    shapes = ((hidden, attended), (2 * width, hidden), (hidden, width), (columns, hidden))
    torch.manual_seed(sum(sizes))
    draw = _int4 if kind.startswith("int4") else _fp8
    weights, values = zip(*(draw(kind, *shape, device) for shape in shapes), strict=True)
    norms = torch.rand(2, hidden, device=device) + 0.5
    barrier = torch.zeros(1, dtype=torch.int32, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize()  # prefetch-safe
    return LayerCase(weights, values, tuple(norms.to(dtype)), barrier)


def _int4(kind: str, n: int, k: int, device: torch.device) -> tuple[Int4Weight, Tensor]:
    codes = torch.randint(0, 16, (n, k), device=device, dtype=torch.uint8)
    scale = (torch.rand(n, k // 128, device=device) + 0.1) * 0.3 * k**-0.5
    scale = scale.to(torch.float16 if "float16" in kind else torch.bfloat16)
    scale[::3, ::2] = 0.0
    zeros = torch.randint(0, 16, scale.shape, device=device, dtype=torch.uint8)
    zero_point = zeros if "zeros" in kind else None
    zero = zeros.double().repeat_interleave(128, 1) if zero_point is not None else 8.0
    values = (codes.double() - zero) * scale.double().repeat_interleave(128, 1)
    return Int4Weight(pack_int4(codes), scale, zero_point), values


def _fp8(kind: str, n: int, k: int, device: torch.device) -> tuple[Fp8Weight, Tensor]:
    codes = (torch.randn(n, k, device=device) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    rows = {"channel": n, "tensor": 1, "block": -(-n // 128)}[kind[4:]]
    columns = k // 128 if "block" in kind else 1
    scale = (torch.rand(rows, columns, device=device) + 0.1) * 0.02 * k**-0.5
    row = torch.arange(n, device=device) * (rows > 1) // (1 if rows == n else 128)
    column = torch.arange(k, device=device) // (128 if columns > 1 else k)
    values = codes.double() * scale.double()[row][:, column]
    return Fp8Weight(pack_fp8(codes), scale), values


def reference(
    x: Tensor, residual: Tensor, case: LayerCase, got: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return middle, inner, total and perhaps y: float64 between the roundings to T.

    Each is computed from those before it in ``got``, so that a rounding that falls the other way
    does not count again.
    """
    o, gate_up, down, qkv = case.values
    middle, inner, total = (t.double() for t in got[:3])
    has_next = len(got) == 4

    def rounded(y: Tensor) -> Tensor:
        return y.to(x.dtype).double()

    def norm(y: Tensor, weight: Tensor) -> Tensor:
        rms = torch.rsqrt(y.square().mean(-1, keepdim=True) + EPSILON)
        return rounded(y * rms * (weight.double() + OFFSET))

    gate, up = rounded(norm(middle, case.norms[0]) @ gate_up.T).chunk(2, -1)
    product = rounded(inner @ down.T)
    return (
        rounded(rounded(x.double() @ o.T) + residual.double()),
        rounded(gate * torch.sigmoid(gate) * up),
        rounded(middle + product) if has_next else product,
        *([rounded(norm(total, case.norms[1]) @ qkv.T)] if has_next else []),
    )


def worst_difference(y: Tensor, expected: Tensor) -> float:
    """Return the largest ``|y - expected|``, over ``|expected|`` and the row's root mean square."""
    rms = expected.square().mean(-1, keepdim=True).sqrt()
    return float(((y.double() - expected).abs() / (expected.abs() + rms)).nan_to_num(1e9).max())
