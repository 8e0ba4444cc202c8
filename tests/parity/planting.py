"""Where faults are planted: in a bundle's files, at the edge of its graphs, in what the program
makes of prompts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor

from tests.tiny import DRAFT, TARGET
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.decode.loaded_bundle import LoadedBundle, open_graph_of
from trt_eagle3.decode.request.answer import Answer
from trt_eagle3.decode.request.preprocess import PromptPreprocessor
from trt_eagle3.decode.request.prompt import Prompt
from trt_eagle3.decode.request.request import Request
from trt_eagle3.engine.bundle.read import read_bundle
from trt_eagle3.engine.runtime.session import Session
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.build_graphs import build_graphs
from trt_eagle3.multimodal import ModelInputs
from trt_eagle3.multimodal.caller import NO_CALLER, Caller
from trt_eagle3.parity.record.engine import RecordingEngine, RecordingSessionFactory
from trt_eagle3.spec import StateSpec, TargetSpec

Tensors = dict[str, Tensor]
Given = Callable[["Seam", Tensors], Tensors]
"""What a graph is given, changed."""
Gave = Callable[["Seam", Mapping[str, Tensor], Tensors], Tensors]
"""What a graph gave, changed; the mapping is what it was given."""


@dataclass
class Seam(Session):
    """A session that is given, or gives, something else."""

    session: Session
    given: Given | None = None
    gave: Gave | None = None
    bound: Tensors = field(default_factory=dict)

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return self.session.states

    def bind(self, name: str, tensor: Tensor) -> None:
        self.bound[name] = tensor
        self.session.bind(name, tensor)

    def run(self, inputs: Mapping[str, Tensor]) -> Tensors:
        changed = self.given(self, dict(inputs)) if self.given else dict(inputs)
        outputs = self.session.run(changed)
        return self.gave(self, changed, outputs) if self.gave else outputs


@dataclass
class Planted:
    """A copy of the tiny bundle in which one fault is planted.

    ``outside``: seams that the record sees (the program around the graphs errs); ``inside``: those
    that it does not (the graph errs). By graph. ``fixed_shapes``: of batches, as on CUDA, so that
    steps may be launched ahead.
    """

    bundle: Path
    patch: pytest.MonkeyPatch
    outside: dict[str, Seam] = field(default_factory=dict)
    inside: dict[str, Seam] = field(default_factory=dict)
    inputs: Callable[[ModelInputs], ModelInputs] = lambda inputs: inputs
    prompt: Callable[[Prompt], Prompt] = lambda prompt: prompt
    request: Callable[[Request], Request] = lambda request: request
    fixed_shapes: bool = False
    spec: TargetCheckpoint = field(default_factory=lambda: SPEC)
    manifest: DraftManifest = field(default_factory=lambda: MANIFEST)

    def engine(self) -> RecordingEngine:
        """The engine with the fault in it."""
        return FaultyEngine(self)

    def rebuild(
        self, graph: str, target: TargetSpec | None = None, draft: DraftManifest | None = None
    ) -> None:
        """Write ``graph`` as it would be of another target or draft."""
        spec, manifest = target or self.spec, draft or self.manifest
        engine = read_bundle(self.bundle).config.engine
        model = build_graphs(spec, manifest, engine, self._locate)[graph]
        self.write(f"{graph}/model.onnx", model.SerializeToString())

    def edit(self, graph: str, change: Callable[[onnx.ModelProto], None]) -> None:
        """Change the nodes of ``graph``."""
        model = onnx.load(self.bundle / graph / "model.onnx", load_external_data=False)
        change(model)
        self.write(f"{graph}/model.onnx", model.SerializeToString())

    def reweigh(self, role: str, ref: TensorRef, change: Callable[[Tensor], Tensor]) -> None:
        """Change the values of a weight in the bundle; its header stays."""
        file = f"weights/{role}/{ref.file.name}"
        data = bytearray((self.bundle / file).read_bytes())
        dtype = {"BF16": torch.bfloat16, "I64": torch.int64, "F32": torch.float32}[ref.dtype]
        place = slice(ref.offset, ref.offset + ref.num_bytes)
        old = torch.frombuffer(data[place], dtype=dtype).view(ref.shape)
        data[place] = change(old.clone()).to(dtype).contiguous().view(torch.uint8).numpy().tobytes()
        self.write(file, bytes(data))

    def record(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change ``bundle.json``."""
        raw = json.loads((self.bundle / "bundle.json").read_text())
        change(raw)
        self.write("bundle.json", json.dumps(raw).encode())

    def _locate(self, ref: TensorRef) -> str:
        role = "draft" if ref.file.parent == self.manifest.path else "target"
        return f"weights/{role}/{ref.file.name}"

    def write(self, name: str, data: bytes) -> None:
        """A new file in place of the old one, which other bundles share."""
        (self.bundle / name).unlink()
        (self.bundle / name).write_bytes(data)


