"""One decoder layer's weights, scaled and quantised as its activations say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from trt_eagle3.calibration.activations import RowStatistics, inputs_of_layer
from trt_eagle3.calibration.compensation import compensated, inverse_factor
from trt_eagle3.calibration.search import search_scales
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.checkpoint.tensor_file import tensor_content, write_tensors
from trt_eagle3.checkpoint.tensor_index import TensorRef, open_file, read_tensor
from trt_eagle3.engine.calibration import ChannelScales, Fold, folds_of_layer
from trt_eagle3.engine.weight_quantiser import rows_of
from trt_eagle3.engine.weight_schemes import SCHEMES

__all__ = ["MadeWeights", "layer_scales", "quantise_head", "quantise_layer"]

MadeWeights = dict[str, dict[str, TensorRef]]
"""``Calibration.weights``."""
_INT4 = SCHEMES["int4"]
_HEAD = "lm_head.weight"


def layer_scales(
    spec: TargetCheckpoint,
    index: int,
    weights: Mapping[str, Tensor],
    inputs: Mapping[str, RowStatistics],
) -> Iterator[tuple[str, Tensor]]:
    """Scales by their producer.

    Args:
        weights: float32, by canonical name. inputs: by the graph's name.
    """
    of_consumers = {of: inputs[name] for name, of in inputs_of_layer(index).items()}
    for fold in folds_of_layer(spec.layers[index], index):
        consumers = [weights[name] for name in fold.consumers]
        statistics = of_consumers[fold.consumers]
        yield fold.producer, search_scales(fold, consumers, statistics, _norm(spec, fold)).cpu()


def _norm(spec: TargetCheckpoint, fold: Fold) -> Tensor | None:
    """The producer's stored numbers where it is a norm's weight."""
    ref = spec.tensors[fold.producer]
    return read_tensor(ref) if len(ref.shape) == 1 else None


def quantise_layer(
    index: int,
    weights: Mapping[str, Tensor],
    inputs: Mapping[str, RowStatistics],
    scales: ChannelScales,
    file: Path,
) -> MadeWeights:
    """Write the layer's weights, as INT4 with ``scales`` in them, to ``file``."""
    found: dict[str, Tensor] = {}
    for name, consumers in inputs_of_layer(index).items():
        made = _Input(inputs[name], scales.columns(consumers[0]))
        for weight in consumers:
            found |= _named(weight, *made.quantise(scales.scaled(weight, weights[weight])))
    return _written(file, found)


def quantise_head(ref: TensorRef, inputs: RowStatistics, file: Path) -> MadeWeights:
    """Write the head as INT4 to ``file``, its rows piece by piece."""
    made, device = _Input(inputs, None), inputs.mean_products.device
    parts = [made.quantise(rows.to(device)) for rows in rows_of(ref)]
    codes, scales = (torch.cat(column) for column in zip(*parts, strict=True))
    return _written(file, _named(_HEAD, codes, scales))


class _Input:
    """What weights are multiplied with, its channels divided by ``columns``."""

    def __init__(self, rows: RowStatistics, columns: Tensor | None) -> None:
        products = rows.mean_products
        if columns is not None:
            own = columns.to(products.device)
            products = products / own[:, None] / own
        self._importance = products.diagonal().contiguous()
        self._factor = inverse_factor(products, rows.num_rows)

    def quantise(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of a weight with the columns' scales in it, on the CPU."""
        made = compensated(weight, self._factor, self._importance)
        codes = _INT4.codes(made.values, made.scales.float(), _INT4.block(weight.shape[1]))
        return codes.cpu(), made.scales.cpu()


def _named(weight: str, codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
    module = weight.removesuffix(".weight")
    return {f"{module}.{n}": t for n, t in zip(_INT4.names, (codes, scales), strict=True)}


def _written(file: Path, tensors: Mapping[str, Tensor]) -> MadeWeights:
    write_tensors(file, {name: tensor_content(tensor) for name, tensor in tensors.items()})
    made: MadeWeights = {}
    for name, ref in open_file(file).items():
        module, _, last = name.rpartition(".")
        made.setdefault(f"{module}.weight", {})[last] = ref
    return made
