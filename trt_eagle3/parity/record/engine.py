"""Recording: the inputs and outputs of an engine's graphs while it answers, without changing them.

Shapes: B rows, S new tokens per row, M masked tail, R rows of logits, V vocab.
Shapes: B rows, S new tokens per row, M masked tail, R rows of logits, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.config import LimitsConfig
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.loaded_bundle import LoadedBundle, open_graph_of
from trt_eagle3.decode.metrics import Meter
from trt_eagle3.decode.policy.protocol import FixedPolicy, Policy
from trt_eagle3.decode.policy.read import read_policy
from trt_eagle3.decode.request.answer import Answer
from trt_eagle3.decode.request.preprocess import PromptPreprocessor
from trt_eagle3.decode.request.request import Request
from trt_eagle3.decode.speculation.drafter import Drafter
from trt_eagle3.decode.speculation.tree import configured_tree
from trt_eagle3.engine.bundle.read import read_bundle
from trt_eagle3.engine.bundle.record import BundleRecord
from trt_eagle3.engine.runtime.backend import backend_named
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.engine.runtime.session import Capabilities, Continuation, Reduction, Session
from trt_eagle3.multimodal import Processor
from trt_eagle3.multimodal.media_cache import MEDIA_CACHE
from trt_eagle3.spec import SparseMoe, StateSpec, TargetSpec

__all__ = [
    "ROUTER",
    "Recording",
    "RecordedForward",
    "RecordingSessionFactory",
    "RecordingEngine",
    "RecordingSession",
    "replay",
]


ROUTER = "mlp.router_logits"
"""Name of a layer's router logits in the target graph, if it has a mixture of experts."""


@dataclass(frozen=True)
class RecordedForward:
    """One run of a graph: its inputs and outputs, on the CPU in the engine's dtype.

    The layers' states are static buffers, so they are not included. The target also returns router
    logits.
    """

    graph: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]


@dataclass
class Recording:
    """The recorded forwards.

    Attributes:
        columns: columns of the target's logits to keep; None: all.
        only: the only graph to record, without router logits; None: all graphs.
        is_served: record nothing, and let sessions use all that they can, as a server does: graphs
            that are captured in pieces, reductions, prompts and steps in one forward.
        num_mixed: forwards over prompts and steps since ``is_served`` was set.
    """

    forwards: list[RecordedForward] = field(default_factory=list)
    columns: Tensor | None = None
    only: str | None = None
    is_served: bool = False
    num_mixed: int = 0


