"""Random Qwen3.5s under the scheduler, with a draft that is often right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from tests.decode.pair import (
    DRAFT_VOCAB,
    NUM_PAGES,
    PAGE_SIZE,
    PREFILL_CHUNK,
    VOCAB,
    Pair,
)
from tests.decode.recurrent import ANSWERS, guessing
from tests.decode.scheduling import (
    MAX_BATCH,
    MAX_SEQ_LEN,
    MAX_TOKENS,
    TREES,
    TreeFor,
    finish,
    prompts_of,
)
from tests.drafts.mtp.head import add_head, read_head
from tests.hybrid import save_qwen3_5, save_qwen3_5_moe
from tests.reference.checkpoint import file_name, random_draft
from tests.reference.target import Target
from trt_eagle3.decode.forward.runner import TargetRunner
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.prefix_cache import PrefixCache
from trt_eagle3.decode.memory.recurrent import RecurrentStates
from trt_eagle3.decode.memory.state import LayerStates, PagedStates
from trt_eagle3.decode.request.prompt import Prompt
from trt_eagle3.decode.schedule.scheduler import Scheduler
from trt_eagle3.decode.step.decoder import Decoder
from trt_eagle3.drafts.eagle3.reference import Eagle3Reference
from trt_eagle3.drafts.mtp.reference import MtpReference
from trt_eagle3.drafts.registry import kind_of
from trt_eagle3.engine.onnxruntime.session import OnnxRuntimeSession
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.engine.torch.session import TorchSession
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.target import target_graph

__all__ = [
    "KINDS",
    "LAYOUTS",
    "ROOM",
    "SESSIONS",
    "Hybrid",
    "all_free",
    "check_batches",
    "check_preemption",
    "hybrid",
]

LAYOUTS: list[list[Any]] = [[9], [3, (2, 3), 2, (2, 2), 3], [17], [33]]
ROOM = 6  # snapshots
SESSIONS = {"onnxruntime": OnnxRuntimeSession, "torch": TorchSession}
KINDS: Mapping[str, Callable[..., Any]] = {"dense": save_qwen3_5, "moe": save_qwen3_5_moe}


@cache
def hybrid(kind: str = "dense") -> Hybrid:
    """That of a kind; it is made once."""
    return Hybrid(kind)


class Hybrid:
    """A Qwen3.5 and a draft of its width, with ONNX Runtime's sessions of the draft.

    ``kind``: of ``KINDS``; with ``+mtp`` its draft is an MTP head of its own.
    """

    def __init__(self, kind: str) -> None:
        directory = Path(mkdtemp(prefix="trt-eagle3-test-"))
        name, _, head = kind.partition("+")
        model = KINDS[name](directory, vocab_size=VOCAB, seed=3)
        if head:
            add_head(directory)
        spec = read_target(directory)
        draft: Any = _head(directory) if head else _eagle3(directory)
        m = draft.manifest
        place = ("float32", PAGE_SIZE, file_name)
        normed = {"aux_normed": m.takes_normed}
        graphs = {
            "target": target_graph(spec, m.aux_layers, False, *place, **normed),
            **kind_of(m).graphs(m, *place),
        }
        sessions = {}
        for name, graph in graphs.items():
            (directory / f"{name}.onnx").write_bytes(graph.SerializeToString())
            sessions[name] = OnnxRuntimeSession(directory / f"{name}.onnx", directory)
        table = EmbeddingTable(spec.tensors["embed_tokens.weight"], torch.float32)
        self.pair = Pair(Target(model, spec), draft, (table, table), sessions)
        self._alone: dict[int, list[int]] = {}

    @cached_property
    def prompts(self) -> tuple[Prompt, ...]:
        return prompts_of(self.pair, LAYOUTS)

    def make_decoder(
        self,
        states: RecurrentStates,
        backend: str = "onnxruntime",
        *,
        fixed_shapes: bool = False,
    ) -> Decoder:
        """``fixed_shapes``: steps run ahead of the host."""
        path = self.pair.target.spec.path
        session = SESSIONS[backend](path / "target.onnx", path)
        paged = [s for s in session.states if s.kind == "paged"]
        layers = LayerStates(PagedStates(paged, NUM_PAGES * PAGE_SIZE), states)
        target = TargetRunner(session, layers, self.pair.tables[0], 0)
        sizes: dict[str, Any] = {"max_seq_len": MAX_SEQ_LEN, "prefill_chunk": PREFILL_CHUNK}
        drafter = guessing(self.pair, fixed_shapes=fixed_shapes)
        return Decoder(target, drafter, fixed_shapes=fixed_shapes, **sizes)

    def make_states(self, num_snapshots: int = 0) -> RecurrentStates:
        kept = [s for s in self.pair.sessions["target"].states if s.kind != "paged"]
        return RecurrentStates(kept, MAX_BATCH, num_snapshots)

    def alone(self, index: int) -> list[int]:
        """What a prompt is answered alone, without speculation."""
        if index not in self._alone:
            self._alone[index] = self._answer_alone(index)
        return self._alone[index]

    def _answer_alone(self, index: int) -> list[int]:
        sequence = self.pair.sequence(self.prompts[index], PagePool(NUM_PAGES, PAGE_SIZE))
        tokens: list[int] = []
        for some in self.make_decoder(self.make_states()).run(sequence):
            tokens += some
            if len(tokens) >= MAX_TOKENS:
                break
        ANSWERS[id(self.prompts[index])] = tokens[:MAX_TOKENS]
        return tokens[:MAX_TOKENS]

    def make_scheduler(
        self,
        states: RecurrentStates,
        tree: str = "bushy",
        prefixes: PrefixCache | None = None,
        backend: str = "onnxruntime",
    ) -> Scheduler:
        return Scheduler(
            self.make_decoder(states, backend),
            max_batch_size=MAX_BATCH,
            policy=TreeFor(lambda _: TREES[tree]),
            prefix_cache=prefixes,
        )

    def answers(
        self, scheduler: Scheduler, pool: PagePool, indices: Sequence[int]
    ) -> list[list[int]]:
        """What prompts that draft say together."""
        asked = [self.pair.sequence(self.prompts[i], pool, drafting=True) for i in indices]
        for s in asked:
            scheduler.add(s)
        output_ids = finish(scheduler)
        return [output_ids[id(s)][:MAX_TOKENS] for s in asked]


def _eagle3(directory: Path) -> Eagle3Reference:
    return random_draft(directory, seed=1, vocab_size=VOCAB, draft_vocab_size=DRAFT_VOCAB)


def _head(directory: Path) -> MtpReference:
    return MtpReference.load(read_head(directory), torch.float32)


def all_free(states: RecurrentStates) -> bool:
    """Whether nobody owns an entry but that of no token and that of padding."""
    owners: list[int] = states._entries._owners
    return owners[:2] == [1, 1] and not any(owners[2:])


def check_batches(pair: Hybrid, tree: str, backend: str = "onnxruntime") -> None:
    """All prompts together answer as each does alone."""
    expected = [pair.alone(i) for i in range(len(LAYOUTS))]
    states = pair.make_states()
    scheduler = pair.make_scheduler(states, tree, backend=backend)
    assert pair.answers(scheduler, PagePool(NUM_PAGES, PAGE_SIZE), range(len(LAYOUTS))) == expected
    assert all_free(states)


def check_preemption(pair: Hybrid) -> None:
    """Sequences that are preempted, and then such as reuse prefixes, answer as each does alone."""
    expected = [pair.alone(i) for i in (1, 2)]
    pool = PagePool(16, PAGE_SIZE)  # both begin, one can end
    prefixes, states = PrefixCache(pool), pair.make_states(ROOM)
    scheduler = pair.make_scheduler(states, prefixes=prefixes)
    assert pair.answers(scheduler, pool, (1, 2)) == expected
    assert scheduler.num_preempted > 0
    assert pair.answers(scheduler, pool, (2, 1)) == expected[::-1]
    assert scheduler.num_reused_rows > 0
    prefixes.clear()
    assert all_free(states)
    assert states._room == ROOM
