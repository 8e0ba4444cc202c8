"""Write graphs that run without compilation, next to whole weight files."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from trt_eagle3.atomic_io import create_file, place_file
from trt_eagle3.engine.builder.job import BuildJob, Written
from trt_eagle3.engine.bundle.record import EngineRecord
from trt_eagle3.engine.bundle.weight_locations import FileLocations
from trt_eagle3.graph.activations import write_activations

__all__ = ["write_graphs"]


def write_graphs(folder: Path, job: BuildJob, package: str) -> Written:
    """Write every graph as ``<name>/model.onnx``, and the weight files that it refers to.

    Args:
        package: the Python package that runs them; its version is recorded.
    """
    locations = FileLocations(job.spec, job.manifest, job.reference_weights)
    for name, model in job.make_graphs(folder, locations.resolve).items():
        write_activations(model, job.engine.activations)
        create_file(folder / name / "model.onnx", model.SerializeToString())
    job.begin("weights")
    files = () if job.reference_weights else locations.locations.items()
    elsewhere = [(file, folder / to) for file, to in files if not (folder / to).exists()]
    placed = tuple(place_file(file, to) for file, to in elsewhere)
    engine = job.engine
    versions = {"onnx": version("onnx"), package: version(package)}
    record = EngineRecord(backend=engine.backend, dtype=engine.dtype, versions=versions)
    return Written(locations, record, placed)
