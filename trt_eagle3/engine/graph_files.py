"""Graphs that are run as they are: written beside whole weight files, and checked on disk."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import onnx

from trt_eagle3.atomic_io import create_file, place_file
from trt_eagle3.engine.build_job import BuildJob, Written
from trt_eagle3.engine.bundle import EngineRecord
from trt_eagle3.engine.weight_locations import FileLocations
from trt_eagle3.errors import UserError
from trt_eagle3.graph.activations import write_activations

__all__ = ["check_graph_file", "tensors_inside", "write_graphs"]


def write_graphs(folder: Path, job: BuildJob, package: str) -> Written:
    """Write every graph as ``<name>/model.onnx``, and the weight files that it refers to.

    Args:
        package: the Python package that will run them, whose version is recorded.
    """
    locations = FileLocations(job.spec, job.manifest, job.reference_weights)
    for name, model in job.make_graphs(folder, locations.resolve).items():
        write_activations(model, job.config.engine.activations)
        create_file(folder / name / "model.onnx", model.SerializeToString())
    job.begin("weights")
    files = () if job.reference_weights else locations.locations.items()
    elsewhere = [(file, folder / to) for file, to in files if not (folder / to).exists()]
    placed = tuple(place_file(file, to) for file, to in elsewhere)
    engine = job.config.engine
    versions = {"onnx": version("onnx"), package: version(package)}
    record = EngineRecord(backend=engine.backend, dtype=engine.dtype, versions=versions)
    return Written(locations, record, placed)


def check_graph_file(folder: Path) -> None:
    """Refuse a ``model.onnx`` that cannot be read or holds no graph.

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
    """Outputs of all nodes of the graph in ``folder``; empty if there is none."""
    file = folder / "model.onnx"
    if not file.is_file():
        return frozenset()
    nodes = onnx.load(file, load_external_data=False).graph.node
    return frozenset(output for node in nodes for output in node.output)
