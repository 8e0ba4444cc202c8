"""The recipe of examples/smollm2, on a small random Llama."""

from __future__ import annotations

import collections
import json
import sys
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tiny import ROOT

HERE = ROOT / "examples/smollm2"
sys.path.append(str(HERE))

import sample  # noqa: E402
import train_smollm2  # noqa: E402
from batch import Batch  # noqa: E402
from model import Draft  # noqa: E402

END = 2


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        eos_token_id=END,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def batch() -> Batch:
    found = [sample.Answer(list(range(3, 3 + n)), n // 2) for n in (9, 14, 20)]
    return next(train_smollm2.answer_batches(found, 3, END, torch.device("cpu")))


def test_held_out_prompts_have_five_kinds_and_a_source_for_every_quotation() -> None:
    entries = json.loads((HERE / "prompts.json").read_text())
    counts = collections.Counter(entry["kind"] for entry in entries)
    assert counts == dict.fromkeys(("chat", "code", "mathematics", "summary", "translation"), 12)
    quoting = [e for e in entries if e["kind"] in ("summary", "translation")]
    assert all(entry.get("source") for entry in quoting)


def test_sampled_greedy_answers_in_a_padded_batch_are_those_alone(
    target: LlamaForCausalLM,
) -> None:
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14]]
    later = time.monotonic() + 60
    together = sample.sample(target, prompts, [0.0] * 3, 12, END, later)
    for prompt, answer in zip(prompts, together, strict=True):
        ids = torch.tensor([prompt + answer[:-1]])
        wanted = target(ids).logits[0, len(prompt) - 1 :].argmax(-1)
        assert answer == wanted.tolist()


def test_saved_draft_reads_states_as_they_are(target: LlamaForCausalLM, batch: Batch) -> None:
    layers = (0, 2, 4)
    scales = train_smollm2.state_scales(target, batch, layers)
    aux = train_smollm2.llama_forward(target, batch, layers).aux
    scaled = train_smollm2.scaled_forward(scales)(target, batch, layers).aux
    draft = Draft(16, hidden=128, intermediate=64, heads=2, kv=1)
    saved = train_smollm2.unscaled(draft, scales)
    torch.testing.assert_close(saved.fc(aux), draft.fc(scaled), rtol=1e-4, atol=1e-5)
    real = scaled[0, 1 : int(batch.length[0])]
    assert 0.5 < real.pow(2).mean().sqrt() < 2
    assert not torch.equal(aux, scaled)


def test_every_answer_is_in_one_batch(batch: Batch) -> None:
    assert sorted(batch.length.tolist()) == [9, 14, 20]
    assert sorted(batch.prompt_len.tolist()) == [4, 7, 10]
    assert len(batch.patches) == 0
