"""Random pairs of text-only families, whose drafts are right now and then."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.checkpoint.drafts import Geometry
from tests.families.random_pairs import config_of
from tests.families.test_readers import Change, changed
from tests.quantised import PACKERS, pack
from trt_eagle3 import LLM, SamplingParams
from trt_eagle3.decode.policy.protocol import FixedPolicy
from trt_eagle3.decode.speculation.tree import configured_tree
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import family_of, read_target
from trt_eagle3.multimodal import Processor
from trt_eagle3.pipeline import build

__all__ = [
    "PROMPT",
    "check_conversation",
    "check_refused",
    "check_speculation",
    "processor_of",
    "quantise",
    "save_answer_draft",
    "transformers_tokens",
]

PROMPT = "What is 12 plus 30?"
NUM_TOKENS = 24
TREE = {"mode": "tree", "steps": 3, "topk": 6, "num_draft_tokens": 20}


def processor_of(target: Path, **options: Any) -> Processor:
    """The processor of a checkpoint."""
    spec = read_target(target)
    return family_of(spec).processor(target, spec, **options)


@torch.no_grad()
def transformers_tokens(
    model: PreTrainedModel, ids: torch.Tensor, num_tokens: int = NUM_TOKENS
) -> tuple[int, ...]:
    """The greedy answer to token ids."""
    options = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None}
    out = model.generate(ids[None], attention_mask=torch.ones_like(ids[None]), **options)  # type: ignore[operator]
    return tuple(out[0, len(ids) :].tolist())


def save_answer_draft(
    folder: Path,
    model: PreTrainedModel,
    write: Callable[[Path, Geometry], object],
    tokens: Collection[int],
) -> Path:
    """Write a draft of ``model``, whose vocabulary is ``tokens``.

    Its weights are random. With few tokens, some of its drafts are right.
    """
    config, kept = model.config.get_text_config(), torch.tensor(sorted(set(tokens)))
    geometry = replace(
        Geometry(),
        hidden=config.hidden_size,
        target_hidden=config.hidden_size,
        heads=3,
        kv_heads=1,
        head_dim=config.hidden_size // 3,
        vocab=config.vocab_size,
        draft_vocab=len(kept),
        target_layers=config.num_hidden_layers,
        base=5e5,
    )
    write(folder, geometry)
    table = {
        "d2t": kept - torch.arange(len(kept)),
        "t2d": torch.zeros(config.vocab_size, dtype=torch.bool).scatter(0, kept, True),
    }
    pickled, file = folder / "pytorch_model.bin", folder / "model.safetensors"
    if pickled.exists():
        torch.save(torch.load(pickled) | table, pickled)
    else:
        save_file(load_file(file) | table, file, {"format": "pt"})
    return folder


def check_conversation(target: Path) -> None:
    """Check that the tokens of a conversation are those of transformers' tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    messages = [
        {"role": "user", "content": "Compare, please — naïvely."},
        {"role": "assistant", "content": "Seen."},
        {"role": "user", "content": "And this?"},
    ]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert processor_of(target).messages(messages).token_ids.tolist() == expected["input_ids"]


def check_refused(target: Path, folder: Path, change: Change, expected: str) -> None:
    """Check that a copy with a changed config is refused in one line that contains ``expected``."""
    with pytest.raises(UserError, match=re.escape(expected)) as caught:
        read_target(changed(target, folder, change))
    assert "\n" not in str(caught.value)


def answer_of(model: PreTrainedModel, target: Path) -> tuple[int, ...]:
    """Transformers' tokens of ``model``, saved in ``target``, after the prompt."""
    return transformers_tokens(model, processor_of(target).prompt(PROMPT).token_ids)


def save_answer_pairs(
    folder: Path,
    save: Callable[[Path], PreTrainedModel],
    drafts: Mapping[str, Callable[[Path, Geometry], object]],
) -> Path:
    """Write ``target``, and a draft of each producer that knows the tokens of its answer."""
    model = save(folder / "target")
    tokens = answer_of(model, folder / "target")
    for producer, write in drafts.items():
        save_answer_draft(folder / producer, model, write, tokens)
    return folder


def quantise(folder: Path, name: str, **added: torch.Tensor) -> Path:
    """Pack the projections of a checkpoint in a format of ``PACKERS``, and add tensors."""
    packer, claim = PACKERS[name]
    file, config = folder / "model.safetensors", folder / "config.json"
    renamed = {n.replace("model.", "language_model."): t for n, t in load_file(file).items()}
    packed = pack(renamed, packer)
    tensors = {n.replace("language_model.", "model."): t for n, t in packed.items()}
    save_file(tensors | added, file, {"format": "pt"})
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"quantization_config": claim}))
    return folder


def check_speculation(
    target: Path, draft: Path, output: Path, backend: str, answer: tuple[int, ...]
) -> None:
    """Check that the tokens are ``answer`` with and without speculation, and drafts accepted."""
    engine = {"prefill_chunk": 64, "backend": backend}
    pair = config_of(target, draft, output, engine=engine, speculation=TREE)
    sampling = SamplingParams(max_tokens=len(answer), ignore_eos=True)
    with LLM(build(pair).path) as llm:
        plain = llm.generate(PROMPT, sampling=sampling, speculation=False)
        llm.use_policy(FixedPolicy(configured_tree(pair.speculation)))
        drafted = llm.generate(PROMPT, sampling=sampling)
    assert drafted.token_ids == plain.token_ids == answer
    assert max(drafted.accepted_lengths) > 1
