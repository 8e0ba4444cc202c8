"""Calibrate: from a 16-bit target and prompts to a ``Calibration``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trt_eagle3.calibration.activations import LayerActivations, RowStatistics
from trt_eagle3.calibration.layer import MadeLayer, MadeWeights, make_layer, quantise_head
from trt_eagle3.calibration.prompt_rows import CalibrationRows, encode_prompts
from trt_eagle3.calibration.prompts import CalibrationPrompts
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.engine.builder.calibration import Calibration, ChannelScales
from trt_eagle3.families.registry import family_of

if TYPE_CHECKING:
    from trt_eagle3.parity.reference.target import TargetLayer, TargetReference

__all__ = ["calibrate"]


def calibrate(
    spec: TargetCheckpoint,
    prompts: CalibrationPrompts,
    device: str,
    scratch: Path,
    show: Callable[[str], object] = str,
    *,
    weights: bool = True,
    head: bool = False,
) -> Calibration:
    """Run the target over ``prompts`` in float32, and quantise each layer to INT4.

    Layers are streamed from the checkpoint. Each is quantised by its activations.

    Args:
        device: ``cpu`` or ``cuda``.
        scratch: a folder for the weights of each layer.
        show: called with descriptions of the progress.
        weights: quantise the weights; else only keys and values are measured.
        head: quantise the head too.
    Raises:
        UserError: a file of the checkpoint cannot be read, or the disk is full.
    """
    reference = family_of(spec).reference(spec, torch.float32, device)
    show(f"images of {prompts}")
    rows = encode_prompts(reference, prompts)
    run = _Run(spec, reference, rows, prompts.num_tokens, scratch)
    for layer in reference.layers():
        show(f"decoder layer {layer.index + 1} of {spec.num_layers}")
        run.step(layer, weights=weights)
        del layer  # before the next one is loaded
    if head:
        show("head")
        run.quantise_head()
    return run.result(len(prompts.inputs))


@dataclass
class _Run:
    """Runs the layers in order; every prompt's rows pass through each layer."""

    spec: TargetCheckpoint
    reference: TargetReference
    prompts: list[CalibrationRows]
    num_tokens: int
    scratch: Path
    scales: dict[str, Tensor] = field(default_factory=dict)
    weights: MadeWeights = field(default_factory=dict)
    k_amax: dict[int, Tensor] = field(default_factory=dict)
    v_amax: dict[int, Tensor] = field(default_factory=dict)
    experts_without_data: int = 0

    def step(self, layer: TargetLayer, *, weights: bool) -> None:
        """Run a layer, and quantise it."""
        index = layer.index
        found = LayerActivations(self.spec.layers[index], index, self.num_tokens, weights=weights)
        for prompt in self.prompts:
            found.add(prompt.step(layer))
        made = MadeLayer()
        if weights:
            file = self.scratch / f"layer-{index}.safetensors"
            made = make_layer(self.spec, index, layer.weights(), found, file)
        self.weights |= made.weights
        self.scales |= made.scales
        self.experts_without_data += made.experts_without_data
        if found.kv is not None:
            self.k_amax[index] = found.kv.k_amax
            values = made.scales.get(f"layers.{index}.self_attn.v_proj.weight")
            self.v_amax[index] = found.kv.v_amax(values)

    def quantise_head(self) -> None:
        """Quantise the head by the rows of the last norm."""
        inputs = RowStatistics(self.num_tokens)
        for prompt in self.prompts:
            inputs.add(self.reference.norm(prompt.hidden))
        ref = self.spec.tensors["lm_head.weight"]
        file = self.scratch / "head.safetensors"
        self.weights |= quantise_head(ref, inputs, file)

    def result(self, num_prompts: int) -> Calibration:
        """Return the calibration."""
        return Calibration(
            ChannelScales(self.spec, self.scales),
            self.weights,
            self.k_amax,
            self.v_amax,
            num_prompts,
            self.num_tokens,
            self.experts_without_data,
        )
