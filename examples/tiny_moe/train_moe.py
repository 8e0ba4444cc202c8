"""Train the tiny mixture-of-experts pair: from the dense tiny pair's vision tower, embeddings and
attention, whose MLPs become experts; then a draft for it, and figures.

    python examples/tiny_moe/train_moe.py --output examples/tiny_moe

One GPU, minutes. Tasks, batches and losses are those of ``examples/tiny``. The vision tower stays
as it is; its last deepstack level is left out.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tiny"))

from evaluate import Pair, evaluate  # noqa: E402
from export import rounded, save_draft, save_target  # noqa: E402
from prompt import SPECIAL, train_bpe  # noqa: E402
from recipe import derived_args  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from train import VOCAB_ROWS, Budget, fit_target, train_draft  # noqa: E402
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration  # noqa: E402

SOURCE_LAYERS = (0, 1, 2, 3, 5, 7)  # of the dense target's eight
AUX_LAYERS = (1, 3, 4)
DENSE_LAYERS, DENSE_WIDTH = (0,), 128
NUM_EXPERTS, TOP_K, EXPERT_WIDTH = 8, 2, 64
DRAFT_WIDTH = 160
BALANCE = 0.01  # weight of the experts' balance in the loss
CONFIG = {
    "decoder_sparse_step": 1,
    "intermediate_size": DENSE_WIDTH,
    "mlp_only_layers": list(DENSE_LAYERS),
    "moe_intermediate_size": EXPERT_WIDTH,
    "norm_topk_prob": True,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
}


class SparseMlp(nn.Module):
    """A mixture of experts, its parameters named as transformers names them."""

    def __init__(self, dense: nn.Module) -> None:
        """Experts of the rows of ``dense``, dealt in turn, some of them to two experts."""
        super().__init__()
        rows, hidden = dense.gate_proj.weight.shape
        self.gate = nn.Linear(hidden, NUM_EXPERTS, bias=False)
        nn.init.normal_(self.gate.weight, std=0.02)
        self.gate.top_k = TOP_K
        own = [torch.arange(EXPERT_WIDTH) * NUM_EXPERTS + e for e in range(NUM_EXPERTS)]
        dealt = [taken % rows for taken in own]
        parts = [torch.cat([p.weight[d] for p in (dense.gate_proj, dense.up_proj)]) for d in dealt]
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.stack(parts).detach().clone())
        down = torch.stack([dense.down_proj.weight[:, d] for d in dealt]).detach()
        self.experts.down_proj = nn.Parameter(math.sqrt(NUM_EXPERTS) * down)


def _narrowed(dense: nn.Module) -> nn.Module:
    """The dense MLP's strongest rows."""
    with torch.no_grad():
        strength = dense.up_proj.weight.norm(dim=1) * dense.down_proj.weight.norm(dim=0)
        best = strength.argsort(descending=True)[:DENSE_WIDTH]
        for projection in (dense.gate_proj, dense.up_proj):
            projection.weight = nn.Parameter(projection.weight[best].clone())
        dense.down_proj.weight = nn.Parameter(dense.down_proj.weight[:, best].clone())
    return dense


def upcycled(source: Path) -> Qwen3VLForConditionalGeneration:
    """The dense target in ``source`` as a mixture of experts that is not trained yet."""
    config = Qwen3VLConfig.from_pretrained(source)
    model = Qwen3VLForConditionalGeneration.from_pretrained(source, dtype=torch.float32)
    decoder, visual = model.model.language_model, model.model.visual
    decoder.layers = nn.ModuleList(copy.deepcopy(decoder.layers[i]) for i in SOURCE_LAYERS)
    for index, layer in enumerate(decoder.layers):
        layer.mlp = _narrowed(layer.mlp) if index in DENSE_LAYERS else SparseMlp(layer.mlp)
    levels = config.vision_config.deepstack_visual_indexes[:-1]
    visual.deepstack_visual_indexes = levels
    visual.deepstack_merger_list = visual.deepstack_merger_list[: len(levels)]
    model.config.text_config.num_hidden_layers = len(SOURCE_LAYERS)
    model.config.vision_config.deepstack_visual_indexes = levels
    visual.requires_grad_(requires_grad=False)
    return model


def imbalance(model: nn.Module) -> Tensor:
    """Mean over sparse layers of E * sum over experts of (share of rows) * (mean chance): 1 where
    all experts serve as many.
    """
    found = []
    for layer in model.model.language_model.layers:
        if hasattr(layer.mlp, "experts"):
            chances = layer.mlp.gate.chances.flatten(0, 1)
            chosen = F.one_hot(chances.topk(TOP_K, dim=-1).indices, NUM_EXPERTS).sum(1)
            shares = chosen.float().mean(0) / TOP_K
            found.append(NUM_EXPERTS * (shares * chances.mean(0)).sum())
    return torch.stack(found).mean()


def parse_args() -> argparse.Namespace:
    return derived_args(__doc__, seed=2, steps={"target": 6000, "draft": 3000})


def main() -> None:
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(args.seed)
    tokenizer, seconds, start = train_bpe(0), {}, time.time()
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    target = upcycled(args.source).to(device)
    budget = Budget(args.target_steps, args.target_seconds)
    fit_target(target, tokenizer, args, budget, lambda model: BALANCE * imbalance(model))
    print(f"imbalance of the last batch: {imbalance(target).item():.2f}", flush=True)
    rounded(target)
    save_target(args.output / "target", target, tokenizer, CONFIG)
    seconds["target"], start = round(time.time() - start, 1), time.time()
    d2t = load_file(args.source.parent / "draft" / "model.safetensors")["d2t"]
    target_ids = d2t + torch.arange(len(d2t))
    budget = Budget(args.draft_steps, args.draft_seconds)
    draft = train_draft(tokenizer, target, target_ids, args, budget, AUX_LAYERS, DRAFT_WIDTH)
    place = (VOCAB_ROWS, ids, AUX_LAYERS, "qwen3_vl_moe")
    save_draft(args.output / "draft", rounded(draft), target_ids, *place)
    seconds["draft"] = round(time.time() - start, 1)
    torch.backends.cuda.matmul.allow_tf32 = False
    pair = Pair(tokenizer, target, draft, target_ids.to(device), device, AUX_LAYERS)
    record = {
        "command": " ".join(["python", "examples/tiny_moe/train_moe.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "seconds": seconds,
        "heldout": evaluate(pair, args.per_kind, args.chains, show_misses=1),
    }
    (args.output / "metrics.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
