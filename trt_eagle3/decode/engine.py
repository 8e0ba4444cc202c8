"""Engine: a loaded bundle that answers prompts."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from trt_eagle3.checkpoint.manifest import DraftManifest, manifest_from_dict
from trt_eagle3.checkpoint.target import TargetSpec, target_from_dict
from trt_eagle3.checkpoint.tensor_index import TensorRef, read_tensor
from trt_eagle3.decode.answer import Answer
from trt_eagle3.decode.decoder import Decoder, Drafting
from trt_eagle3.decode.kv_cache import KVCache, PagePool
from trt_eagle3.decode.metrics import EngineMetrics, Meter
from trt_eagle3.decode.output import Output
from trt_eagle3.decode.plan import Plan, read_plan
from trt_eagle3.decode.prefix_cache import PrefixCache, media_digests
from trt_eagle3.decode.prompt import Prompt, Vision
from trt_eagle3.decode.propose import Proposer
from trt_eagle3.decode.request import Generation, Request
from trt_eagle3.decode.runner import DraftRunner, TargetRunner, VisionRunner
from trt_eagle3.decode.sampling import GREEDY
from trt_eagle3.decode.scheduler import Scheduler
from trt_eagle3.decode.sequence import SequenceState
from trt_eagle3.decode.worker import Worker
from trt_eagle3.engine.bundle import (
    BUNDLE_FILE,
    BundleRecord,
    check_graphs,
    check_tables,
    read_bundle,
    retry_if_replaced,
    unreplaced,
)
from trt_eagle3.engine.embedding import EmbeddingTable
from trt_eagle3.engine.memory import check_fits, free_bytes, memory_need, num_pages, request_memory
from trt_eagle3.engine.session import Session, open_session
from trt_eagle3.errors import OverloadedError, UserError
from trt_eagle3.multimodal import (
    LOCAL_MEDIA,
    ImageSource,
    MediaPolicy,
    ModelInputs,
    Processor,
    VideoSource,
    normalise,
)
from trt_eagle3.multimodal.caller import NOBODY, Caller
from trt_eagle3.multimodal.decoder_pool import DecoderPool
from trt_eagle3.multimodal.vision_rows import vision_rows

__all__ = ["Engine", "load"]

_T = TypeVar("_T")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load(
    bundle: str | Path,
    *,
    media: MediaPolicy = LOCAL_MEDIA,
    split_special_tokens: bool | None = None,
) -> Engine:
    """Load a bundle.

    Args:
        media: where images and videos of prompts may come from.
        split_special_tokens: whether control tokens in the text of prompts are text; None: as the
            bundle was built.
    Raises:
        UserError: no bundle, an unfinished or damaged one, or one of another schema version.
    """
    return retry_if_replaced(
        lambda: Engine(Path(bundle), media, split_special_tokens=split_special_tokens)
    )


class Engine:
    """One loaded bundle.

    Graphs are opened when they are first needed: a text prompt never loads the vision tower.
    """

    def __init__(
        self,
        path: Path,
        media: MediaPolicy = LOCAL_MEDIA,
        plan: Plan | None = None,
        split_special_tokens: bool | None = None,
    ) -> None:
        """``plan``: instead of the bundle's, which is not read then.

        The others are as for ``load``.
        """
        self.path = path
        self.record: BundleRecord = read_bundle(path)
        self.spec: TargetSpec = self._read(target_from_dict, self.record.target)
        config = self.record.config
        self.limits = config.limits
        self._root = self.record.weights_root(path)
        self.manifest: DraftManifest | None = self._read_manifest()
        check_tables(path, self.record, self.spec, self.manifest)
        with unreplaced(path, self.record):
            check_graphs(path, self.record)
            self.processor = Processor.from_directory(
                path / "processor",
                self.spec,
                max_prompt_len=self.limits.max_seq_len - 1,
                media=media,
                decoders=DecoderPool(),
                split_special_tokens=config.split_special_tokens
                if split_special_tokens is None
                else split_special_tokens,
            )
            self._plan = plan or read_plan(path, config.speculation, config.engine.device)
        self.dtype = _DTYPES[config.engine.dtype]
        self.device = config.engine.device
        self.memory = memory_need(self.spec, self.manifest, self.limits, config.engine)
        free = free_bytes() if self.device == "cuda" else None
        if free is not None:
            check_fits(self.memory, free, self.limits)
        self._pages = self._page_pool(config.engine.page_size)
        self._meter = Meter(config.speculation.acceptance_floor)
        self._closed = False
        self._starting = threading.Lock()

    def _page_pool(self, page_size: int) -> PagePool:
        table_len = -(-self.limits.max_seq_len // page_size)
        return PagePool(
            num_pages(self.limits, page_size), page_size, table_len if self._captures else None
        )

    @property
    def _captures(self) -> bool:
        """Whether sessions capture CUDA graphs, which want shapes that come again."""
        return self.device == "cuda"

    def generate(self, prompt: str | Sequence[Mapping[str, Any]], **options: Any) -> Generation:
        """Answer a prompt; ``options`` are the other fields of ``Request``."""
        return self.submit(Request(prompt, **options)).finish()

    def stream(self, prompt: str | Sequence[Mapping[str, Any]], **options: Any) -> Answer:
        """Start answering a prompt: ``generate`` in pieces."""
        return self.submit(Request(prompt, **options))

    def submit(self, request: Request) -> Answer:
        """Start answering ``request`` along with all others; thread-safe, and back at once.

        The answer is an iterator, plain or asynchronous, of ``Chunk``s; it raises what is wrong
        with the prompt.

        Raises:
            OverloadedError: ``limits.max_waiting`` requests wait already, or the engine is closed.
        """
        if self._closed:
            raise OverloadedError("the engine is closed. Load it again.")
        return self._started().submit(request, self._begin)

    def start(self) -> None:
        """Open the graphs now, rather than with the first request."""
        self._started()

    @property
    def ready(self) -> bool:
        """Whether requests would be answered."""
        return not self._closed and ("_worker" not in vars(self) or self._worker.alive)

    def use_plan(self, plan: Plan) -> None:
        """Speculate by ``plan`` from now on, instead of the bundle's; not while requests are in
        flight.
        """
        self._plan = plan
        self._scheduler.tree_for = plan.tree_for

    def metrics(self) -> EngineMetrics:
        """Counters of all requests so far."""
        return self._meter.snapshot(**self._now())

    def count_rejected(self) -> None:
        """Count a request that whoever serves this engine has refused itself, because it was
        wrong.
        """
        self._meter.finished("rejected")

    def restart_metrics(self) -> None:
        """Count requests from here on; not while any are in flight."""
        self._meter.restart()

    def close(self, *, drain: bool = False) -> None:
        """Take no more requests; those in flight are cancelled, or with ``drain`` answered
        first.
        """
        self._closed = True
        if "_worker" in vars(self):
            self._worker.close(drain=drain)
        if self.processor.decoders is not None:
            self.processor.decoders.close()

    def prepare(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        images: Sequence[ImageSource] = (),
        videos: Sequence[VideoSource] = (),
    ) -> ModelInputs:
        """Tokens, positions and patches of a prompt, checked against the bundle's limits."""
        return self._model_inputs(Request(prompt, images, videos))

    def encode(self, inputs: ModelInputs) -> Prompt:
        """The prompt as target and draft see it; the vision tower runs when its rows are wanted."""
        merged = self.spec.vision.spatial_merge_size**2
        media = media_digests(inputs.visuals, merged) if self.limits.prefix_cache else ()
        if self.device == "cuda":  # here, so that the thread that decodes has nothing to copy
            inputs = replace(inputs, visuals=tuple(visual.pinned() for visual in inputs.visuals))
        # the thread that decodes must not be the last to hold the engine
        engine = weakref.proxy(self)
        return Prompt(
            token_ids=inputs.token_ids,
            position_ids=inputs.position_ids,
            rope_delta=inputs.rope_delta,
            visual_rows=inputs.visual_rows,
            encode_images=lambda: engine._encode_images(inputs),
            media=media,
        )

    def sequence(self, prompt: Prompt, request: Request | None = None) -> SequenceState:
        """A sequence that answers ``prompt``, greedily unless the request says otherwise."""
        sampling, speculation = (
            (request.sampling, request.speculation) if request else (GREEDY, False)
        )
        drafting = speculation and self.manifest is not None and self._plan.speculates
        return SequenceState(prompt, self._pages, self.spec.text.vocab_size, sampling, drafting)

    def decode(self, prompt: Prompt, *, speculation: bool = True) -> Generator[tuple[int, ...]]:
        """Tokens of each target forward over one prompt alone (``Decoder.run``); not while
        requests are in flight.
        """
        tree = self._plan.tree_for(1) if speculation and self.manifest else None
        sequence = self.sequence(prompt)
        sequence.drafting = tree is not None
        return self._decoder.run(sequence, tree)

    def _model_inputs(self, request: Request, caller: Caller = NOBODY) -> ModelInputs:
        if isinstance(request.prompt, str):
            inputs = self.processor.prompt(
                request.prompt, request.images, request.videos, caller=caller
            )
        else:
            inputs = self.processor.messages(request.prompt, caller)
        num_visual = int(inputs.visual_rows.sum())
        if num_visual > self.limits.max_visual_tokens:
            raise UserError(
                f"prompt: {num_visual} visual tokens, this bundle takes "
                f"{self.limits.max_visual_tokens}. Send fewer or smaller images, or rebuild with a "
                "larger limits.max_visual_tokens."
            )
        return inputs

    def _begin(self, request: Request, caller: Caller = NOBODY) -> tuple[SequenceState, Output]:
        sequence = self.sequence(self.encode(self._model_inputs(request, caller)), request)
        return sequence, Output(request, self.processor.stream_decoder(), self.spec.eos_token_ids)

    def _encode_images(self, inputs: ModelInputs) -> Vision:
        hidden = self.spec.text.hidden_size
        if not inputs.visuals:
            none = torch.zeros(0, hidden, dtype=self.dtype, device=self.device)
            return Vision(none, none.expand(self.spec.num_deepstack, -1, -1))
        vision = self.spec.vision
        side = round(vision.num_position_embeddings**0.5)
        rows = vision_rows(inputs.grid_thw, vision.spatial_merge_size, side)
        what = f"prompt: the images of {int(inputs.visual_rows.sum())} visual tokens"
        with request_memory(what, "Send fewer or smaller images, or rebuild with smaller limits."):
            patches = normalise(inputs.visuals, self.dtype, self.device)
            embeds, levels = self._vision.forward(patches, rows.inputs())
        return Vision(embeds, embeds.new_zeros(0, *embeds.shape) if levels is None else levels)

    def _started(self) -> Worker:
        """The worker, begun once whoever asks first."""
        with self._starting:
            return self._worker

    def _now(self) -> dict[str, int]:
        """What the counters do not count; looking opens no graphs."""
        worker: Worker | None = vars(self).get("_worker")
        scheduler = self._scheduler if worker else None
        cached = self._prefixes.num_idle if self._prefixes else 0
        # first: who begins meanwhile is counted twice, rather than never
        waiting = worker.num_waiting if worker else 0
        return {
            "running": len(scheduler.running) if scheduler else 0,
            "waiting": waiting,
            "preempted": scheduler.num_preempted if scheduler else 0,
            "reused_tokens": scheduler.num_reused_rows if scheduler else 0,
            "kv_pages_used": self._pages.num_used - cached,
            "kv_pages_cached": cached,
            "kv_pages_total": self._pages.num_pages - 1,
        }

    def _read_manifest(self) -> DraftManifest | None:
        record = self.record
        if record.draft is None:
            return None
        tensors = {name: tensor.ref(self._root) for name, tensor in record.draft_tensors.items()}
        return replace(self._read(manifest_from_dict, record.draft), tensors=tensors)

    def _read(self, reader: Callable[[Mapping[str, Any]], _T], values: Mapping[str, Any]) -> _T:
        try:
            return reader(values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{self.path / BUNDLE_FILE}: a damaged target or draft ({type(error).__name__}). "
                "Rebuild: trt-eagle3 build"
            ) from error

    def open_graph(self, graph: str, intermediates: Sequence[str] = ()) -> Session:
        """A new session of ``target``, ``vision``, ``fuse`` or ``draft``; ``intermediates`` as
        for ``open_session``.
        """
        model = self.path / graph / "model.onnx"
        with unreplaced(self.path, self.record):
            return open_session(
                self.record.engine.backend, model, self._root, intermediates, self.device
            )

    def decoder_over(self, target: Session, drafting: Drafting | None = None) -> Decoder:
        """A decoder whose target is ``target``, a session of that graph, over a cache of its
        own.
        """
        text = self.spec.text
        cache = self._cache(text.num_layers, text.num_kv_heads, text.head_dim)
        runner = TargetRunner(target, cache, self.embedding, self.spec.num_deepstack)
        return Decoder(
            runner,
            drafting,
            max_seq_len=self.limits.max_seq_len,
            prefill_chunk=self.record.config.engine.prefill_chunk,
            fixed_shapes=self._pages.table_len is not None,
        )

    def _cache(self, num_layers: int, num_kv_heads: int, head_dim: int) -> KVCache:
        num_slots = self._pages.num_pages * self._pages.page_size
        return KVCache(num_layers, num_kv_heads, head_dim, num_slots, self.dtype, self.device)

    @cached_property
    def embedding(self) -> EmbeddingTable:
        """The target's token table."""
        return self._table(self.record.embedding.ref(self._root))

    @cached_property
    def _vision(self) -> VisionRunner:
        merge = self.spec.vision.spatial_merge_size
        limit = self.limits.max_visual_tokens * merge**2 if self._captures else None
        return VisionRunner(self.open_graph("vision"), merge_size=merge, bucket_limit=limit)

    @cached_property
    def _decoder(self) -> Decoder:
        return self.decoder_over(self.open_graph("target"), self.drafting)

    @cached_property
    def _prefixes(self) -> PrefixCache | None:
        return PrefixCache(self._pages) if self.limits.prefix_cache else None

    @cached_property
    def _scheduler(self) -> Scheduler:
        return Scheduler(
            self._decoder,
            self._pages,
            max_batch_size=self.limits.max_batch_size,
            tree_for=self._plan.tree_for,
            prefix_cache=self._prefixes,
        )

    @cached_property
    def _worker(self) -> Worker:
        worker = Worker(self._scheduler, self._meter, max_waiting=self.limits.max_waiting)
        weakref.finalize(self, worker.close)
        return worker

    @cached_property
    def draft_embedding(self) -> EmbeddingTable:
        """The draft's token table: its own, or the target's."""
        if self.manifest is None or self.manifest.embedding == "target":
            return self.embedding
        return self._table(self.manifest.tensors["embed_tokens.weight"])

    def _table(self, ref: TensorRef) -> EmbeddingTable:
        with unreplaced(self.path, self.record):
            return EmbeddingTable(ref, self.dtype, self.device)

    @cached_property
    def drafting(self) -> Drafting | None:
        """The draft; None in a bundle without one."""
        manifest = self.manifest
        if manifest is None:
            return None
        d2t = self._read_d2t(manifest)
        cache = self._cache(manifest.num_layers, manifest.num_kv_heads, manifest.head_dim)
        runner = DraftRunner(
            self.open_graph("fuse"), self.open_graph("draft"), cache, self.draft_embedding, d2t
        )
        return Drafting(Proposer(runner), manifest)

    def _read_d2t(self, manifest: DraftManifest) -> Tensor | None:
        """Offset from draft id to target id, on the device; None where they are the same ids."""
        if "d2t" not in manifest.tensors:
            return None
        with unreplaced(self.path, self.record):
            d2t = read_tensor(manifest.tensors["d2t"])
        ids = torch.arange(len(d2t)) + d2t
        if ids.min() < 0 or ids.max() >= self.spec.text.vocab_size:
            raise UserError(
                f"{manifest.tensors['d2t'].file}: d2t: ids out of range. Rebuild: trt-eagle3 build"
            )
        return d2t.to(self.device)
