"""Record small drafts that the producers' own exporters write, and what their own forward passes
compute on them.

Run once per producer, where its package can be imported (SpecForge a6b6b02, SafeAILab/EAGLE,
AngelSlim 67394ce, speculators 0.9.0, nvidia-modelopt 0.47.0; transformers 5.23, torch 2.13):

    TORCHDYNAMO_DISABLE=1 python -m tests.checkpoint.record_goldens specforge
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

GOLDENS = Path(__file__).parent / "goldens"
HIDDEN, VOCAB, DRAFT_VOCAB, TARGET_LAYERS, ROWS = 16, 48, 12, 8, 9
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 5e4,
}
MROPE = {"rope_type": "mrope", "mrope_section": [4, 2, 2]}
INTERLEAVED = {
    "rope_type": "default",
    "type": "default",
    "mrope_interleaved": True,
    "mrope_section": [4, 2, 2],
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}
OLD = {"original_max_position_embeddings": 64}


def _fill(module: torch.nn.Module) -> None:
    """Random weights, and a vocabulary map where the draft has one."""
    generator = torch.Generator().manual_seed(0)
    for tensor in module.parameters():
        values = torch.randn(tensor.shape, generator=generator)
        tensor.data = 1 + 0.2 * values if tensor.ndim == 1 else values / tensor.shape[-1] ** 0.5
    kept = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    if getattr(module, "d2t", None) is not None:
        module.d2t.copy_(kept - torch.arange(DRAFT_VOCAB))
    if getattr(module, "t2d", None) is not None:
        module.t2d.zero_()[kept] = True


def _inputs(num_aux: int = 3, three_axes: bool = False, first: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.arange(ROWS)
    positions = (
        torch.stack([rows, rows // 2 + 3, rows % 4])
        if three_axes
        else (rows + first).expand(3, -1).clone()
    )
    aux = torch.randn(ROWS, num_aux * HIDDEN, generator=generator)
    return {
        "aux": aux,
        "embeds": torch.randn(ROWS, HIDDEN, generator=generator),
        "positions": positions,
    }


def _causal() -> Tensor:
    return torch.full((ROWS, ROWS), torch.finfo(torch.float32).min).triu(1)[None, None]


def _keep(case: str, inputs: dict[str, Tensor], logits: Tensor, features: Tensor) -> None:
    """``features``: what the producer's training feeds to the next step."""
    golden = {**inputs, "logits": logits, "features": features}
    contiguous = {name: tensor.detach().contiguous() for name, tensor in golden.items()}
    save_file(contiguous, GOLDENS / f"{case}.safetensors")


def _without_embedding(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in module.state_dict().items() if "embed" not in name}


@torch.no_grad()
def specforge() -> None:
    """``to_sglang``'s files, and the layer that its training unrolls."""
    from specforge.export.checkpoint_io import apply_legacy_rope_scaling
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    eagle = {
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
            "use_aux_hidden_state": True,
        }
    }
    cases: dict[str, dict[str, Any]] = {
        "specforge-3.1": {"fc_norm": True, "norm_output": True},
        "specforge-llama3": {"rope_scaling": LLAMA3 | OLD, **eagle},
        "specforge-yarn": {"rope_scaling": YARN | OLD, **eagle},
        "specforge-mrope": {"rope_scaling": MROPE, **eagle},
    }
    for case, extra in cases.items():
        names = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB}
        draft = LlamaForCausalLMEagle3(LlamaConfig(**{**CONFIG, **names, **extra})).float().eval()
        _fill(draft)
        draft.save_pretrained(GOLDENS / case, state_dict=_without_embedding(draft))
        apply_legacy_rope_scaling(str(GOLDENS / case))
        inputs = _inputs(three_axes="mrope" in case)
        positions = inputs["positions"][:, None] if "mrope" in case else inputs["positions"][:1]
        hidden = draft.backbone(
            input_embeds=inputs["embeds"][None],
            hidden_states=draft.project_hidden_states(inputs["aux"][None]),
            cache_hidden=[[], []],
            attention_mask=_causal(),
            position_ids=positions,
        )
        _keep(case, inputs, draft.compute_logits(hidden)[0], hidden[0])


@torch.no_grad()
def angelslim() -> None:
    """``save_pretrained`` without the embedding, as its trainer does it."""
    from angelslim.compressor.speculative.train.models.draft.llama_eagle3 import (
        Eagle3LlamaForCausalLM,
    )
    from transformers import LlamaConfig

    common = {"target_model_type": "qwen3_vl", "modal_type": "VLM", "tie_word_embeddings": True}
    for case, rope in {"angelslim": None, "angelslim-mrope": INTERLEAVED}.items():
        names = {
            "architectures": ["Eagle3LlamaForCausalLM"],
            "draft_vocab_size": DRAFT_VOCAB,
            "rope_scaling": rope,
        }
        draft = Eagle3LlamaForCausalLM(LlamaConfig(**{**CONFIG, **common, **names})).float().eval()
        _fill(draft)
        draft.save_pretrained(GOLDENS / case, state_dict=_without_embedding(draft))
        inputs = _inputs(three_axes=rope is not None)
        positions = inputs["positions"][:, None] if rope else inputs["positions"][:1]
        features = draft.combine_hidden_states(inputs["aux"][None])
        hidden, _ = draft.encode_layers(
            inputs["embeds"][None], features, [[], []], _causal(), positions, True
        )
        _keep(case, inputs, draft.compute_logits(hidden)[0], hidden[0])


