"""Read an engine's contents from the build log of TensorRT for RTX. Without a GPU to load the
engine, there is no other source.

At verbosity DETAILED, the builder lists the engine's layers in one message, in the text form of the
engine inspector. It has a line per layer:
``Name: .., LayerType: .., Inputs: [ { Name: .. }, ..], ..``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from trt_eagle3.engine.trt.dialects.dialect import Inspection

__all__ = ["KEPT", "read_build_log"]

KEPT = re.compile(r"Layers:\n|Total Activation Memory: \d+ bytes|Layer: .* Scratch Memory: \d+")
"""The messages that ``read_build_log`` needs."""

_LAYER = re.compile(r"Name: (?P<name>.*?), LayerType: (?P<kind>\w+), (?P<rest>.*)")
_TENSORS = re.compile(r"(?P<side>Inputs|Outputs): \[(?P<list>| \{.*?\})\], ")
_TENSOR = re.compile(r"\{ Name: (?P<name>.*?), (?:Location|Dimensions): ")
_OPS = re.compile(r"\[ONNX Layer: ([^\]]+)\]")
_MEMORY = re.compile(r"Total Activation Memory: (\d+) bytes")
_SCRATCH = re.compile(r"Layer: (?P<name>.*?) Host Persistent: .* Scratch Memory: (?P<bytes>\d+)")
_LATER = re.compile(r" \[profile (?P<number>\d+)\]")  # the first profile has no number
_COPY = "Reformat"  # LayerType; a "Reformatting CopyNode" that does nothing is a NoOp


def read_build_log(told: Sequence[str]) -> Inspection:
    """Read the messages of one build that match ``KEPT``.

    Layers and their scratch memory are those of the first profile. Memory is the largest of all
    profiles. An input counts as copied if any profile copies it.
    """
    lines = [line for text in told if text.startswith("Layers:") for line in text.splitlines()]
    layers = [_layer(match) for line in lines if (match := _LAYER.fullmatch(line))]
    scratch = {m["name"]: int(m["bytes"]) for text in told if (m := _SCRATCH.match(text))}
    sized = [
        layer | ({"ScratchBytes": scratch[layer["Name"]]} if layer["Name"] in scratch else {})
        for layer in layers
        if not _LATER.search(layer["Name"])
    ]
    memory = max((int(m[1]) for text in told if (m := _MEMORY.match(text))), default=0)
    return Inspection(sized, memory, tuple(sorted(set(_copied(layers)))))


def _layer(match: re.Match[str]) -> dict[str, Any]:
    sides = {found["side"]: found["list"] for found in _TENSORS.finditer(match["rest"])}
    tensors = {
        side: [{"Name": tensor["name"]} for tensor in _TENSOR.finditer(sides.get(side, ""))]
        for side in ("Inputs", "Outputs")
    }
    ops = _OPS.findall(match["rest"])
    return {"Name": match["name"], "LayerType": match["kind"], **tensors, "Operators": ops}


def _copied(layers: Iterable[dict[str, Any]]) -> Iterable[str]:
    """Return the names of tensors that a layer copies, without their profile."""
    copies = (layer for layer in layers if layer["LayerType"] == _COPY)
    return (_LATER.sub("", tensor["Name"]) for layer in copies for tensor in layer["Inputs"])
