"""The ``model.onnx`` files of a bundle whose backend runs graphs without compiling them."""

from __future__ import annotations

from pathlib import Path

import onnx

from trt_eagle3.errors import UserError

__all__ = ["check_graph_file", "tensors_inside"]


def check_graph_file(folder: Path) -> None:
    """Check that ``model.onnx`` can be read and holds a graph.

    Raises:
        UserError: naming the file.
    """
    file = folder / "model.onnx"
    try:
        graph = onnx.load(file, load_external_data=False).graph
    except Exception as error:  # protobuf's errors have no base class but Exception
        raise UserError(
            f"{file}: not readable: {' '.join(str(error).split())}. Rebuild the bundle."
        ) from error
    if not graph.output:
        raise UserError(f"{file}: holds no graph. Rebuild the bundle.")


def tensors_inside(folder: Path) -> frozenset[str]:
    """Return the outputs of all nodes of the graph in ``folder``; empty if there is no graph."""
    file = folder / "model.onnx"
    if not file.is_file():
        return frozenset()
    nodes = onnx.load(file, load_external_data=False).graph.node
    return frozenset(output for node in nodes for output in node.output)
