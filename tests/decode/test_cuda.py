"""The loop on a CUDA device: the same tokens as on the CPU, and one wait a cycle."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tasks import examples

import trt_eagle3
from tests.decode.overwriting import ask_together
from tests.tiny import build_tiny
from trt_eagle3 import LLM, Request, SamplingParams
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.policy.protocol import BatchState
from trt_eagle3.decode.request.answer import Answer
from trt_eagle3.decode.sampling.sampling_params import GREEDY
from trt_eagle3.decode.step.prefill import FirstTokens
from trt_eagle3.engine import capi
from trt_eagle3.engine.torch.capture.draft_pieces import DraftPieces
from trt_eagle3.engine.torch.session import TorchSession
from trt_eagle3.errors import DeviceMemoryError, UserError
from trt_eagle3.host_copy import Readback

pytestmark = pytest.mark.gpu

PROMPTS = 40
CUDA = {"backend": "torch", "device": "cuda"}
CHAIN = {"mode": "chain", "steps": 5, "adaptive": False}
DYNAMIC = {"mode": "dynamic", "steps": 4, "topk": 4, "num_draft_tokens": 10, "adaptive": False}
TREE = {"mode": "tree", "steps": 4, "topk": 3, "num_draft_tokens": 12, "adaptive": False}


@pytest.fixture(scope="module", autouse=True)
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LLM]:

    def engine(**changes: dict[str, object]) -> LLM:
        limits = {"max_batch_size": 4}
        return trt_eagle3.load(
            build_tiny(tmp_path_factory.mktemp("engines"), limits=limits, **changes)
        )

    return {
        "cpu": engine(),
        "float32": engine(engine=CUDA, speculation=CHAIN),
        "adaptive": engine(engine=CUDA, speculation={"adaptive": True}),
        "tree": engine(engine=CUDA, speculation=TREE),
        "dynamic": engine(engine=CUDA, speculation=DYNAMIC),
        "bfloat16": engine(engine=CUDA | {"dtype": "bfloat16"}),
    }


def requests(sampling: SamplingParams = GREEDY, **options: Any) -> list[Request]:
    return [
        Request(
            e.prompt,
            list(e.images),
            [list(e.frames)] if e.frames else [],
            sampling.updated(max_tokens=64),
            **options,
        )
        for e in examples("heldout", 11, PROMPTS)
    ]


def answers(engine: LLM, concurrency: int = 1, **options: Any) -> list[tuple[int, ...]]:
    """Tokens of every request, so many of them in flight at once."""
    found: list[tuple[int, ...]] = []
    flying: list[Answer] = []
    for request in requests(**options):
        flying.append(engine.submit(request))
        if len(flying) == concurrency:
            found.append(flying.pop(0).finish().token_ids)
    return found + [answer.finish().token_ids for answer in flying]


@pytest.mark.parametrize("name", ["float32", "adaptive", "tree", "dynamic"])
def test_float32_on_cuda_gives_the_tokens_of_the_cpu_alone_and_in_batches(
    engines: dict[str, LLM], name: str
) -> None:
    plain = answers(engines["cpu"], speculation=False)
    assert answers(engines[name], speculation=False) == plain
    for concurrency in (1, 4):
        assert answers(engines[name], concurrency) == plain


@pytest.fixture(scope="module")
def crowds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LLM]:
    """Engines for 64 at once; fewer than half of them have room for their whole answers."""

    def engine(**changes: dict[str, object]) -> LLM:
        limits = {"max_batch_size": 64, "max_seq_len": 1024, "max_kv_tokens": 1024}
        folder = tmp_path_factory.mktemp("crowds")
        return trt_eagle3.load(build_tiny(folder, limits=limits, engine=CUDA, **changes))

    return {
        "chain": engine(),
        "tree": engine(speculation=TREE),
        "dynamic": engine(speculation=DYNAMIC),
    }


@pytest.mark.parametrize("name", ["chain", "tree", "dynamic"])
def test_crowds_of_any_size_say_in_float32_what_each_says_alone_on_the_cpu(
    engines: dict[str, LLM], crowds: dict[str, LLM], name: str
) -> None:
    """They come one after the other, some of them again; some sample, so the host accepts."""
    alone = list(zip(requests(), answers(engines["cpu"], speculation=False), strict=True))
    engine, seeded = crowds[name], SamplingParams(temperature=1.0, seed=3, max_tokens=24)
    scheduler = engine._started().scheduler
    for speculation, size in itertools.product((True, False), (2, 7, 33, 64)):
        flying: list[tuple[Answer, tuple[int, ...] | None]] = []
        for i, (request, said) in enumerate([*alone, *alone]):
            asked = replace(request, speculation=speculation)
            flying.append((engine.submit(asked), said))
            if i % 16 == 15:  # the host accepts while one samples
                flying.append((engine.submit(replace(asked, sampling=seeded)), None))
            while len(flying) >= size:
                answer, expected = flying.pop(0)
                assert answer.finish().token_ids == expected or expected is None, (size, i)
        for answer, expected in flying:
            assert answer.finish().token_ids == expected or expected is None, size
    assert scheduler.num_preempted > 0
    assert scheduler.num_reused_rows > 0


def test_decoding_captures_nothing_after_the_graphs_were_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"max_batch_size": 8, "prefix_cache": False}
    engine = trt_eagle3.load(build_tiny(tmp_path, engine=CUDA, limits=limits))
    assert engine.capture_graphs() == 6
    shapes, capture = list[torch.Size](), TorchSession._capture

    def watched(self: TorchSession, inputs: Any, reduced: Any) -> Any:
        shapes.append(next(iter(inputs.values())).shape)
        return capture(self, inputs, reduced)

    monkeypatch.setattr(TorchSession, "_capture", watched)
    num_nodes = max(tree.num_nodes for tree in engine.bundle.policy.trees_at(8) if tree)
    for speculation in (True, False):
        answers(engine, 8, speculation=speculation)
    assert [s for s in shapes if len(s) == 3 and s[1] <= num_nodes] == []
    engine.close()


def test_prompts_whose_draft_was_captured_are_drafted_for_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is accepted would tell a draft that was given other rows."""
    limits = {"max_batch_size": 8, "prefix_cache": False}
    asked = requests()[:24]

    def said(name: str, *, ahead: bool) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        path = build_tiny(tmp_path / name, engine=CUDA, speculation=CHAIN, limits=limits)
        with trt_eagle3.load(path) as engine:
            if ahead:
                engine.capture_graphs()
            answers = [
                answer
                for i in range(0, len(asked), 8)
                for answer in engine._started().submit_together(asked[i : i + 8], engine)
            ]
            found = [answer.finish() for answer in answers]
        return [(answer.token_ids, answer.accepted_lengths) for answer in found]

    ran, run = list[bool](), DraftPieces.run
    monkeypatch.setattr(DraftPieces, "run", lambda *args: ran.append(True) or run(*args))
    as_they_come = said("lazy", ahead=False)
    assert not ran
    assert said("ahead", ahead=True) == as_they_come
    assert len(ran) > 3


