"""Engine: a loaded bundle that answers prompts."""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from trt_eagle3.checkpoint.manifest import DraftManifest, manifest_from_dict
from trt_eagle3.checkpoint.target import TargetSpec, target_from_dict
from trt_eagle3.checkpoint.tensor_index import read_tensor
from trt_eagle3.decode.kv_cache import KVCache, PagePool
from trt_eagle3.decode.loop import Drafting, Loop, Prompt
from trt_eagle3.decode.propose import Proposer
from trt_eagle3.decode.runner import DraftRunner, TargetRunner, VisionRunner
from trt_eagle3.decode.tree import static_tree
from trt_eagle3.engine.bundle import BUNDLE_FILE, BundleRecord, read_bundle
from trt_eagle3.engine.embedding import EmbeddingTable
from trt_eagle3.engine.session import Session, open_session
from trt_eagle3.errors import UserError
from trt_eagle3.multimodal import ImageSource, ModelInputs, Processor, VideoSource
from trt_eagle3.multimodal.vision_rows import vision_rows

__all__ = ["Chunk", "Engine", "Generation", "load"]

_T = TypeVar("_T")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Chunk:
    """What one target pass added: the tokens it emitted and the text that is now certain."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Generation:
    """An answer.

    Attributes:
        token_ids: generated ids, the end token included.
        finish_reason: ``stop`` at an end token, ``length`` at a limit.
        accepted_lengths: tokens emitted by each verify pass, the bonus token included (1 without speculation).
        acceptance_length: their mean; None where no verify pass ran.
        tokens_per_second: of the tokens after the first; None where there is one token.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: Literal["stop", "length"]
    acceptance_length: float | None
    accepted_lengths: tuple[int, ...]
    tokens_per_second: float | None
    time_to_first_token_ms: float


def load(bundle: str | Path) -> Engine:
    """Load a bundle.

    Raises:
        UserError: no bundle, an unfinished or damaged one, or one of another schema version.
    """
    return Engine(Path(bundle))


def _media(name: str, values: Any) -> Sequence[Any]:
    """Images or videos as a list; None is none of them."""
    if not isinstance(values, list | tuple | types.NoneType):
        raise UserError(f"{name}: expected a list, got {type(values).__name__}. Put it in a list.")
    return values or ()


class Engine:
    """One loaded bundle. Graphs are opened when they are first needed: a text prompt never loads the vision tower."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record: BundleRecord = read_bundle(path)
        self.spec: TargetSpec = self._read(target_from_dict, self.record.target)
        config = self.record.config
        self.limits = config.limits
        self.processor = Processor.from_directory(
            path / "processor", self.spec, max_prompt_len=self.limits.max_seq_len - 1
        )
        self._root = self.record.weights_root(path)
        self.manifest: DraftManifest | None = self._read_manifest()
        self.dtype = _DTYPES[config.engine.dtype]
        self.device = config.engine.device
        table_len = -(-self.limits.max_seq_len // config.engine.page_size)
        fixed = table_len if self.device == "cuda" else None
        self._pool = PagePool(table_len * self.limits.max_batch_size + 1, config.engine.page_size, fixed)

    def generate(self, prompt: str | Sequence[Mapping[str, Any]], **options: Any) -> Generation:
        """Answer a prompt; takes what ``stream`` takes."""
        return Answer(self, prompt, **options).finish()

    def stream(self, prompt: str | Sequence[Mapping[str, Any]], **options: Any) -> Answer:
        """Start answering a prompt: iterate over the result for ``Chunk``s, then ask it for its ``generation``.

        Args:
            prompt: a user's text, or chat messages (``multimodal.Processor.messages``).
            images, videos: of a text prompt; see ``multimodal.ImageSource`` and ``VideoSource``.
            max_tokens: at most this many new tokens.
            speculation: draft with the bundle's draft; the answer is the same, the speed is not.
            ignore_eos: go on past end tokens.
        """
        return Answer(self, prompt, **options)

    def prepare(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        images: Sequence[ImageSource] = (),
        videos: Sequence[VideoSource] = (),
    ) -> ModelInputs:
        """Tokens, positions and patches of a prompt, checked against the bundle's limits."""
        images, videos = _media("images", images), _media("videos", videos)
        if not isinstance(prompt, str | list | tuple):
            raise UserError(f"prompt: expected a text or a list of messages, got {type(prompt).__name__}")
        if not isinstance(prompt, str) and (images or videos):
            raise UserError("images and videos: of a list of messages they stand in the messages. Put them there.")
        if isinstance(prompt, str):
            inputs = self.processor.prompt(prompt, images=images, videos=videos)
        else:
            inputs = self.processor.messages(prompt)
        num_visual = int(inputs.visual_rows.sum())
        if num_visual > self.limits.max_visual_tokens:
            raise UserError(
                f"prompt: {num_visual} visual tokens, this bundle takes {self.limits.max_visual_tokens}. "
                "Send fewer or smaller images, or rebuild with a larger limits.max_visual_tokens."
            )
        return inputs

    def encode(self, inputs: ModelInputs) -> Prompt:
        """Run the vision tower where there is something to see."""
        hidden = self.spec.text.hidden_size
        visual = torch.zeros(0, hidden, dtype=self.dtype, device=self.device)
        deepstack = torch.zeros(self.spec.num_deepstack, 0, hidden, dtype=self.dtype, device=self.device)
        if len(inputs.patches):
            vision = self.spec.vision
            side = round(vision.num_position_embeddings**0.5)
            rows = vision_rows(inputs.grid_thw, vision.spatial_merge_size, side)
            visual, levels = self._vision.forward(inputs.patches.to(self.dtype), rows.inputs())
            deepstack = visual.new_zeros(0, *visual.shape) if levels is None else levels
        return Prompt(inputs.token_ids, inputs.position_ids, inputs.rope_delta, inputs.visual_rows, visual, deepstack)

    def decode(self, prompt: Prompt, *, speculation: bool = True) -> Generator[tuple[int, ...]]:
        """Tokens of each target pass (``decode.loop.Loop.run``)."""
        return self._loop.run(prompt, self.drafting if speculation else None)

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

    def open_graph(self, graph: str, taps: Sequence[str] = ()) -> Session:
        """A new session of ``target``, ``vision``, ``fuse`` or ``draft``; ``taps`` as for ``open_session``."""
        model = self.path / graph / "model.onnx"
        return open_session(self.record.engine.backend, model, self._root, taps, self.device)

    def loop_over(self, target: Session) -> Loop:
        """A decode loop whose target is ``target``, a session of that graph, over a cache of its own."""
        text = self.spec.text
        cache = self._cache(text.num_layers, text.num_kv_heads, text.head_dim)
        runner = TargetRunner(target, cache, self.embedding, self.spec.num_deepstack)
        return Loop(runner, self._pool, self.limits.max_seq_len, self.record.config.engine.prefill_chunk)

    def _cache(self, num_layers: int, num_kv_heads: int, head_dim: int) -> KVCache:
        num_slots = self._pool.num_pages * self._pool.page_size
        return KVCache(num_layers, num_kv_heads, head_dim, num_slots, self.dtype, self.device)

    @cached_property
    def embedding(self) -> EmbeddingTable:
        """The target's token table."""
        return EmbeddingTable(self.record.embedding.ref(self._root), self.dtype, self.device)

    @cached_property
    def _vision(self) -> VisionRunner:
        return VisionRunner(self.open_graph("vision"))

    @cached_property
    def _loop(self) -> Loop:
        return self.loop_over(self.open_graph("target"))

    @cached_property
    def draft_embedding(self) -> EmbeddingTable:
        """The draft's token table: its own, or the target's."""
        if self.manifest is None or self.manifest.embedding == "target":
            return self.embedding
        return EmbeddingTable(self.manifest.tensors["embed_tokens.weight"], self.dtype, self.device)

    @cached_property
    def drafting(self) -> Drafting | None:
        """The draft with its tree; None in a bundle without one."""
        manifest, config = self.manifest, self.record.config
        if manifest is None:
            return None
        d2t = read_tensor(manifest.tensors["d2t"]).to(self.device) if "d2t" in manifest.tensors else None
        cache = self._cache(manifest.num_layers, manifest.num_kv_heads, manifest.head_dim)
        runner = DraftRunner(self.open_graph("fuse"), self.open_graph("draft"), cache, self.draft_embedding, d2t)
        return Drafting(Proposer(runner, config.engine.prefill_chunk), manifest, static_tree(config.speculation))


