"""Train the tiny hybrid pair: a Qwen3.5 that begins with the dense tiny target's tower, embeddings,
attention and MLPs, its MTP head, and an EAGLE-3 draft; then figures of both drafts.

    python examples/tiny_hybrid/train_hybrid.py --output examples/tiny_hybrid

One GPU, minutes. Tasks, batches and losses are those of ``examples/tiny``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tiny"))

from evaluate import Pair, evaluate  # noqa: E402
from export import (  # noqa: E402
    as_bfloat16,
    rounded,
    save_draft,
    save_prompt_files,
    write_json,
)
from hybrid import (  # noqa: E402
    AUX_LAYERS,
    INNER,
    MtpHead,
    hybrid_config,
    hybrid_forward,
    mtp_forward,
)
from prompt import SPECIAL, train_bpe  # noqa: E402
from recipe import derived_args  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from train import VOCAB_ROWS, Budget, batches, fit_draft, fit_target, train_draft  # noqa: E402
from transformers import (  # noqa: E402
    Qwen3_5ForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)

DRAFT_WIDTH = 160


def begun(source: Path) -> Qwen3_5ForConditionalGeneration:
    """A hybrid that is not trained yet, with what the dense target in ``source`` can give it."""
    dense = Qwen3VLForConditionalGeneration.from_pretrained(source, dtype=torch.float32)
    model = Qwen3_5ForConditionalGeneration(hybrid_config(dense.config)).float()
    ours, theirs = model.model.language_model, dense.model.language_model
    tower = dense.model.visual.state_dict()
    kept = {name: tensor for name, tensor in tower.items() if "deepstack" not in name}
    model.model.visual.load_state_dict(kept)
    with torch.no_grad():
        ours.embed_tokens.weight.copy_(theirs.embed_tokens.weight)
        model.lm_head.weight.copy_(dense.lm_head.weight)
        ours.norm.weight.copy_(theirs.norm.weight - 1)
        for layer, old in zip(ours.layers, theirs.layers, strict=True):
            for name in ("input_layernorm", "post_attention_layernorm"):
                getattr(layer, name).weight.copy_(getattr(old, name).weight - 1)
            _take_mlp(layer.mlp, old.mlp)
            if hasattr(layer, "self_attn"):
                _take_attention(layer.self_attn, old.self_attn)
            else:
                _draw_linear(layer.linear_attn)
    return model


def _take_mlp(new: Any, old: Any) -> None:
    """The strongest rows of the dense one."""
    strength = old.up_proj.weight.norm(dim=1) * old.down_proj.weight.norm(dim=0)
    best = strength.argsort(descending=True)[:INNER]
    for name in ("gate_proj", "up_proj"):
        getattr(new, name).weight.copy_(getattr(old, name).weight[best])
    new.down_proj.weight.copy_(old.down_proj.weight[:, best])


def _take_attention(new: Any, old: Any) -> None:
    """The dense one's, behind gates that are half open."""
    for name in ("k_proj", "v_proj"):
        getattr(new, name).weight.copy_(getattr(old, name).weight)
    for name in ("q_norm", "k_norm"):
        getattr(new, name).weight.copy_(getattr(old, name).weight - 1)
    q = old.q_proj.weight.unflatten(0, (-1, new.head_dim))
    new.q_proj.weight.copy_(torch.cat([q, torch.zeros_like(q)], dim=1).flatten(0, 1))
    new.o_proj.weight.copy_(2 * old.o_proj.weight)


def _draw_linear(new: Any) -> None:
    """Heads that forget half in 2 to 200 rows, and a convolution that passes its own row on."""
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"):
        nn.init.normal_(getattr(new, name).weight, std=0.02)
    nn.init.uniform_(new.A_log, math.log(0.005), math.log(0.5))
    nn.init.zeros_(new.dt_bias)
    nn.init.normal_(new.conv1d.weight, std=0.1)
    new.conv1d.weight[:, 0, -1] = 1.0


