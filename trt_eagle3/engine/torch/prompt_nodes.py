"""The nodes of a graph for a prompt's chunk, where few rows are read after the last attention.

The last layer needs keys and values of every row. Its attention, projections and norms are needed
for the rows in ``logit_rows`` only. Each of those nodes computes row by row, so rows can be picked
before them instead of after.

Shapes: B sequences, S rows of each, R rows picked of each, n = B * S.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from onnx import NodeProto, helper

from trt_eagle3.graph.ops import DOMAIN

__all__ = ["PROMPT_ATTENTION", "ROWS_OF_PROMPTS", "prompt_nodes"]

PROMPT_ATTENTION = "PromptAttention"
"""``TreeAttention`` with ``logit_rows`` as last input: writes the keys and values of all rows, and
attends from the picked rows: [B * R, Hq * D].
"""
ROWS_OF_PROMPTS = "features_out"
"""The output that has only a prompt's picked rows: [B, R, Hd]."""
_ROWS = "logit_rows"
_ROW_BY_ROW = {"Gemm", "AddRmsNorm", "SiluMul", "Add", "Mul", "Clip", "Cast", "AllReduce"}


def prompt_nodes(
    nodes: Sequence[NodeProto], constants: Collection[str], outputs: Collection[str]
) -> list[NodeProto] | None:
    """Return ``nodes`` with rows picked at the last attention; None if an output needs all rows.

    Args:
        constants: names of initializers. outputs: names of returned values.
    """
    last = max((i for i, node in enumerate(nodes) if node.op_type == "TreeAttention"), default=None)
    if last is None:
        return None
    picking = _Picking(nodes, constants, [*nodes[:last]])
    picking.attend(nodes[last])
    for node in nodes[last + 1 :]:
        if not picking.add(node):
            return None
    return None if picking.rows.intersection(outputs) else picking.made


@dataclass
class _Picking:
    """State of the rewrite.

    ``made``: nodes so far. ``rows``: values [n, ...] that are [B * R, ...] here. ``picked``: value
    -> its picked rows. ``same``: output of a ``PickRows`` -> its input, which is picked already.
    """

    nodes: Sequence[NodeProto]
    constants: Collection[str]
    made: list[NodeProto]
    rows: set[str] = field(default_factory=set)
    picked: dict[str, str] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)

    def attend(self, node: NodeProto) -> None:
        """Add the last attention, from the picked rows."""
        made = NodeProto()
        made.CopyFrom(node)
        made.op_type = PROMPT_ATTENTION
        made.input.append(_ROWS)
        self.made.append(made)
        self.rows.add(node.output[0])

    def add(self, node: NodeProto) -> bool:
        """Add a node after the attention; return False if it does not compute row by row."""
        if not self.rows.intersection(node.input):
            self.made.append(self._with_inputs(node, [self.same.get(i, i) for i in node.input]))
        elif node.op_type == "PickRows" and node.input[1] == _ROWS:
            self.same[node.output[0]] = node.input[0]
        elif node.op_type in _ROW_BY_ROW:
            self.made.append(self._with_inputs(node, [self._rows_of(i) for i in node.input]))
            self.rows.update(node.output)
        elif node.op_type == "Reshape" and node.output[0] == ROWS_OF_PROMPTS:
            self._reshape(node)
        else:
            return False
        return True

    def _with_inputs(self, node: NodeProto, inputs: Sequence[str]) -> NodeProto:
        made = NodeProto()
        made.CopyFrom(node)
        made.input[:] = inputs
        return made

    def _rows_of(self, name: str) -> str:
        """Return the name of a value's picked rows."""
        if name in self.constants or name in self.rows:
            return name
        if name not in self.picked:
            self.picked[name] = f"{name}.picked"
            inputs, outputs = [name, _ROWS], [self.picked[name]]
            self.made.append(helper.make_node("PickRows", inputs, outputs, domain=DOMAIN))
        return self.picked[name]

    def _reshape(self, node: NodeProto) -> None:
        """Reshape ``[B * R, Hd]`` to ``[B, R, Hd]``."""
        shape = next(n for n in self.nodes if node.input[1] in n.output)
        axes, size = f"{node.output[0]}.axes", f"{node.output[0]}.size"
        self.made += [
            helper.make_node("Shape", [_ROWS], [axes]),
            helper.make_node("Concat", [axes, shape.input[1]], [size], axis=0),
            helper.make_node("Reshape", [node.input[0], size], [node.output[0]]),
        ]
