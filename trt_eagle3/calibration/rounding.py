"""Round a weight to INT4, by its input or without data.

Shapes: a weight [N, K], G groups of columns.
"""

from __future__ import annotations

from torch import Tensor

from trt_eagle3.calibration.activations import RowStatistics
from trt_eagle3.calibration.compensation import compensated, inverse_factor
from trt_eagle3.engine.builder.weight_schemes import SCHEMES, int4_scales

__all__ = ["INT4", "InputRounding", "round_without_data"]

INT4 = SCHEMES["int4"]


class InputRounding:
    """Rounds the weights of one input, whose channels are divided by ``columns``.

    Releases the products of ``rows``.
    """

    def __init__(self, rows: RowStatistics, columns: Tensor | None) -> None:
        products = rows.take_mean_products()
        if columns is not None:
            own = columns.to(products.device)
            products.div_(own[:, None]).div_(own)
        self._importance = products.diagonal().clone()
        self._factor = inverse_factor(products, rows.num_rows)

    def round(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Round a weight float32 whose columns are already scaled.

        Returns codes int32 [N, K / 8] and scales bfloat16 [N, G], on the CPU.
        """
        made = compensated(weight, self._factor, self._importance)
        return _stored(made.values, made.scales)


def round_without_data(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each number to the nearest; returns as ``InputRounding.round``."""
    return _stored(weight, int4_scales(weight, INT4.block(weight.shape[1])))


def _stored(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    codes = INT4.codes(values, scales.float(), INT4.block(values.shape[1]))
    return codes.cpu(), scales.cpu()
