"""LoadedBundle: a bundle that was read and checked, and its open graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.target import target_from_dict
from trt_eagle3.checkpoint.tensor_index import TensorRef, read_tensor
from trt_eagle3.config import BuildConfig, LimitsConfig, check_tensor_parallel
from trt_eagle3.decode.forward.runner import TargetRunner
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.state import LayerStates, layer_states
from trt_eagle3.decode.parallel.leader import Ranks
from trt_eagle3.decode.policy.protocol import FixedPolicy, Policy
from trt_eagle3.decode.policy.read import read_policy
from trt_eagle3.decode.request.encoder_cache import EncoderCache
from trt_eagle3.decode.request.preprocess import PromptPreprocessor
from trt_eagle3.decode.request.vision_encoder import PatchBuckets, VisionEncoder, VisionRunner
from trt_eagle3.decode.sampling.grammar_compiler import GrammarCompiler
from trt_eagle3.decode.speculation.drafter import Drafter
from trt_eagle3.decode.speculation.open import open_drafter
from trt_eagle3.decode.speculation.tree import configured_tree
from trt_eagle3.decode.step.decoder import Decoder
from trt_eagle3.drafts.registry import kind_of, manifest_from_dict
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.bundle.check import check_graphs, check_tables
from trt_eagle3.engine.bundle.read import read_bundle, retry_if_replaced, unreplaced
from trt_eagle3.engine.bundle.record import BUNDLE_FILE, BundleRecord
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.engine.runtime.memory import (
    MemoryNeed,
    fill_memory,
    free_bytes,
    kv_room,
    memory_need,
    num_pages,
    num_snapshots,
)
from trt_eagle3.engine.runtime.session import Session, open_session
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import family_of, tower_of
from trt_eagle3.multimodal import LOCAL_MEDIA, MediaPolicy, Processor
from trt_eagle3.multimodal.decoder_pool import DecoderPool
from trt_eagle3.multimodal.media_cache import NO_MEDIA_CACHE, MediaCacheSizes
from trt_eagle3.sharding import rank_spec, replicated_parts
from trt_eagle3.spec import TargetSpec

__all__ = ["LoadedBundle", "SessionFactory", "open_graph_of"]

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class LoadedBundle:
    """A bundle in use. Each graph is opened once, at first use.

    Attributes:
        path: the bundle's folder. record: its ``bundle.json``.
        spec: the target. manifest: the draft; None in a bundle without one.
        limits: limits of requests: ``record.config.limits``. If these give no KV cache size, it is
            the largest that fits the GPU.
        processor: tokenizer, chat template and pixel rules.
        policy: chooses the tree of the next step.
        fixed_shapes: sessions capture CUDA graphs, which need recurring shapes.
        sessions: opens graphs.
        run_ahead: steps may be launched before the host reads the previous tokens. False if every
            forward is recorded.
        ranks: runs the target on several devices; None on a single one.
        media_cache: what is kept of images and videos for later requests.
    """

    path: Path
    record: BundleRecord
    spec: TargetSpec
    manifest: DraftManifest | None
    limits: LimitsConfig
    processor: Processor
    policy: Policy
    fixed_shapes: bool
    sessions: SessionFactory
    run_ahead: bool = True
    ranks: Ranks | None = None
    media_cache: MediaCacheSizes = NO_MEDIA_CACHE

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        media: MediaPolicy = LOCAL_MEDIA,
        media_cache: MediaCacheSizes = NO_MEDIA_CACHE,
        split_special_tokens: bool | None = None,
        tool_format: str = "auto",
        policy: Policy | None = None,
        sessions: SessionFactory | None = None,
        limits: LimitsConfig | None = None,
        tensor_parallel: int | None = None,
    ) -> LoadedBundle:
        """Read and check a bundle; no graph is opened yet.

        Args:
            media: allowed sources of images and videos in prompts.
            media_cache: what is kept of them for later requests.
            split_special_tokens: whether control tokens in the text of prompts are plain text;
                None: as the bundle was built.
            tool_format: format of tool calls; ``auto``: the format of the chat template.
            policy: replaces the bundle's own, which is then not read.
            sessions: replaces ``open_graph_of``.
            limits: limits that another process found; this process then does not use the GPU.
                None: the bundle's limits, as far as they fit this GPU.
            tensor_parallel: number of devices that share the target; None: as the bundle was built.
        Raises:
            UserError: the bundle is missing, unfinished, damaged or of another schema version, or
                its limits do not fit this GPU.
        """
        return retry_if_replaced(
            lambda: _open(
                Path(path),
                media,
                media_cache,
                split_special_tokens,
                tool_format,
                policy,
                sessions or open_graph_of,
                limits,
                tensor_parallel,
            )
        )

    @property
    def device(self) -> str:
        """Device of the engine: ``cpu`` or ``cuda``."""
        return self.record.config.engine.device

    @property
    def tensor_parallel(self) -> int:
        """Number of devices that share the target."""
        return 1 if self.ranks is None else self.ranks.size

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations and caches."""
        return dtype_named(self.record.config.engine.dtype).torch

    @property
    def page_size(self) -> int:
        """Rows of a KV page."""
        return self.record.config.engine.page_size

    @property
    def capacity(self) -> str:
        """One line: most sequences that run at once, and tokens that the KV cache holds."""
        need = _memory_need(
            self.record, self.spec, self.manifest, self.limits, self.tensor_parallel
        )
        return kv_room(need, self.limits, self.page_size)

    def page_pool(self) -> PagePool:
        """Make a pool of all pages of the KV caches. Use only one pool at a time."""
        table_len = -(-self.limits.max_seq_len // self.page_size)
        return PagePool(
            num_pages(self.limits, self.page_size),
            self.page_size,
            table_len if self.fixed_shapes else None,
        )

    def open_graph(self, graph: str, intermediates: Sequence[str] = ()) -> Session:
        """Open a new session of ``target``, ``vision`` or a graph of the draft.

        ``intermediates``: as for ``open_session``.
        """
        return self.sessions(self, graph, intermediates)

    def updated(self, **attributes: Any) -> LoadedBundle:
        """Return this bundle with other ``attributes``, over the same open graphs and caches."""
        found = copy(self)
        for name, value in attributes.items():
            assert name in self.__dataclass_fields__, name
            object.__setattr__(found, name, value)
        return found

    def decoder_over(self, target: Session, drafter: Drafter | None = None) -> Decoder:
        """Make a decoder over ``target``, a session of the target graph, with its own cache."""
        states = self._layer_states(target)
        if self.ranks is not None:
            self.ranks.started().mirror(states, target.states, *self._state_sizes)
        runner = TargetRunner(target, states, self.embedding, self.spec.num_visual_levels)
        return Decoder(
            runner,
            drafter,
            max_seq_len=self.limits.max_seq_len,
            prefill_chunk=self.record.config.engine.prefill_chunk,
            fixed_shapes=self.fixed_shapes,
            run_ahead=self.run_ahead,
            max_batch_size=self.limits.max_batch_size,
        )

    @cached_property
    def decoder(self) -> Decoder:
        """The decoder of target and draft over the bundle's KV caches."""
        return self.decoder_over(self.open_graph("target"), self.drafter)

    @cached_property
    def vision(self) -> VisionRunner:
        """The vision tower."""
        vision = self.spec.require_vision()
        merge, buckets = vision.spatial_merge_size, self.patch_buckets
        return VisionRunner(self.open_graph("vision"), merge_size=merge, buckets=buckets)

    def vision_encoder(self) -> VisionEncoder:
        """Make an encoder of prompt images. The vision graph is opened at the first image."""
        sizes = self.media_cache
        cache = EncoderCache(sizes, self.device) if sizes.keeps_embeddings else None
        return VisionEncoder(self.spec, self.dtype, self.device, lambda: self.vision, cache)

    def preprocessor(self, *, digests: bool = False) -> PromptPreprocessor:
        """Make a preprocessor. ``digests``: of images and videos, for caches."""
        return PromptPreprocessor(
            self.spec,
            self.processor,
            self.limits,
            lambda: self.grammars,
            self.device,
            digests=digests,
        )

    @property
    def patch_buckets(self) -> PatchBuckets | None:
        """Padded sizes of the vision tower; None without a tower, or without fixed shapes."""
        vision = self.spec.vision
        if vision is None or not self.fixed_shapes:
            return None
        tower = tower_of(self.spec)
        limit = self.limits.max_visual_tokens * vision.spatial_merge_size**2
        unit = tower.sizes(vision).patches_per_unit
        return PatchBuckets(limit, unit, partial(tower.padded, vision))

    @cached_property
    def embedding(self) -> EmbeddingTable:
        """The target's token table."""
        return self._table(self.record.embedding.ref(self._root))

    @cached_property
    def draft_embedding(self) -> EmbeddingTable:
        """The draft's token table: its own, or the target's."""
        if self.manifest is None or self.manifest.embedding == "target":
            return self.embedding
        return self._table(self.manifest.tensors["embed_tokens.weight"])

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """The compiler of requests' grammars."""
        return GrammarCompiler(
            self.processor.tokenizer, self.spec.vocab_size, self.processor.end_token_ids
        )

    @cached_property
    def drafter(self) -> Drafter | None:
        """The draft; None in a bundle without one."""
        manifest = self.manifest
        if manifest is None:
            return None
        kind = kind_of(manifest)
        graphs = [self.open_graph(name) for name in kind.graph_names]
        return open_drafter(
            manifest,
            graphs,
            self._layer_states(graphs[-1]),
            self.draft_embedding,
            {name: self.read_draft_tensor(name) for name in kind.tables(manifest)},
            self._read_d2t(manifest),
            max_rows=self.record.config.engine.prefill_chunk,
            max_sequences=self.limits.max_batch_size,
            fixed_shapes=self.fixed_shapes,
        )

    @property
    def _root(self) -> Path:
        return self.record.weights_root(self.path)

    def _layer_states(self, session: Session) -> LayerStates:
        num_slots, *others = self._state_sizes
        return layer_states(session.states, num_slots, self.device, *others)

    @property
    def _state_sizes(self) -> tuple[int, int, int]:
        """Return the slots of paged states, the sequences, and the snapshots."""
        num_slots = num_pages(self.limits, self.page_size) * self.page_size
        return num_slots, self.limits.max_batch_size, num_snapshots(self.limits)

    def close_ranks(self) -> None:
        """End the processes of the other ranks, if there are any."""
        if self.ranks is not None:
            self.ranks.close()

    def _table(self, ref: TensorRef) -> EmbeddingTable:
        with unreplaced(self.path, self.record):
            return EmbeddingTable(ref, self.dtype, self.device)

    def read_draft_tensor(self, name: str) -> Tensor:
        """Read a tensor of the draft to the device, in the compute type."""
        assert self.manifest is not None
        with unreplaced(self.path, self.record):
            return read_tensor(self.manifest.tensors[name]).to(self.device, self.dtype)

    def _read_d2t(self, manifest: DraftManifest) -> Tensor | None:
        """Read the offset from draft id to target id, to the device; None if the ids are equal."""
        if "d2t" not in manifest.tensors:
            return None
        with unreplaced(self.path, self.record):
            d2t = read_tensor(manifest.tensors["d2t"])
        ids = torch.arange(len(d2t)) + d2t
        if ids.min() < 0 or ids.max() >= self.spec.vocab_size:
            raise UserError(
                f"{manifest.tensors['d2t'].file}: d2t: ids out of range. Rebuild: trt-eagle3 build"
            )
        return d2t.to(self.device)


SessionFactory = Callable[[LoadedBundle, str, Sequence[str]], Session]
"""Opens a graph of a bundle by name, and names the intermediates to return."""


def open_graph_of(bundle: LoadedBundle, graph: str, intermediates: Sequence[str] = ()) -> Session:
    """Open ``graph`` with the bundle's own backend: the default ``SessionFactory``.

    If several devices share the target, all ranks open their parts of it.
    """
    record, path = bundle.record, bundle.path
    backend, model = record.engine.backend, path / graph / "model.onnx"
    with unreplaced(path, record):
        root = record.weights_root(path)
        if graph == "target" and bundle.ranks is not None:
            return bundle.ranks.started().open_session(backend, model, root, intermediates)
        return open_session(backend, model, root, intermediates, bundle.device)


def _open(
    path: Path,
    media: MediaPolicy,
    media_cache: MediaCacheSizes,
    split_special_tokens: bool | None,
    tool_format: str,
    policy: Policy | None,
    sessions: SessionFactory,
    limits: LimitsConfig | None,
    tensor_parallel: int | None,
) -> LoadedBundle:
    record = read_bundle(path)
    config = record.config
    size = config.engine.tensor_parallel if tensor_parallel is None else tensor_parallel
    check_tensor_parallel(config.engine, size)
    spec = _read(path, target_from_dict, record.target)
    manifest = _read_manifest(path, record)
    check_tables(path, record, spec, manifest)
    if split_special_tokens is None:
        split_special_tokens = config.split_special_tokens
    with unreplaced(path, record):
        check_graphs(path, record)
        processor = family_of(spec).processor(
            path / "processor",
            spec,
            max_prompt_len=config.limits.max_seq_len - 1,
            media=media,
            decoders=DecoderPool(),
            image_cache_bytes=media_cache.image_bytes,
            split_special_tokens=split_special_tokens,
            tool_format=tool_format,
        )
        need = _memory_need(record, spec, manifest, config.limits, size)
        if policy is None and manifest:
            policy = read_policy(path, config.speculation, config.engine.device)
    return LoadedBundle(
        path=path,
        record=record,
        spec=spec,
        manifest=manifest,
        limits=limits or _limits_here(config, need),
        processor=processor,
        policy=policy or FixedPolicy(None),
        fixed_shapes=config.engine.device == "cuda",
        sessions=sessions,
        ranks=Ranks(size, config.engine.device, replicated_parts(spec, size)) if size > 1 else None,
        media_cache=media_cache,
    )


def _memory_need(
    record: BundleRecord,
    spec: TargetSpec,
    manifest: DraftManifest | None,
    limits: LimitsConfig,
    size: int,
) -> MemoryNeed:
    """Return the need of rank 0 of ``size``, which holds the draft and the vision tower too."""
    config = record.config
    num_nodes = configured_tree(config.speculation).num_nodes if manifest else 1
    saved = record.packed_savings // size
    return memory_need(rank_spec(spec, size), manifest, limits, config.engine, num_nodes, saved)


def _limits_here(config: BuildConfig, need: MemoryNeed) -> LimitsConfig:
    """Return the bundle's limits, filled in for this GPU; raises if they do not fit."""
    free = free_bytes() if config.engine.device == "cuda" else None
    if free is None:
        return config.limits
    return fill_memory(need, free, config.limits, config.engine.page_size)


def _read_manifest(path: Path, record: BundleRecord) -> DraftManifest | None:
    if record.draft is None:
        return None
    root = record.weights_root(path)
    tensors = {name: tensor.ref(root) for name, tensor in record.draft_tensors.items()}
    return replace(_read(path, manifest_from_dict, record.draft), tensors=tensors)


def _read(path: Path, reader: Callable[[Mapping[str, Any]], _T], values: Mapping[str, Any]) -> _T:
    try:
        return reader(values)
    except UserError as error:
        what = str(error).rstrip(".")
        raise UserError(f"{path / BUNDLE_FILE}: {what}. Rebuild: trt-eagle3 build") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path / BUNDLE_FILE}: a damaged target or draft ({type(error).__name__}). "
            "Rebuild: trt-eagle3 build"
        ) from error