@pytest.mark.parametrize("name", ["float32", "adaptive", "tree", "dynamic"])
def test_prompts_admitted_together_keep_their_images(engines: dict[str, LLM], name: str) -> None:
    """Small images of one shape go through one captured graph, whose outputs the next ones
    overwrite.
    """
    images = sorted(examples("heldout", 12, 24, kinds=("image",)), key=lambda e: e.images[0].size)
    asked = [
        Request(e.prompt, list(e.images), sampling=SamplingParams(max_tokens=64)) for e in images
    ]
    alone = [engines["cpu"].submit(request).finish().token_ids for request in asked]
    for _ in range(3):  # shapes seen, captured
        assert [
            t for i in range(0, 24, 4) for t in ask_together(engines[name], asked[i : i + 4])
        ] == alone


def test_sampling_on_cuda_says_the_same_for_the_same_seed(engines: dict[str, LLM]) -> None:
    sampling = SamplingParams(temperature=1.0, top_k=50, top_p=0.95, repetition_penalty=1.1, seed=3)
    first, again = (answers(engines["dynamic"], sampling=sampling) for _ in range(2))
    assert first == again


def test_bfloat16_speculation_differs_from_plain_at_most_in_ties(
    engines: dict[str, LLM],
) -> None:
    """Verify and decode have other shapes, so other roundings: a near tie may fall either way,
    seldom.
    """
    pairs = zip(*(answers(engines["bfloat16"], speculation=s) for s in (False, True)), strict=True)
    assert sum(a != b for a, b in pairs) <= 2


