"""Scale and quantise one decoder layer's weights by its activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from trt_eagle3.calibration.activations import LayerActivations, RowStatistics, inputs_of_layer
from trt_eagle3.calibration.experts import make_experts
from trt_eagle3.calibration.rounding import INT4, InputRounding
from trt_eagle3.calibration.search import search_scales
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.checkpoint.tensor_file import tensor_content, write_tensors
from trt_eagle3.checkpoint.tensor_index import TensorRef, open_file, read_tensor
from trt_eagle3.engine.builder.calibration import ChannelScales, Fold, expert_names, folds_of_layer
from trt_eagle3.engine.builder.weight_quantiser import is_quantised_here, rows_of

__all__ = ["MadeLayer", "MadeWeights", "make_layer", "quantise_head"]

MadeWeights = dict[str, dict[str, TensorRef]]
"""``Calibration.weights``."""
_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class MadeLayer:
    """A quantised layer: its weights on disk, its scales by producer, and the number of experts
    quantised without data.
    """

    weights: MadeWeights = field(default_factory=dict)
    scales: Mapping[str, Tensor] = field(default_factory=dict)
    experts_without_data: int = 0


def make_layer(
    spec: TargetCheckpoint,
    index: int,
    weights: Mapping[str, Tensor],
    seen: LayerActivations,
    file: Path,
) -> MadeLayer:
    """Search scales, and write the layer's scaled weights as INT4 to ``file``.

    Args:
        weights: float32, by canonical name.
        seen: activations; the products of its inputs are released.
    """
    scales = ChannelScales(spec, dict(_searched(spec, index, weights, seen.inputs)))
    found = dict(_rounded(spec, index, weights, seen.inputs, scales))
    if seen.experts is None:
        return MadeLayer(_written(file, found), scales.by_producer)
    gate_up, down = expert_names(index)
    columns = scales.columns(gate_up)
    made = make_experts(weights[gate_up], weights[down], seen.experts, columns)
    found |= {**_named(gate_up, *made.gate_up), **_named(down, *made.down)}
    own = {**scales.by_producer, gate_up: made.scales}
    return MadeLayer(_written(file, found), own, made.without_data)


def _rounded(
    spec: TargetCheckpoint,
    index: int,
    weights: Mapping[str, Tensor],
    inputs: Mapping[str, RowStatistics],
    scales: ChannelScales,
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by name in the file, without those of experts."""
    for name, consumers in inputs_of_layer(spec.layers[index], index).items():
        own = [weight for weight in consumers if weight not in expert_names(index)]
        if own:
            rounding = InputRounding(inputs[name], scales.columns(own[0]))
            for weight in own:
                made = rounding.round(scales.scaled(weight, weights[weight]))
                yield from _named(weight, *made).items()


def _searched(
    spec: TargetCheckpoint,
    index: int,
    weights: Mapping[str, Tensor],
    inputs: Mapping[str, RowStatistics],
) -> Iterator[tuple[str, Tensor]]:
    """Yield scales by producer, without those of experts, which depend on each expert's rows."""
    of_weights = inputs_of_layer(spec.layers[index], index).items()
    statistics = {weight: inputs[name] for name, found in of_weights for weight in found}
    for fold in folds_of_layer(spec.layers[index], index):
        made = [name for name in fold.consumers if is_quantised_here(name)]
        if made[0] in statistics:
            consumers = [weights[name].flatten(0, -2) for name in made]
            found = search_scales(fold, consumers, statistics[made[0]], _norm(spec, fold))
            yield fold.producer, found.cpu()


def _norm(spec: TargetCheckpoint, fold: Fold) -> Tensor | None:
    """Return the producer's stored values if it is a norm's weight, else None."""
    ref = spec.tensors[fold.producer]
    return read_tensor(ref) if len(ref.shape) == 1 else None


def quantise_head(ref: TensorRef, inputs: RowStatistics, file: Path) -> MadeWeights:
    """Write the head as INT4 to ``file``, in slices of rows."""
    rounding = InputRounding(inputs, None)
    parts = [rounding.round(rows.to(inputs.device)) for rows in rows_of(ref)]
    codes, scales = (torch.cat(column) for column in zip(*parts, strict=True))
    return _written(file, _named(_HEAD, codes, scales))


def _named(weight: str, codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
    return {f"{weight}/{n}": t for n, t in zip(INT4.names, (codes, scales), strict=True)}


def _written(file: Path, tensors: Mapping[str, Tensor]) -> MadeWeights:
    write_tensors(file, {name: tensor_content(tensor) for name, tensor in tensors.items()})
    made: MadeWeights = {}
    for name, ref in open_file(file).items():
        weight, _, last = name.rpartition("/")
        made.setdefault(weight, {})[last] = ref
    return made
