"""Op: the description of an op as data, in one file per op, without its CUDA code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
from onnx import parser

from trt_eagle3.graph.ops.kernel import Kernel, KernelCall

__all__ = ["DOMAIN", "OPSET", "OPSET_17", "Op", "Shapes"]

DOMAIN = "trt_eagle3"
OPSET = 24
OPSET_17 = 17  # the newest that TensorRT 8.6 reads

Shapes = Mapping[str, Sequence[int | str]]
"""Input name of an op -> its shape, with names for variable sizes."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op of our op set.

    Attributes:
        inputs, outputs: names per overload ("" is the basic form).
        attributes: names of the required attributes per overload.
        float_attributes: those that are floats; the others are integers.
        types: element types other than T: "int32", "float32", "bool", or a type variable ("C" for
            states, which need not have a compute type). An output has the type of the input with
            the same variable. T is the compute type.
        lowering: text of the reference lowering per overload, in ONNX's textual syntax.
        lowering_17: the same with operators of opset 17; TYPE stands for the compute type.
        torch_function: ``f(*inputs, **attributes) -> output or tuple of outputs`` with stock torch
            operations.
        kernel: the CUDA kernel that computes it, if the C library has one.
        kernel_call: ``f(*inputs, **attributes)`` as a call of ``kernel``.
        plugin: the TensorRT plugin that computes it.
        plugin_attributes: attributes that only the plugin's nodes have.
        plugin_values: computes their values from the element types (``TensorProto``) of the inputs
            and outputs.
        plugin_refuses: ``f(attributes, shapes, compute)`` with the shapes of constants and of the
            graph's inputs: why the plugin does not support a node; "" if it does.
    """

    inputs: Mapping[str, tuple[str, ...]]
    outputs: Mapping[str, tuple[str, ...]]
    attributes: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"": ()})
    float_attributes: tuple[str, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict)
    lowering: Mapping[str, str]
    lowering_17: Mapping[str, str]
    torch_function: Callable[..., Any]
    kernel: Kernel | None = None
    kernel_call: Callable[..., KernelCall[Any]] | None = None
    plugin: str
    plugin_attributes: tuple[str, ...] = ()
    plugin_values: Callable[[Sequence[int], Sequence[int]], Mapping[str, int]] = lambda *_: {}
    plugin_refuses: Callable[[Mapping[str, Any], Shapes, int], str] = lambda *_: ""

    @property
    def name(self) -> str:
        """The op's name in Python and C++, which its file and its torch function share."""
        return self.torch_function.__name__

    def overload(self, num_inputs: int) -> str:
        """Return the overload with ``num_inputs`` inputs."""
        return next(name for name, inputs in self.inputs.items() if len(inputs) == num_inputs)

    def output_types(self, inputs: Sequence[int], compute: int) -> list[int]:
        """Compute the element types of the outputs from those of the inputs (``TensorProto``)."""
        overload = self.overload(len(inputs))
        names = self.inputs[overload]
        bound = {self.types.get(name): dtype for name, dtype in zip(names, inputs, strict=True)}
        bound[None] = compute
        return [bound[self.types.get(name)] for name in self.outputs[overload]]

    def function(self, overload: str) -> onnx.FunctionProto:
        """Build the reference lowering as an ONNX function."""
        made = self._function(self.plugin, overload, OPSET, self.lowering[overload])
        made.overload = overload
        return made

    def function_17(self, overload: str, name: str, compute: int) -> onnx.FunctionProto:
        """Build the opset 17 lowering as a function ``name``, for the compute type ``compute``."""
        body = self.lowering_17[overload].replace("TYPE", str(compute))
        return self._function(name, overload, OPSET_17, body)

    def _function(self, name: str, overload: str, opset: int, body: str) -> onnx.FunctionProto:
        attributes = (
            f"<{', '.join(self.attributes[overload])}>" if self.attributes[overload] else ""
        )
        return parser.parse_function(f"""
            <domain: "{DOMAIN}", opset_import: ["" : {opset}]>
            {name} {attributes} ({", ".join(self.inputs[overload])})
            => ({", ".join(self.outputs[overload])}) {{ {body} }}
        """)
