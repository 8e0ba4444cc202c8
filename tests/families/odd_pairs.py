"""A random target of odd geometry of every family, as transformers 5 saves it and as published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from tests.checkpoint.drafts import write_specforge_draft, write_speculators_draft
from tests.decode.bundle import PROCESSOR, SPECIAL
from tests.families.deepseek_vl.random_pair import save_deepseek
from tests.families.internvl.random_pair import save_internvl
from tests.families.llama.random_pair import save_llama
from tests.families.qwen2.random_pair import TEMPLATE, save_qwen2
from tests.families.qwen2_5_vl.random_pair import save_qwen25
from tests.families.qwen3_5.random_pair import TEXT as HYBRID
from tests.families.qwen3_5.random_pair import save_hybrid
from tests.families.qwen3_next.random_pair import save_qwen3_next
from tests.families.qwen3_omni_moe.random_pair import save_omni
from tests.families.random_pairs import AUX, NUM_LAYERS, draw_weights, save_target
from tests.families.text_pairs import PROMPT, processor_of, save_answer_draft, transformers_tokens
from tests.hybrid import EXPERTS as HYBRID_EXPERTS
from tests.moe import Layout, with_layout
from tests.multimodal.record_goldens import train_tokenizer
from tests.reference.target import VISION

__all__ = ["LAYOUTS", "ODD", "OddTarget"]

TEXT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
MIXTURE: dict[str, Any] = {
    **TEXT,
    "moe_intermediate_size": 20,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
AXES: dict[str, Any] = {
    "rope_parameters": {
        **TEXT["rope_parameters"],
        "mrope_section": [6, 4, 2],
        "mrope_interleaved": True,
    }
}
DRAFT_SECTIONS = {"rope_type": "mrope", "mrope_section": [4, 2, 2]}
HYBRID_ROPES = {
    "speculators": {
        "rope_type": "default",
        "mrope_section": [4, 2, 2],
        "partial_rotary_factor": 1.0,
    }
}
LAYOUTS = ("transformers 5", "published")
NUM_TOKENS, TOPK = 12, 6


@dataclass(frozen=True)
class OddTarget:
    """A family's random target.

    Attributes:
        save: writes it with a tokenizer as transformers 5 does; returns transformers' model.
        renamed: prefix of tensor names -> prefix in published checkpoints.
        experts: layout of experts that transformers 5 does not save.
        flat: whether published configs have no ``text_config``.
        draft_ropes: producer -> the rope that it writes for such a target.
    """

    save: Callable[[Path], Any]
    renamed: Mapping[str, str] = field(default_factory=dict)
    experts: Layout | None = None
    flat: bool = False
    draft_ropes: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def save_pairs(self, folder: Path) -> tuple[int, ...]:
        """Write a target in each of ``LAYOUTS``, and ``specforge`` and ``speculators``, its drafts.

        Returns:
            transformers' tokens after the prompt, in float32. The drafts know them.
        """
        saved, published = (folder / layout for layout in LAYOUTS)
        model = self.save(saved)
        model = getattr(model, "thinker", model)
        shutil.copytree(saved, published)
        self._rewrite(published, model)
        prompt = processor_of(saved).prompt(PROMPT).token_ids
        answer = transformers_tokens(model, prompt, NUM_TOKENS)
        known = {*answer, *range(max(0, TOPK - len(set(answer))))}
        for producer, write in WRITERS.items():
            rope = self.draft_ropes.get(producer)
            options = {} if rope is None else {"rope": rope}
            own = partial(write, aux=AUX[producer], **options)
            save_answer_draft(folder / producer, model, own, known)
        return answer

    def _rewrite(self, target: Path, model: Any) -> None:
        """Rewrite config and tensors as the family was published."""
        if self.experts is not None:
            with_layout(target, model, self.experts)
        file = target / "model.safetensors"
        tensors = {self._renamed(name): tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
        file = target / "config.json"
        config = _older(json.loads(file.read_text()))
        if self.flat:
            text = config.pop("text_config")
            config |= {key: value for key, value in text.items() if key != "model_type"}
        file.write_text(json.dumps(config))

    def _renamed(self, name: str) -> str:
        found = next((p for p in self.renamed if name.startswith(p)), "")
        return self.renamed.get(found, "") + name.removeprefix(found)


def _older(config: dict[str, Any]) -> dict[str, Any]:
    """A config in the spelling of transformers 4.57, and those in it."""
    made = {k: _older(v) if isinstance(v, dict) else v for k, v in config.items()}
    if "dtype" in made:
        made["torch_dtype"] = made.pop("dtype")
    if "rope_theta" in (rope := made.pop("rope_parameters", None) or {}):
        made["rope_theta"] = rope.pop("rope_theta")
        part = rope.pop("partial_rotary_factor", None)
        made |= {} if part is None else {"partial_rotary_factor": part}
        made["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    return made


def _save_text(config_class: Any, model_class: Any, folder: Path, **values: Any) -> Any:
    tokenizer = train_tokenizer()
    config = config_class(**values, vocab_size=-(-len(tokenizer) // 8) * 8)
    model = model_class(config).eval()
    save_target(folder, model, tokenizer, {}, TEMPLATE)
    return model


def _save_vision(config_class: Any, model_class: Any, folder: Path, **text: Any) -> Any:
    tokenizer = Tokenizer.from_file(str(PROCESSOR / "tokenizer.json"))
    vocab = -(-tokenizer.get_vocab_size() // 8) * 8
    vision = VISION | {"patch_size": 16, "out_hidden_size": text["hidden_size"]}
    ids = {name: tokenizer.token_to_id(token) for name, token in SPECIAL.items()}
    config = config_class(
        text_config={**text, "vocab_size": vocab},
        vision_config=vision,
        tie_word_embeddings=False,
        **ids,
    )
    model = model_class(config).eval()
    draw_weights(model)
    model.float().save_pretrained(folder)
    for file in PROCESSOR.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    end = tokenizer.token_to_id("<|im_end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    return model


WRITERS: Mapping[str, Callable[..., Any]] = {
    "specforge": write_specforge_draft,
    "speculators": write_speculators_draft,
}
DEEPSEEK = {"model.vision_model.": "model.vision_model.vision_model."}
ODD: Mapping[str, OddTarget] = {
    "deepseek_vl": OddTarget(partial(save_deepseek, family="deepseek_vl"), DEEPSEEK),
    "deepseek_vl_hybrid": OddTarget(partial(save_deepseek, family="deepseek_vl_hybrid"), DEEPSEEK),
    "internvl": OddTarget(
        save_internvl,
        {
            "model.language_model.": "language_model.model.",
            "model.vision_tower.": "vision_tower.",
            "model.multi_modal_projector.": "multi_modal_projector.",
            "lm_head.": "language_model.lm_head.",
        },
    ),
    "llama": OddTarget(partial(save_llama, name="Llama 3.2")),
    "qwen2": OddTarget(partial(save_qwen2, name="yarn")),
    "qwen2_5_vl": OddTarget(
        save_qwen25,
        {"model.language_model.": "model.", "model.visual.": "visual."},
        flat=True,
        draft_ropes={"specforge": DRAFT_SECTIONS},
    ),
    "qwen3": OddTarget(partial(_save_text, Qwen3Config, Qwen3ForCausalLM, **TEXT)),
    "qwen3_5": OddTarget(partial(save_hybrid, moe=False), draft_ropes=HYBRID_ROPES),
    "qwen3_5_moe": OddTarget(
        partial(save_hybrid, moe=True), experts="stacked", draft_ropes=HYBRID_ROPES
    ),
    "qwen3_5_moe_text": OddTarget(
        partial(
            _save_text,
            Qwen3_5MoeTextConfig,
            Qwen3_5MoeForCausalLM,
            **HYBRID,
            **HYBRID_EXPERTS,
        ),
        experts="stacked",
        draft_ropes=HYBRID_ROPES,
    ),
    "qwen3_5_text": OddTarget(
        partial(_save_text, Qwen3_5TextConfig, Qwen3_5ForCausalLM, **HYBRID),
        draft_ropes=HYBRID_ROPES,
    ),
    "qwen3_moe": OddTarget(partial(_save_text, Qwen3MoeConfig, Qwen3MoeForCausalLM, **MIXTURE)),
    "qwen3_next": OddTarget(
        partial(save_qwen3_next, num_hidden_layers=NUM_LAYERS), experts="stacked"
    ),
    "qwen3_omni_moe": OddTarget(partial(save_omni, num_experts=7)),
    "qwen3_vl": OddTarget(
        partial(_save_vision, Qwen3VLConfig, Qwen3VLForConditionalGeneration, **TEXT | AXES),
    ),
    "qwen3_vl_moe": OddTarget(
        partial(
            _save_vision,
            Qwen3VLMoeConfig,
            Qwen3VLMoeForConditionalGeneration,
            **MIXTURE | AXES | {"num_key_value_heads": 3},
        ),
        experts="transposed",
    ),
}
"""``model_type`` -> its target; every family has one."""