class Answer:
    """An answer in the making: an iterator of chunks that knows its ``generation`` once it is through."""

    def __init__(
        self,
        engine: Engine,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        images: Sequence[ImageSource] = (),
        videos: Sequence[VideoSource] = (),
        max_tokens: int = 256,
        speculation: bool = True,
        ignore_eos: bool = False,
    ) -> None:
        if not isinstance(max_tokens, int) or max_tokens < 1:
            raise UserError(f"max_tokens: expected a whole number of at least 1, got {max_tokens!r}")
        self._start = time.perf_counter()
        self._engine = engine
        self._inputs = engine.prepare(prompt, images, videos)
        self._max_tokens = max_tokens
        self._speculation = speculation
        self._ends = frozenset() if ignore_eos else frozenset(engine.spec.eos_token_ids)
        self._tokens: list[int] = []
        self._lengths: list[int] = []
        self._first_token_time = self._last_token_time = self._start
        self._stopped = False

    def __iter__(self) -> Iterator[Chunk]:
        decoder = self._engine.processor.stream_decoder()
        passes = self._engine.decode(self._engine.encode(self._inputs), speculation=self._speculation)
        try:
            for tokens in passes:
                kept = self._keep(tokens)
                last = self._stopped or len(self._tokens) == self._max_tokens
                text = "".join(decoder.push(token) for token in kept)
                yield Chunk(kept, text + (decoder.flush() if last else ""))
                if last:
                    return
        finally:
            passes.close()
        yield Chunk((), decoder.flush())

    def _keep(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Cut a pass's tokens at an end token or the limit, and count them."""
        kept = tokens[: self._max_tokens - len(self._tokens)]
        end = next((i for i, token in enumerate(kept) if token in self._ends), None)
        if end is not None:
            kept, self._stopped = kept[: end + 1], True
        self._last_token_time = time.perf_counter()
        if self._tokens:
            self._lengths.append(len(kept))
        else:
            self._first_token_time = self._last_token_time
        self._tokens += kept
        return kept

    def finish(self) -> Generation:
        """Run to the end."""
        for _ in self:
            pass
        return self.generation

    @property
    def generation(self) -> Generation:
        """What has been generated so far."""
        seconds = self._last_token_time - self._first_token_time
        later = len(self._tokens) - 1
        return Generation(
            text=self._engine.processor.decode(self._tokens),
            token_ids=tuple(self._tokens),
            prompt_tokens=len(self._inputs.token_ids),
            finish_reason="stop" if self._stopped else "length",
            acceptance_length=sum(self._lengths) / len(self._lengths) if self._lengths else None,
            accepted_lengths=tuple(self._lengths),
            tokens_per_second=later / seconds if later > 0 else None,
            time_to_first_token_ms=1000 * (self._first_token_time - self._start),
        )
