"""Find config keys that change a draft's computation and that no EAGLE-3 layout has.

A draft with such a key is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from trt_eagle3.checkpoint.draft_files import DraftFiles
from trt_eagle3.checkpoint.parallel_keys import PARALLEL_KEYS
from trt_eagle3.errors import quote

__all__ = ["foreign_key", "is_structural"]

# Pattern of a key -> the drafter that uses it. The first match counts.
_OWNERS: Mapping[str, str] = {
    r"efficient_lm_head": "EAGLE-4",
    r"dflash": "DFlash",
    r"dspark|markov|confidence": "DSpark",
    r"parallel_drafting|ptd_token|pard_token": "P-EAGLE without mask_hidden",
    r"medusa": "Medusa",
    r"mtp_num|num_mtp|nextn": "multi-token prediction",
    r"^(block_size|mask_token_id|target_layer_ids|num_anchors)$": (
        "a block drafter (DFlash, DSpark)"
    ),
}
# Parts of unknown keys that concern the draft's computation.
_STRUCTURAL = re.compile(
    r"slid|window|chunk|head_(type|config)|rank$|candidate|moe|expert|layer_type|_layers$|norm|rope|rotary"
    r"|position_embedding|fuse|fusion|share|logit|softcap|multiplier|scal(e|ing|ar)|bias|block|parallel|lora|adapter"
    r"|mamba|ssm|conv|linear_attention|attn|attention|gate|embedding_from|residual|aux_|"
    + "|".join(_OWNERS)
)
# Keys of the known layouts, and keys of transformers' configs without an effect here.
_KNOWN = frozenset(
    {
        *("attention_bias", "attention_dropout", "attn_implementation", "_attn_implementation"),
        *("_attn_implementation_autoset", "_attn_implementation_internal"),
        *("attention_probs_dropout_prob", "aux_hidden_states_layer_ids", "bias"),
        *("chunk_size_feed_forward", "eagle_aux_hidden_state_layer_ids", "enable_fc_norm"),
        *("fc_norm", "max_window_layers", "mlp_bias", "norm_before_fc", "norm_before_residual"),
        *(
            "norm_output",
            "max_position_embeddings",
            "num_attention_heads",
            "num_aux_hidden_states",
            "num_hidden_layers",
        ),
        *("partial_rotary_factor", "resid_pdrop", "residual_dropout", "return_hidden_post_norm"),
        *("rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta"),
        *("target_num_hidden_layers", "num_target_layers", "transformer_layer_config"),
        *("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"),
        *("use_mtp_layernorm", "parallel_draft_step", "parallel_draft_heads_num_layers"),
        *("output_attentions", "add_cross_attention"),
    }
)
# Values, besides empty ones, that leave a layer as in EAGLE-3.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "use_rope": (True,),
    "position_embedding_type": ("rope", "rotary"),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "attention_multiplier": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
}
_SECTIONS = ("", "transformer_layer_config", "eagle_config")


def foreign_key(files: DraftFiles) -> str:
    """Name the first non-neutral key that no EAGLE-3 layout has, and its drafter; empty if none.

    Neutral are null, false, 0, empty values and ``_NEUTRAL``; a sliding window that
    ``use_sliding_window: false`` or ``layer_types`` disables; and ``layer_types`` of full attention
    only.

    Raises:
        UserError: one of these keys has the wrong kind.
    """
    for section in _SECTIONS:
        config = files.find(section, "object") if section else files.config
        for key, value in _foreign(files, section, config or {}):
            owner = next(
                (what for pattern, what in _OWNERS.items() if re.search(pattern, key.lower())), ""
            )
            place = f"{section}.{key}" if section else key
            return (
                f"{owner or 'a draft of an unknown layout'} ({quote(place)[1:-1]} "
                f"{quote(value, 80)})"
            )
    return ""


def _foreign(
    files: DraftFiles, section: str, config: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    def find(key: str, kind: Any) -> Any:
        return files.find(f"{section}.{key}" if section else key, kind)

    is_parallel = "mask_hidden" in files.tensors
    types = find("layer_types", "texts") or []
    other = next((kind for kind in types if kind != "full_attention"), None)
    if other is not None:
        yield "layer_types", other
    windowed = find("sliding_window", "whole")
    if windowed and find("use_sliding_window", "flag") is not False and not types:
        yield "sliding_window", windowed
    for key, value in config.items():
        known = _KNOWN | {"layer_types", "sliding_window", "use_sliding_window"}
        known |= PARALLEL_KEYS if is_parallel else frozenset()
        if key not in known and is_structural(key, value):
            yield key, value


def is_structural(key: str, value: Any) -> bool:
    """Return whether a key, by its name, may change what a draft computes; neutral values do not.

    Neutral are null, false, 0, empty values and ``_NEUTRAL``.
    """
    return (
        bool(value)
        and value not in _NEUTRAL.get(key, ())
        and _STRUCTURAL.search(key.lower()) is not None
    )