class RecordingSession(Session):
    """A session that records the inputs and outputs of every run, unless the engine serves."""

    def __init__(self, session: Session, graph: str, recording: Recording) -> None:
        self._session: Session | None = session
        self._graph, self._recording = graph, recording
        self.bound: dict[str, Tensor] = {}

    def drop(self) -> None:
        """Release the wrapped session, even if this object is still referenced."""
        self._session = None

    @property
    def _open(self) -> Session:
        assert self._session is not None, f"{self._graph}: the session is already released"
        return self._session

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The graph's states."""
        return self._open.states

    def bind(self, name: str, tensor: Tensor) -> None:
        """Set ``tensor`` as the static buffer of input or output ``name``."""
        self.bound[name] = tensor
        self._open.bind(name, tensor)

    @property
    def capabilities(self) -> Capabilities:
        """Those of the session while the engine serves; else none, so that ``run`` sees all."""
        return self._open.capabilities if self._recording.is_served else super().capabilities

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run once; return the outputs that have no static buffer."""
        if self._recording.is_served or self._recording.only not in {None, self._graph}:
            return self._open.run(inputs)
        given = {name: _copy(tensor) for name, tensor in inputs.items()}
        outputs = self._open.run(inputs)
        columns = self._recording.columns if self._graph == "target" else None
        found = {
            name: _copy(
                tensor
                if columns is None or name != "logits"
                else tensor[..., columns.to(tensor.device)]
            )
            for name, tensor in outputs.items()
            if self._recording.only is None or not name.endswith(ROUTER)
        }
        self._recording.forwards.append(RecordedForward(self._graph, given, found))
        return outputs

    def run_reduced(
        self, inputs: Mapping[str, Tensor], reduced: Mapping[str, Reduction]
    ) -> dict[str, Tensor]:
        """Run once, with some outputs reduced."""
        if self._recording.is_served:
            return self._open.run_reduced(inputs, reduced)
        return super().run_reduced(inputs, reduced)

    def run_then(
        self, inputs: Mapping[str, Tensor], then: Continuation, further: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Run once, and continue with ``then``."""
        if self._recording.is_served:
            return self._open.run_then(inputs, then, further)
        return super().run_then(inputs, then, further)

    def run_prompt(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run over rows of prompts."""
        if self._recording.is_served:
            return self._open.run_prompt(inputs)
        return super().run_prompt(inputs)

    def run_mixed(
        self, parts: Sequence[Mapping[str, Tensor]], reduced: Sequence[Reduction | None]
    ) -> list[dict[str, Tensor]]:
        """Run prompts and steps as one forward, while the engine serves."""
        self._recording.num_mixed += 1
        return self._open.run_mixed(parts, reduced)

    def capture_rows(self, most: int, table_len: int, has_room: Callable[[], bool]) -> int:
        """Capture forwards, while the engine serves."""
        if self._recording.is_served:
            return self._open.capture_rows(most, table_len, has_room)
        return super().capture_rows(most, table_len, has_room)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


class RecordingSessionFactory:
    """Opens recorded sessions: the ``SessionFactory`` of a ``RecordingEngine``.

    Attributes:
        recording: the record.
        sessions: open sessions by graph; the last one of each.
    """

    def __init__(self) -> None:
        self.recording = Recording()
        self.sessions: dict[str, RecordingSession] = {}

    def __call__(
        self, bundle: LoadedBundle, graph: str, intermediates: Sequence[str] = ()
    ) -> Session:
        """Open a new, recorded session of ``graph``."""
        if graph == "target" and not intermediates:
            intermediates = _routers(bundle)
        session = self.sessions[graph] = RecordingSession(
            self._open(bundle, graph, intermediates), graph, self.recording
        )
        return session

    def _open(self, bundle: LoadedBundle, graph: str, intermediates: Sequence[str]) -> Session:
        return open_graph_of(bundle, graph, intermediates)


def _routers(bundle: LoadedBundle) -> list[str]:
    """Return names of the target's router logits that its sessions can return."""
    layers = [k for k, layer in enumerate(bundle.spec.layers) if isinstance(layer.mlp, SparseMoe)]
    if not layers:
        return []
    backend = backend_named(bundle.record.engine.backend)
    known = backend.intermediates(bundle.path / "target")
    return [name for k in layers if (name := f"layers.{k}.{ROUTER}") in known]


class RecordingEngine(LLM):
    """An engine that records all of its graphs.

    It speculates as configured, even if that does not pay here.

    Attributes:
        recording: the record.
        tree: the configured tree, always used.
    """

    def __init__(
        self,
        path: Path,
        factory: RecordingSessionFactory | None = None,
        tensor_parallel: int | None = None,
    ) -> None:
        """Open the bundle at ``path``; ``tensor_parallel``: as for ``LLM``."""
        config = read_bundle(path).config
        self.tree = configured_tree(config.speculation)
        self._factory = factory or RecordingSessionFactory()
        self.recording, self.sessions = self._factory.recording, self._factory.sessions
        # a prefix cache would skip prompt rows, and every row is compared
        bundle = LoadedBundle.open(
            path,
            policy=FixedPolicy(self.tree),
            sessions=self._factory,
            tensor_parallel=tensor_parallel,
        )
        super().__init__(replace(bundle, run_ahead=False), prefix_cache=False)
        # bundled prompts lie outside a draft's training data: no warning about its acceptance
        self._meter = Meter(0.0)

    @property
    def path(self) -> Path:
        """The bundle's folder."""
        return self.bundle.path

    @property
    def record(self) -> BundleRecord:
        """The bundle's ``bundle.json``."""
        return self.bundle.record

    @property
    def spec(self) -> TargetSpec:
        """The target's spec."""
        return self.bundle.spec

    @property
    def manifest(self) -> DraftManifest | None:
        """The draft's manifest; None without a draft."""
        return self.bundle.manifest

    @property
    def limits(self) -> LimitsConfig:
        """The limits of requests."""
        return self.bundle.limits

    @property
    def processor(self) -> Processor:
        """Tokenizer, chat template and pixel rules."""
        return self.bundle.processor

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.bundle.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations and caches."""
        return self.bundle.dtype

    @property
    def precision(self) -> str:
        """The dtype whose tolerances apply.

        Where numbers are rounded (activations to int8, keys and values to FP8), a last bit may
        change the rounding. Errors are then as large as bfloat16's.
        """
        config = self.record.config.engine
        rounded = config.activations == "int8" or config.kv_dtype == "fp8"
        return "bfloat16" if rounded else self.record.engine.dtype

    @property
    def drafter(self) -> Drafter | None:
        """The drafter of the draft's graphs; None without a draft."""
        return self.bundle.drafter

    @property
    def embedding(self) -> EmbeddingTable:
        """The target's token table."""
        return self.bundle.embedding

    @property
    def draft_embedding(self) -> EmbeddingTable:
        """The draft's token table."""
        return self.bundle.draft_embedding

    @property
    def page_size(self) -> int:
        """Rows of a KV page."""
        return self.bundle.page_size

    def open_graph(self, graph: str, intermediates: Sequence[str] = ()) -> Session:
        """Open a new, recorded session of ``graph``."""
        return self.bundle.open_graph(graph, intermediates)

    def leave_out_draft(self) -> None:
        """Drop the draft; call before the first request."""
        self.use(replace(self.bundle, manifest=None))

    def use(self, bundle: LoadedBundle) -> None:
        """Answer with ``bundle``; call before the first request."""
        self.bundle = bundle
        self._preprocessor = self._make_preprocessor()

    def _make_preprocessor(self) -> PromptPreprocessor:
        return self.bundle.preprocessor(digests=True)

    @property
    def num_tree_rows(self) -> int:
        """Rows that a cycle needs beyond those of the sequence."""
        tree = self.tree if self.manifest else None
        return max(tree.num_nodes, tree.num_draft_rows) if tree else 1

    def begin_service(self) -> None:
        """Answer as in service from now on: prefixes are reused if the bundle does so."""
        self._started().close()
        self._core, self._prefix_cache = None, self.limits.prefix_cache
        self._preprocessor = self._make_preprocessor()

    def serve(self) -> None:
        """Answer as ``serve`` does from now on, over the same sessions and caches.

        Nothing is recorded. Steps are launched ahead of the host, prompts run beside steps, and
        graphs are captured, as far as the backend can. The bundle's own policy chooses trees;
        prefixes, images and embeddings are kept.
        """
        config = self.record.config
        policy: Policy = FixedPolicy(None)
        if self.manifest is not None:
            policy = read_policy(self.path, config.speculation, self.device)
        self.begin_service()
        self.recording.is_served = True
        self.bundle = self.bundle.updated(run_ahead=True, policy=policy, media_cache=MEDIA_CACHE)
        self.bundle.decoder.use_run_ahead()
        self.capture_graphs()

    def submit_together(self, requests: Sequence[Request]) -> list[Answer]:
        """Start all requests in one batch, from the first forward on."""
        return self._started().submit_together(requests, keeps=self)

    def leave_pages(self, count: int) -> None:
        """Take pages away, so that sequences have ``count`` from now on.

        Do not call while requests are in flight.
        """
        core = self._started()
        wanted = core.pool.num_pages - 1 - count
        if core.prefixes is not None:
            core.prefixes.evict(max(0, wanted - core.pool.num_free))
        core.pool.take(max(0, min(wanted, core.pool.num_free)))

    def release(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Stop answering and release the sessions, so that new sessions of the same graphs fit.

        Returns the static buffers by graph and name.
        """
        bound = {graph: session.bound for graph, session in self.sessions.items()}
        self._close_core()  # new sessions may need the other ranks
        for session in self.sessions.values():
            session.drop()
        self.sessions.clear()
        return bound

    def take(self) -> list[RecordedForward]:
        """Return the forwards recorded since the last call."""
        forwards = self.recording.forwards[:]
        self.recording.forwards.clear()
        return forwards


def replay(
    session: Session, forwards: Sequence[RecordedForward], bound: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    """Run recorded forwards again over the engine's own caches ``bound``.

    Returns the outputs of each forward, on the CPU. A session with intermediates thus returns the
    tensors inside the graph, for the same forwards as those of an answer.
    """
    for name, tensor in bound.items():
        session.bind(name, tensor)
    return [{n: _copy(t) for n, t in session.run(p.inputs).items()} for p in forwards]