@torch.no_grad()
def safeailab() -> None:
    """The bin file and the config of traineagle3, and the forward of eagle/model/cnets.py."""
    from types import SimpleNamespace

    from eagle.model.cnets import Model

    case, generator = "safeailab", torch.Generator().manual_seed(2)
    config = {key: value for key, value in CONFIG.items() if key not in {"head_dim", "rope_theta"}}
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "draft_vocab_size": DRAFT_VOCAB,
    }
    config |= {"hidden_act": "silu", "pad_token_id": 0, "transformers_version": "4.28.1"}
    draft = Model(SimpleNamespace(**config, rope_scaling=None, pretraining_tp=1)).float().eval()
    _fill(draft)
    (GOLDENS / case).mkdir(parents=True, exist_ok=True)
    (GOLDENS / case / "config.json").write_text(json.dumps(config, indent=2))
    state = {name: tensor for name, tensor in draft.state_dict().items() if "rotary" not in name}
    torch.save(state, GOLDENS / case / "pytorch_model.bin")
    inputs = _inputs()
    tokens = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    inputs["embeds"] = draft.embed_tokens.weight[tokens]
    hidden = draft(inputs["aux"][None], tokens[None])[0]
    _keep(case, inputs, draft.lm_head(draft.norm(hidden)), hidden)


@torch.no_grad()
def speculators() -> None:
    """``save_pretrained``, and one step of its training forward."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    cases: dict[str, tuple[Any, int, dict[str, Any]]] = {
        "speculators-llama": (
            LlamaConfig,
            1,
            {"norm_before_residual": True, "norm_before_fc": True},
        ),
        "speculators-3.1": (LlamaConfig, 1, {"fc_norm": True, "norm_output": True}),
        "speculators-qwen3": (Qwen3Config, 2, {"norm_before_residual": True}),
    }
    for case, (kind, layers, extra) in cases.items():
        rope = {"rope_type": "default", "rope_theta": CONFIG["rope_theta"]}
        sizes = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
        layer = kind(**{**sizes, "num_hidden_layers": layers, "rope_parameters": rope})
        layer._attn_implementation = "eager"
        verifier = VerifierConfig(
            name_or_path=None, architectures=["Qwen3VLForConditionalGeneration"]
        )
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=DRAFT_VOCAB,
            eagle_aux_hidden_state_layer_ids=[2, 4, 5],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
                default_proposal_method="greedy",
                verifier=verifier,
            ),
            **extra,
        )
        draft = Eagle3DraftModel(config).float().eval()
        kept = torch.arange(0, 2 * DRAFT_VOCAB, 2)
        mask = torch.zeros(VOCAB, dtype=torch.bool).scatter(0, kept, True)
        draft.load_vocab_mappings(mask, kept - torch.arange(DRAFT_VOCAB))
        _fill(draft)
        draft.save_pretrained(GOLDENS / case)
        (GOLDENS / case / "config.py").unlink()  # a copy of its own code
        seen: dict[str, Tensor] = {}
        draft.norm.register_forward_hook(lambda _, i, o, seen=seen: seen.update(pre=i[0], post=o))
        draft.lm_head.register_forward_hook(lambda _, __, o, seen=seen: seen.update(logits=o))
        inputs, tokens = _inputs(first=1), torch.arange(ROWS)[None] * 3
        draft(
            inputs["aux"][None],
            tokens,
            document_ids=torch.zeros(1, ROWS, dtype=torch.long),
            ttt_steps=1,
        )
        inputs["embeds"] = draft.embed_tokens.weight[tokens[0]]
        _keep(
            case, inputs, seen["logits"][0], seen["post" if extra.get("norm_output") else "pre"][0]
        )


@torch.no_grad()
def modelopt() -> None:
    """``export_speculative_decoding``, and the module's forward, which normalises the hidden
    half twice.
    """
    import modelopt.torch.speculative as mtsp
    from modelopt.torch.export import export_speculative_decoding
    from modelopt.torch.speculative.eagle.default_config import default_eagle_config
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    for case, layers in {"modelopt": 1, "modelopt-two-layers": 2}.items():
        model = LlamaForCausalLM(
            LlamaConfig(**{**CONFIG, "num_hidden_layers": TARGET_LAYERS})
        ).float()
        draft_config = {
            key: value for key, value in CONFIG.items() if key not in {"rope_theta", "vocab_size"}
        }
        draft_config |= {"num_hidden_layers": layers, "draft_vocab_size": DRAFT_VOCAB}
        draft_config |= {
            "use_last_layernorm": True,
            "use_aux_hidden_state": True,
            "torch_dtype": "float32",
        }
        architecture = {**default_eagle_config, **draft_config}
        mtsp.convert(
            model,
            [("eagle", {"eagle_decoder_type": "llama", "eagle_architecture_config": architecture})],
        )
        draft = model.eagle_module.float().eval()
        _fill(draft)
        export_speculative_decoding(model, export_dir=GOLDENS / case)
        inputs = _inputs(len(model.eagle_config.eagle_aux_hidden_state_layer_ids))
        draft.rotary_emb = LlamaRotaryEmbedding(draft.config)
        features = draft.fc(inputs["aux"][None])
        post, pre, _ = draft(features, inputs["embeds"][None], _causal(), inputs["positions"][:1])
        _keep(case, inputs, draft.lm_head(post)[0], pre[0])


RECORDERS: dict[str, Callable[[], None]] = {
    f.__name__: f for f in (specforge, angelslim, safeailab, speculators, modelopt)
}

if __name__ == "__main__":
    RECORDERS[sys.argv[1]]()