def save_hybrid(folder: Path, model: Any, head: MtpHead, tokenizer: Tokenizer) -> None:
    """Target and MTP head in one checkpoint, as published ones lie."""
    folder.mkdir(parents=True, exist_ok=True)
    mtp = {f"mtp.{name}": tensor for name, tensor in as_bfloat16(head).items()}
    tensors = as_bfloat16(model) | mtp
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    config = model.config.to_diff_dict()
    text = config["text_config"] | {
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
    }
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "dtype": "bfloat16",
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": False,
    }
    write_json(folder / "config.json", config | whole)
    save_prompt_files(folder, tokenizer)


def parse_args() -> argparse.Namespace:
    return derived_args(__doc__, seed=3, steps={"target": 8000, "mtp": 3000, "draft": 3000})


class Recipe:
    """What is trained one after the other, and how long each took."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = train_bpe(0)
        self.seconds: dict[str, float] = {}

    def budget(self, name: str) -> Budget:
        args = vars(self.args)
        return Budget(args[f"{name}_steps"], args[f"{name}_seconds"])

    def timed(self, name: str, since: float) -> None:
        self.seconds[name] = round(time.time() - since, 1)
        print(f"{name}: {self.seconds[name]} s", flush=True)

    def target(self) -> Any:
        start = time.time()
        model = begun(self.args.source).to(self.device)
        budget = self.budget("target")
        fit_target(model, self.tokenizer, self.args, budget, forward=hybrid_forward)
        self.timed("target", start)
        return rounded(model)

    def mtp(self, target: Any) -> MtpHead:
        """Its vocabulary is the target's."""
        start, head = time.time(), MtpHead(target)
        args, budget = self.args, self.budget("mtp")
        size = (args.batch_size, budget.steps, args.workers)
        stream = batches(self.tokenizer, args.seed + 1, *size, self.device)
        fit_draft(head, stream, target, torch.arange(VOCAB_ROWS), args, budget, (), mtp_forward)
        self.timed("mtp", start)
        rounded(head)
        return head

    def draft(self, target: Any, target_ids: torch.Tensor) -> Any:
        start = time.time()
        place = (self.tokenizer, target, target_ids, self.args, self.budget("draft"))
        draft = train_draft(*place, AUX_LAYERS, DRAFT_WIDTH, hybrid_forward)
        self.timed("draft", start)
        return rounded(draft)

    def figures(self, target: Any, draft: Any, target_ids: torch.Tensor, run: Any) -> Any:
        ids = target_ids.to(self.device)
        layers = () if run is mtp_forward else AUX_LAYERS
        pair = Pair(self.tokenizer, target, draft, ids, self.device, layers, run)
        return evaluate(pair, self.args.per_kind, self.args.chains, show_misses=1)


def main() -> None:
    args = parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(args.seed)
    recipe = Recipe(args)
    target = recipe.target()
    head = recipe.mtp(target)
    save_hybrid(args.output / "target", target, head, recipe.tokenizer)
    d2t = load_file(args.source.parent / "draft" / "model.safetensors")["d2t"]
    target_ids = d2t + torch.arange(len(d2t))
    draft = recipe.draft(target, target_ids)
    ids = {token: recipe.tokenizer.token_to_id(token) for token in SPECIAL}
    save_draft(args.output / "draft", draft, target_ids, VOCAB_ROWS, ids, AUX_LAYERS, "qwen3_5")
    torch.backends.cuda.matmul.allow_tf32 = False
    on_cuda = recipe.device.type == "cuda"
    record = {
        "command": " ".join(["python", "examples/tiny_hybrid/train_hybrid.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if on_cuda else "cpu",
        "torch": torch.__version__,
        "seconds": recipe.seconds,
        "eagle3": recipe.figures(target, draft, target_ids, hybrid_forward),
        "mtp": recipe.figures(target, head, torch.arange(VOCAB_ROWS), mtp_forward),
    }
    (args.output / "metrics.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
