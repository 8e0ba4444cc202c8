"""A target and a draft of a published geometry with random weights, on the GPU.

They time decoding without a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal
from zlib import crc32

import torch
from torch import Tensor

from benchmarks.drawn_packed import draw_packed
from benchmarks.synthetic import write_draft, write_target
from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.config import EngineConfig, KVDtype
from trt_eagle3.decode.forward.runner import TargetRunner
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.memory.state import layer_states
from trt_eagle3.decode.parallel import processes
from trt_eagle3.decode.parallel.leader import Ranks
from trt_eagle3.decode.request.prompt import Prompt
from trt_eagle3.decode.sampling.grammar_state import GrammarState
from trt_eagle3.decode.sampling.sampling_params import GREEDY, SamplingParams
from trt_eagle3.decode.speculation.drafter import Drafter
from trt_eagle3.decode.speculation.open import open_drafter
from trt_eagle3.decode.step.decoder import Decoder
from trt_eagle3.drafts.registry import find_draft, kind_of
from trt_eagle3.dtype import DType
from trt_eagle3.engine.bundle.record import REFERENCE_ROOT, reference_location
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.engine.runtime.session import Session
from trt_eagle3.engine.torch import program
from trt_eagle3.engine.torch.program import Weight
from trt_eagle3.engine.torch.session import TorchSession
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.build_graphs import build_graphs
from trt_eagle3.graph.weights import WeightExpr

__all__ = ["RandomPair", "draw_weights", "drawing_ranks", "random_pair"]

_DEVICE: Literal["cpu", "cuda"] = "cuda"


@dataclass(frozen=True)
class RandomPair:
    """A target's runner and a draft over random weights, and the pages that their caches share.

    ``open_drafter``: takes the keyword arguments of ``open_drafter``.
    """

    spec: TargetCheckpoint
    manifest: DraftManifest
    target: TargetRunner
    open_drafter: Callable[..., Drafter]
    pool: PagePool
    max_seq_len: int

    def decoder(
        self, prefill_chunk: int, *, drafting: bool = True, max_batch_size: int | None = None
    ) -> Decoder:
        """Return a decoder over the pair, with fixed shapes."""
        shapes = {"max_rows": prefill_chunk, "max_sequences": max_batch_size, "fixed_shapes": True}
        return Decoder(
            self.target,
            self.open_drafter(**shapes) if drafting else None,
            max_seq_len=self.max_seq_len,
            prefill_chunk=prefill_chunk,
            fixed_shapes=True,
            max_batch_size=max_batch_size,
        )

    def sequence(
        self,
        num_tokens: int,
        sampling: SamplingParams = GREEDY,
        grammar: GrammarState | None = None,
        *,
        drafting: bool = True,
    ) -> SequenceState:
        """Return a sequence with a random text prompt."""
        ids = torch.randint(1000, 30000, (num_tokens,))
        rows = torch.arange(num_tokens, dtype=torch.int32).expand(3, -1)
        prompt = Prompt(ids, rows, 0, torch.zeros(num_tokens, dtype=torch.bool))
        vocab_size = self.spec.vocab_size
        return SequenceState(prompt, self.pool, vocab_size, sampling, drafting, grammar)


def random_pair(
    folder: Path,
    size: str,
    page_size: int,
    *,
    max_seq_len: int,
    max_batch_size: int = 1,
    max_sequences: int = 0,
    weights: str = "bfloat16",
    kv_dtype: KVDtype = "compute",
    draft: str = "eagle3",
    ranks: Ranks | None = None,
) -> RandomPair:
    """Open a pair of ``size`` (benchmarks/synthetic.py) in bfloat16, with its graphs in ``folder``.

    Args:
        max_batch_size: the caches hold so many sequences of ``max_seq_len`` tokens.
        max_sequences: recurrent states of so many sequences, if they are more (and shorter).
        weights: format of the target's projections, one of ``PACKED_KINDS``.
        kv_dtype: as ``engine.kv_dtype``. draft: one of ``draft_option``.
        ranks: processes that share the target, in bfloat16; see ``drawing_ranks``.
    """

    def read(expr: WeightExpr, _root: Path, device: torch.device) -> Weight:
        packed = draw_packed(expr, weights, device)
        return _random(expr, device) if packed is None else packed

    write_target(folder / "target", size)
    write_draft(folder / "draft", size, kind=draft)
    spec = read_target(folder / "target")
    manifest = find_draft(str(folder / "draft"), spec, {})
    kind = kind_of(manifest)
    engine = EngineConfig(
        backend="torch",
        device=_DEVICE,
        dtype="bfloat16",
        page_size=page_size,
        kv_dtype=kv_dtype,
    )
    sessions: dict[str, Session] = {}
    for name, model in build_graphs(spec, manifest, engine, reference_location).items():
        if name == "vision":
            continue
        file = folder / f"{name}.onnx"
        file.write_bytes(model.SerializeToString())
        sessions[name] = (
            ranks.started().open_session("torch", file, REFERENCE_ROOT, ())
            if name == "target" and ranks is not None
            else TorchSession(file, REFERENCE_ROOT, device=_DEVICE, read_weight=read)
        )
    table_len = -(-max_seq_len // page_size)
    pool = PagePool(max_batch_size * table_len + 1, page_size, table_len)
    held = max(max_batch_size, max_sequences)
    target_states, draft_states = (
        layer_states(sessions[name].states, pool.num_pages * page_size, _DEVICE, held)
        for name in ("target", kind.graph_names[-1])
    )
    if ranks is not None:
        sizes = (pool.num_pages * page_size, held, 0)
        ranks.started().mirror(target_states, sessions["target"].states, *sizes)
    embedding = _RandomTable(spec.tensors["embed_tokens.weight"].shape)
    target = TargetRunner(sessions["target"], target_states, embedding, spec.num_visual_levels)
    whole = manifest.draft_vocab_size == spec.vocab_size
    d2t = None if whole else torch.arange(manifest.draft_vocab_size, device=_DEVICE)
    shapes = {name: manifest.tensors[name].shape for name in kind.tables(manifest)}
    opened = partial(
        open_drafter,
        manifest,
        [sessions[name] for name in kind.graph_names],
        draft_states,
        embedding,
        {name: _drawn(shape, torch.bfloat16, _DEVICE) for name, shape in shapes.items()},
        d2t,
    )
    return RandomPair(spec, manifest, target, opened, pool, max_seq_len)


def drawing_ranks(size: int) -> Ranks:
    """Return ranks that draw their weights on their devices.

    This process opens ranks' parts of targets only from then on.
    """
    processes.FOLLOWER = "benchmarks.drawing_follower"
    draw_weights()
    return Ranks(size, _DEVICE)


def draw_weights() -> None:
    """Draw the dense weights that a rank opens. What no rank cuts is equal on all ranks."""

    def drawn(expr: WeightExpr, _root: Path, _dtype: DType, device: torch.device) -> Tensor:
        torch.cuda.manual_seed(crc32(expr.parts[0].name.encode()))
        return _random(expr, device)

    setattr(program, "materialise", drawn)  # noqa: B010  # a name that it does not export


class _RandomTable(EmbeddingTable):
    """A random token table without a file.

    Zeros would make all tokens equal, and every draft right.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._table = torch.randn(shape, dtype=torch.bfloat16, device=_DEVICE)
        self._dtype = torch.bfloat16


def _random(expr: WeightExpr, device: torch.device) -> Tensor:
    return _drawn(expr.shape, expr.dtype.torch, device)


def _drawn(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Draw weights of a trained model's size: norms near one, matrices of unit gain."""
    drawn = torch.randn(shape, dtype=dtype, device=device)
    return 1 + 0.1 * drawn if len(shape) == 1 else drawn * shape[-1] ** -0.5