_OPENED: dict[tuple[str | int, ...], Session] = {}


def _opened(bundle: LoadedBundle, graph: str, intermediates: Sequence[str]) -> Session:
    """A session of ``graph``, opened once for all bundles that share its files: a fault changes
    few, and what is bound is bound anew by each engine.
    """
    roles = ("target",) if graph in {"target", "vision"} else ("target", "draft")
    weights = [file for role in roles for file in (bundle.path / "weights" / role).iterdir()]
    files = [file.stat() for file in (bundle.path / graph / "model.onnx", *sorted(weights))]
    if any(file.st_nlink == 1 for file in files):  # it is the fault's
        return open_graph_of(bundle, graph, intermediates)
    key = (graph, *intermediates, *(file.st_ino for file in files))
    if key not in _OPENED:
        _OPENED[key] = open_graph_of(bundle, graph, intermediates)
    return _OPENED[key]


class FaultySessionFactory(RecordingSessionFactory):
    """Opens sessions with a planted fault."""

    def __init__(self, planted: Planted) -> None:
        super().__init__()
        self._planted = planted

    def __call__(
        self, bundle: LoadedBundle, graph: str, intermediates: Sequence[str] = ()
    ) -> Session:
        # a fault around the graph: replayed forwards hold it already
        session = super().__call__(bundle, graph, intermediates)
        seam = self._planted.outside.get(graph)
        return Seam(session, seam.given, seam.gave) if seam and not intermediates else session

    def _open(self, bundle: LoadedBundle, graph: str, intermediates: Sequence[str]) -> Session:
        session = _opened(bundle, graph, intermediates)
        seam = self._planted.inside.get(graph)
        return Seam(session, seam.given, seam.gave) if seam else session


class FaultyPreprocessor(PromptPreprocessor):
    """Makes prompts with a planted fault."""

    def __init__(self, bundle: LoadedBundle, planted: Planted) -> None:
        super().__init__(
            bundle.spec,
            bundle.processor,
            bundle.limits,
            lambda: bundle.grammars,
            bundle.device,
            digests=True,
        )
        self._planted = planted

    def model_inputs(self, request: Request, caller: Caller = NO_CALLER) -> ModelInputs:
        return self._planted.inputs(super().model_inputs(request, caller))

    def prompt(self, inputs: ModelInputs, client: str = "") -> Prompt:
        return self._planted.prompt(super().prompt(inputs, client))


class FaultyEngine(RecordingEngine):
    """An engine with a planted fault."""

    def __init__(self, planted: Planted) -> None:
        super().__init__(planted.bundle, FaultySessionFactory(planted))
        self._planted = planted
        if planted.fixed_shapes:
            self.bundle = replace(self.bundle, fixed_shapes=True)
        self._preprocessor = self._make_preprocessor()

    def _make_preprocessor(self) -> PromptPreprocessor:
        return FaultyPreprocessor(self.bundle, self._planted)

    def submit(self, request: Request) -> Answer:
        return super().submit(self._planted.request(request))


def plant_in(source: Path, folder: Path, patch: pytest.MonkeyPatch) -> Planted:
    """A copy of the bundle ``source`` in ``folder``, files shared until they are changed."""
    copy = folder / "bundle"
    shutil.copytree(source, copy, copy_function=lambda a, b: Path(b).hardlink_to(a))
    return Planted(copy, patch)


SPEC = read_target(TARGET)
MANIFEST = read_draft(DRAFT, SPEC)
