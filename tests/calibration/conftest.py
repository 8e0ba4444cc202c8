"""The tiny target calibrated once, on questions of its own world with their answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tasks import examples
from torch import Tensor

from tests.shared_folder import made_once
from tests.tiny import TARGET
from trt_eagle3.calibration.prompt_rows import encode_prompts
from trt_eagle3.calibration.prompts import CalibrationPrompts, read_prompts
from trt_eagle3.calibration.run import calibrate
from trt_eagle3.checkpoint.experts import ExpertsRef
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.checkpoint.tensor_index import open_file
from trt_eagle3.engine.builder.calibration import Calibration, ChannelScales
from trt_eagle3.engine.builder.weight_quantiser import is_quantised_here
from trt_eagle3.families.registry import family_of, read_target
from trt_eagle3.multimodal import ModelInputs
from trt_eagle3.parity.reference.dequantise import read_values

MAX_LEN = 512


def write_prompts(file: Path, split: str, seed: int, count: int) -> Path:
    """A prompt file of ``count`` questions, one on each line, their images beside it."""
    lines = []
    for number, example in enumerate(examples(split, seed, count)):
        entry: dict[str, object] = {"prompt": example.prompt, "answer": example.answer}
        for key in ("images", "frames"):
            names = [
                f"{file.stem}-{number}-{key}-{i}.png" for i in range(len(getattr(example, key)))
            ]
            for name, picture in zip(names, getattr(example, key), strict=True):
                picture.save(file.parent / name)
            entry[key] = names
        lines.append(json.dumps(entry))
    file.write_text("\n".join(lines))
    return file


@pytest.fixture(scope="session")
def target() -> TargetCheckpoint:
    return read_target(TARGET)


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "train.jsonl", "train", 3, 16)


@pytest.fixture(scope="session")
def prompts(prompt_file: Path, target: TargetCheckpoint) -> CalibrationPrompts:
    return read_prompts(prompt_file, target, MAX_LEN)


@pytest.fixture(scope="session")
def heldout(
    tmp_path_factory: pytest.TempPathFactory, target: TargetCheckpoint
) -> CalibrationPrompts:
    file = tmp_path_factory.mktemp("heldout") / "heldout.jsonl"
    return read_prompts(write_prompts(file, "heldout", 7, 12), target, MAX_LEN)


@pytest.fixture(scope="session")
def calibration(
    target: TargetCheckpoint, prompts: CalibrationPrompts, tmp_path_factory: pytest.TempPathFactory
) -> Calibration:
    def make(folder: Path) -> None:
        torch.save(calibrate(target, prompts, "cpu", folder, head=True), folder / "calibration.pt")

    folder = made_once(tmp_path_factory, "calibration", make)
    found: Calibration = torch.load(folder / "calibration.pt", weights_only=False)
    return found


@dataclass(frozen=True)
class Forward:
    """Each layer's output [n, H] and the logits [n, V], over all rows of some prompts."""

    layers: Sequence[Tensor]
    logits: Tensor


def forward(spec: TargetCheckpoint, prompts: CalibrationPrompts) -> Forward:
    """As transformers computes it."""
    reference = family_of(spec).reference(spec, torch.float32, "cpu")
    rows = encode_prompts(reference, prompts)
    layers = []
    for layer in reference.layers():
        for prompt in rows:
            prompt.step(layer)
        layers.append(torch.cat([prompt.hidden for prompt in rows]))
    return Forward(layers, reference.head(reference.norm(layers[-1])))


def text_prompts(count: int, tokens: int) -> CalibrationPrompts:
    """Prompts of drawn tokens below 128, nothing to see in them."""
    positions = torch.arange(tokens, dtype=torch.int32).expand(3, -1).contiguous()
    none, visual = torch.zeros(0, 3, dtype=torch.int64), torch.zeros(tokens, dtype=torch.bool)
    ids = torch.randint(0, 128, (count, tokens), generator=torch.Generator().manual_seed(0))
    return CalibrationPrompts([ModelInputs(x, positions, 0, (), none, visual) for x in ids], count)


def scaled_target(spec: TargetCheckpoint, scales: ChannelScales, file: Path) -> TargetCheckpoint:
    """``spec`` with the scales in its weights and nothing rounded; what stays 16-bit as stored."""
    dense = {n: read_values(ref) for n, ref in spec.tensors.items()}
    made = {n: scales.scaled(n, t.float()) for n, t in dense.items()}
    for name, tensor in dense.items():
        if not is_quantised_here(name):
            made[name] = made[name].to(tensor.dtype).float()
    save_file({n.replace("/", "."): t.contiguous() for n, t in made.items()}, file)
    index = open_file(file)
    tensors = {
        n: ExpertsRef.of(
            ref.shape, [replace(index[n], shape=(ref.shape[0] * ref.shape[1], ref.shape[2]))]
        )
        if isinstance(ref, ExpertsRef)
        else index[n]
        for n, ref in spec.tensors.items()
    }
    return replace(spec, tensors=tensors)