@pytest.mark.parametrize("tree", [True, False], ids=["chain", "plain"])
def test_a_cycle_waits_for_the_device_once(
    engines: dict[str, LLM], tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the copy of what was said, and for nothing that was launched after it."""
    engine = engines["float32"]
    bundle, pool = engine.bundle, engine._started().pool
    prompt = bundle.preprocessor().prompt(engine.prepare("What is 12 plus 30?"))

    def decode() -> Generator[tuple[int, ...]]:
        sequence = SequenceState(prompt, pool, bundle.spec.vocab_size, drafting=True)
        wanted = bundle.policy.choose(BatchState(1, 1, 1)) if tree else None
        return bundle.decoder.run(sequence, wanted)

    for _ in range(3):
        list(zip(decode(), range(6), strict=False))  # shapes seen, captured
    cycles = decode()
    next(cycles), next(cycles)
    read, wait = list[Readback](), Readback.wait
    monkeypatch.setattr(Readback, "wait", lambda self: read.append(self) or wait(self))
    with waits() as found:
        next(cycles)
    assert found == []
    assert len(read) == 1


@contextmanager
def waits() -> Iterator[list[str]]:
    """Torch's warnings, line by line, of where the host waits for all that the device has to do."""
    found = list[str]()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found += [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]


@pytest.mark.parametrize("drafting", [True, False])
def test_a_prefill_waits_for_nothing(engines: dict[str, LLM], drafting: bool) -> None:
    """Neither images, nor their rows, nor the draft over them: a step may still run."""
    engine = engines["bfloat16"]
    bundle, pool = engine.bundle, engine._started().pool
    prepare, vision = bundle.preprocessor(), bundle.vision_encoder()
    asked = examples("heldout", 12, 2, kinds=("image",))
    prompts = [prepare.prompt(engine.prepare(e.prompt, list(e.images))) for e in asked]

    def prefilled() -> FirstTokens:
        sequences = [
            SequenceState(
                prompt.with_vision(vision.encode(prompt)),
                pool,
                bundle.spec.vocab_size,
                drafting=drafting,
            )
            for prompt in prompts
        ]
        for s in sequences:
            bundle.decoder.states.reserve(s, s.num_prefill)
        return bundle.decoder.prefiller.run([(s, s.num_prefill) for s in sequences])

    with torch.inference_mode():
        for _ in range(4):
            prefilled().append()  # shapes seen, captured
        with waits() as found:
            launched = prefilled()
        launched.append()
    assert found == []


def test_rows_that_are_put_by_a_mask_of_the_host_are_caught() -> None:
    embeds, mask = torch.zeros(8, 4, device="cuda"), torch.arange(8) % 2 > 0
    with waits() as found:
        embeds[mask] = 1.0
    assert len(found) == 1


def test_kernels_are_in_use(engines: dict[str, LLM]) -> None:
    assert engines["float32"].bundle.record.config.engine.device == "cuda"
    assert capi.available(), "build them first: make plugins"


def test_request_that_outgrows_the_memory_fails_alone_and_the_next_is_answered(
    tmp_path: Path,
) -> None:
    """The GPU is filled by somebody else after the engine was loaded: its limits fitted then."""
    limits = {"max_visual_tokens": 4000, "max_seq_len": 4096}
    engine = trt_eagle3.load(
        build_tiny(tmp_path, engine=CUDA | {"dtype": "bfloat16"}, limits=limits)
    )
    small, large = Image.new("RGB", (96, 64), "red"), Image.new("RGB", (128, 128))
    expected = engine.generate("What is this?", images=[small], max_tokens=8).token_ids
    many = {"images": [large] * 200}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 4e6) / total)
        with pytest.raises(DeviceMemoryError, match="Send fewer or smaller images"):
            engine.generate("What is this?", max_tokens=8, **many)
        assert engine.generate("What is this?", images=[small], max_tokens=8).token_ids == expected
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    engine.generate("What is this?", max_tokens=8, **many)
    engine.close()


def test_limits_that_the_gpu_cannot_hold_are_refused_at_load(tmp_path: Path) -> None:
    limits = {"max_batch_size": 4096, "max_seq_len": 4096, "max_kv_tokens": 1 << 24}
    bundle = build_tiny(tmp_path, engine=CUDA, limits=limits)
    with pytest.raises(UserError, match=r"Rebuild with limits\.max_kv_tokens"):
        trt_eagle3.load(bundle)


def test_kv_cache_is_as_large_as_the_gpu_has_room_for(tmp_path: Path) -> None:
    limits = {"max_batch_size": 4096, "max_seq_len": 4096, "memory_fraction": 0.02}
    bundle = LoadedBundle.open(build_tiny(tmp_path, engine=CUDA, limits=limits))
    tokens = bundle.limits.max_kv_tokens
    assert tokens is not None
    assert 4096 <= tokens < 4096 * 4096
    engine = LLM(bundle)
    before, total = torch.cuda.memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    engine.start()
    assert torch.cuda.memory_reserved() - before < 0.1 * total
    assert engine.metrics().kv_pages_total == tokens // bundle.page_size
    engine.close()
