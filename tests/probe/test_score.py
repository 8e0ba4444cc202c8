"""Scoring against the program's own drafter, one row after another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.probe.conftest import NUM_QUESTIONS, STEPS, Asked, ask, questions
from tests.tiny import build_tiny
from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.forward.batch import segment_inputs
from trt_eagle3.decode.forward.device_batch import DeviceBatch
from trt_eagle3.decode.forward.prompt_rows import PromptRows
from trt_eagle3.decode.forward.runner import DraftRunner
from trt_eagle3.decode.forward.segment import Segment
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.memory.state import layer_states
from trt_eagle3.decode.speculation.eagle import EagleDrafter
from trt_eagle3.decode.speculation.tree import static_tree
from trt_eagle3.drafts.eagle3.graph import draft_graph
from trt_eagle3.engine.bundle.record import reference_location
from trt_eagle3.engine.onnxruntime.session import OnnxRuntimeSession
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.errors import UserError
from trt_eagle3.probe.record import ProbeRecording
from trt_eagle3.probe.score import draft_ids
from trt_eagle3.spec import RopeSpec

CPU = torch.device("cpu")
READINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "base 1e4": {"rope": RopeSpec.plain(64, 1e4)},
    "linear, shifted, interleaved": {
        "positions": "linear",
        "position_shift": 1,
        "rope": RopeSpec.plain(64, 1e4, "interleaved", (12, 10, 10)),
    },
    "vision, shifted, interleaved": {
        "image_rows": "vision",
        "position_shift": 1,
        "positions": "3d",
        "rope": RopeSpec.plain(64, 1e4, "interleaved", (12, 10, 10)),
    },
    "feedback, aux": {"feedback": "post_norm", "aux_layers": (0, 2, 3), "aux_pre_deepstack": False},
}


class Recorder(DraftRunner):
    logits: list[Tensor]

    def forward(
        self, embeds: Tensor, features: Tensor, metadata: Any, logit_rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits, out = super().forward(embeds, features, metadata, logit_rows)
        self.logits.append(logits[0])
        return logits, out


def ref_chain(
    asked: Asked, manifest: DraftManifest, recording: ProbeRecording, row: int, runner: Recorder
) -> list[Tensor]:
    """The logits of each depth after the rows up to ``row`` of prompt and answer were committed,
    as in a step.
    """
    length, spec = row + 1, asked.bundle.spec
    sequence = SequenceState(recording.prompt, PagePool(40, 16), spec.vocab_size, drafting=True)
    sequence.tokens = recording.token_ids[sequence.num_prompt : length + 1].tolist()
    runner.states.reserve(sequence, length + STEPS)
    drafter = EagleDrafter(runner, manifest, max_rows=length)
    runner.logits = []
    segments = [Segment(sequence, 0, length)]
    rows = PromptRows.of(segments, length, CPU)
    table = segment_inputs(runner.states, segments)["page_table"]
    aux = recording.aux(manifest, spec.num_visual_levels)[None, :length]
    drafter.prefill(rows, rows.ids[:, 1:], table, aux)
    sequence.num_computed_tokens = length
    batch = DeviceBatch.of(runner.states, [sequence], [length], [-1], [STEPS], 1, CPU)
    tree = static_tree(SpeculationConfig(mode="chain", steps=STEPS))
    drafter.propose([sequence], tree, batch, [True])
    return [logits[-1] for logits in runner.logits]


@pytest.mark.parametrize("name", READINGS)
def test_rows_at_once_equal_the_drafter_row_by_row(name: str, tiny: Asked, tmp_path: Path) -> None:
    manifest = replace(tiny.manifest, **READINGS[name])
    recording = next(r for r in tiny.recordings if r.prompt.visual_rows.any())
    ids = draft_ids(manifest)
    draft = tmp_path / "draft.onnx"
    model = draft_graph(manifest, "float32", 16, reference_location)
    draft.write_bytes(model.SerializeToString())
    fuse = OnnxRuntimeSession(tiny.bundle.path / "fuse" / "model.onnx", tiny.bundle.path)
    session = OnnxRuntimeSession(draft, Path("/"))
    states = layer_states(session.states, 40 * 16)
    table = EmbeddingTable(tiny.bundle.record.embedding.ref(tiny.bundle.path), torch.float32)
    offsets = ids - torch.arange(len(ids))
    runner = Recorder(fuse, session, states, table, offsets)

    chains = tiny.scorer.chain(manifest, recording)
    compared = 0
    for s, chain in enumerate(chains):
        row = len(recording.prompt.token_ids) - 1 + s
        said = recording.token_ids[row + 2 :]
        for depth, expected in enumerate(ref_chain(tiny, manifest, recording, row, runner)):
            torch.testing.assert_close(chain[depth], expected, atol=2e-3, rtol=1e-4)
            compared += 1
            if depth >= len(said) or ids[expected.argmax()] != said[depth]:
                break  # from here on the drafter takes its own token, the scorer the target's
    assert compared > len(chains)


def test_score_is_what_its_definition_says(tiny: Asked) -> None:
    ids, score = draft_ids(tiny.manifest), tiny.scorer.score(tiny.manifest)
    rows: list[list[bool]] = []
    nats: list[float] = []
    for recording in tiny.recordings:
        chain = tiny.scorer.chain(tiny.manifest, recording)
        answer = recording.token_ids[len(recording.prompt.token_ids) :].tolist()
        of_token: dict[int, list[float]] = {}
        for s in range(len(chain)):
            hits = []
            for depth in range(min(STEPS, len(chain) - s)):
                token, logits = 1 + s + depth, chain[s, depth]
                hits.append(int(ids[logits.argmax()]) == answer[token])
                if answer[token] in ids:
                    probs = recording.target_probs[token - 1].double()
                    of_token.setdefault(token, []).append(
                        -float((probs * logits.double().log_softmax(-1)).sum())
                    )
            rows.append(hits)
        nats += [sum(several) / len(several) for several in of_token.values()]
    assert score.cross_entropy == pytest.approx(sum(nats) / len(nats), rel=1e-4)
    assert len(score.token_ce) == len(nats)
    assert score.position_0 == pytest.approx(sum(hits[0] for hits in rows) / len(rows))
    shares = [
        [all(hits[: depth + 1]) for hits in rows if len(hits) > depth] for depth in range(STEPS)
    ]
    assert score.acceptance_length == pytest.approx(
        1 + sum(sum(share) / len(share) for share in shares)
    )


def test_recorded_answer_is_the_engines_and_its_states_are_the_bundles_aux(tiny: Asked) -> None:
    asked, llm = questions(NUM_QUESTIONS), LLM(tiny.bundle)
    for question, recording in list(zip(asked, tiny.recordings, strict=True))[:4]:
        answer = llm.generate(
            question.prompt,
            images=question.images,
            videos=question.videos,
            speculation=False,
            max_tokens=96,
        )
        assert recording.token_ids[len(recording.prompt.token_ids) :].tolist() == list(
            answer.token_ids
        )
        assert recording.aux(tiny.manifest, 3).shape == (recording.num_rows, 3 * 256)
        torch.testing.assert_close(
            recording.target_probs.sum(dim=-1), torch.ones(len(recording.target_probs))
        )


def test_answers_too_short_are_refused(tiny: Asked, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--max-tokens"):
        ask(tiny.bundle, questions(2, ("text",)), tmp_path, max_tokens=2)


def test_torch_backend_scores_the_same(tiny: Asked, tmp_path: Path) -> None:
    bundle = LoadedBundle.open(
        build_tiny(tmp_path, speculation={"steps": STEPS}, engine={"backend": "torch"})
    )
    asked = ask(bundle, questions(2), tmp_path, max_tokens=24)
    other = ask(tiny.bundle, questions(2), tmp_path, max_tokens=24)
    scores = [a.scorer.score(tiny.manifest) for a in (asked, other)]
    torch.testing.assert_close(scores[0].token_ce, scores[1].token_ce, atol=1e-4, rtol=1e-3)
    assert scores[0].acceptance_length == scores[1].acceptance_length
