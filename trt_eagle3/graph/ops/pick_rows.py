"""Pick the rows of x that ``rows`` lists, counted within each batch row.

``y[b R + r] = x[b S + rows[b, r]]``. A single Gather would suffice, but TensorRT 8.6 cannot build
one beside plugins.

Shapes: x T [N, H]; rows int32 [B, R]; y T [B * R, H].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.graph.ops.op import Op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PICK_ROWS", "pick_rows"]


def pick_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Pick the rows of ``x [N, H]`` at ``rows [B, R]``: ``[B * R, H]``.

    ``rows`` count within each of the B batch rows.
    """
    by_row = x.view(rows.shape[0], -1, x.shape[1])
    return by_row.gather(1, rows.long()[..., None].expand(-1, -1, x.shape[1])).flatten(0, 1)


PICK_ROWS = Op(
    inputs={"": ("x", "rows")},
    outputs={"": ("y",)},
    types={"rows": "int32"},
    lowering={
        "": """
            minus_one = Constant <value_ints = [-1]> ()
            last = Constant <value_ints = [-1]> ()
            batch = Shape <start = 0, end = 1> (rows)
            width = Shape <start = 1> (x)
            by_row_shape = Concat <axis = 0> (batch, minus_one, width)
            by_row = Reshape (x, by_row_shape)
            index_2d = Cast <to = 7> (rows)
            index = Unsqueeze (index_2d, last)
            picked = GatherND <batch_dims = 1> (by_row, index)
            flat_shape = Concat <axis = 0> (minus_one, width)
            y = Reshape (picked, flat_shape)
        """
    },
    lowering_17={
        "": """
            any = Constant <value_ints = [-1]> ()
            first = Constant <value_ints = [0]> ()
            last = Constant <value_ints = [1]> ()
            axis_2 = Constant <value_ints = [2]> ()
            rows_shape = Shape (rows)
            batch = Gather <axis = 0> (rows_shape, first)
            x_shape = Shape (x)
            width = Gather <axis = 0> (x_shape, last)
            by_row_shape = Concat <axis = 0> (batch, any, width)
            by_row = Reshape (x, by_row_shape)
            index_2d = Cast <to = 7> (rows)
            index = Unsqueeze (index_2d, axis_2)
            picked = GatherND <batch_dims = 1> (by_row, index)
            flat_shape = Concat <axis = 0> (any, width)
            y = Reshape (picked, flat_shape)
        """
    },
    torch_function=pick_rows,
    plugin="PickRows",
)
