"""Keys that change what a draft computes are refused by their name, never read as an EAGLE-3
draft of nobody.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.drafts import (
    target_spec,
    write_generic_draft,
    write_specforge_draft,
    write_speculators_draft,
)
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.errors import UserError

Write = Callable[..., Any]

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "window": ({"sliding_window": 4096}, r"sliding_window 4096"),
    "window that is on": (
        {"sliding_window": 4096, "use_sliding_window": True},
        r"sliding_window 4096",
    ),
    "window of some layers": (
        {"sliding_window": 4096, "use_sliding_window": False, "layer_types": ["sliding_attention"]},
        r"layer_types 'sliding_attention'",
    ),
    "linear attention": (
        {"layer_types": ["full_attention", "linear_attention"]},
        r"layer_types 'linear_attention'",
    ),
    "EAGLE-4 head": (
        {"efficient_lm_head_config": {"type": "low_rank", "rank": 128, "num_candidates": 128}},
        r"EAGLE-4 \(efficient_lm_head_config \{",
    ),
    "EAGLE-4 by name": (
        {"architectures": ["LlamaForCausalLMEagle4"]},
        r"EAGLE-4 or later \(architecture ",
    ),
    "EAGLE-4 as the second name": (
        {"architectures": ["LlamaForCausalLM", "LlamaForCausalLMEagle4"]},
        r"EAGLE-4",
    ),
    "EAGLE-4 by speculators": ({"speculators_config": {"algorithm": "eagle4"}}, r"EAGLE-4"),
    "P-EAGLE": ({"architectures": ["PeagleQwen3ForCausalLM"]}, r"P-EAGLE"),
    "P-EAGLE by key": ({"parallel_drafting": True}, r"P-EAGLE"),
    "DFlash": ({"architectures": ["DFlash2DraftModel"]}, r"DFlash"),
    "DFlash by key": ({"dflash_config": {"mask_token_id": 1}}, r"DFlash \(dflash_config"),
    "DFlash by block": ({"block_size": 16}, r"a block drafter"),
    "DSpark": ({"architectures": ["Qwen3OmniDSparkModel"]}, r"DSpark"),
    "DSpark by key": ({"markov_rank": 256}, r"DSpark \(markov_rank 256"),
    "Medusa": ({"medusa_num_heads": 4}, r"Medusa"),
    "MTP": ({"num_nextn_predict_layers": 1}, r"multi-token prediction"),
    "XPress": ({"architectures": ["XPressModel"]}, r"XPress"),
    "LiLiCorr": ({"model_type": "lilicorr"}, r"LiLiCorr"),
    "norm of the attention": ({"attn_norm": True}, r"an unknown layout \(attn_norm True"),
    "norm after the MLP": ({"enable_post_mlp_norm": True}, r"enable_post_mlp_norm"),
    "embedding of the target": (
        {"share_draft_embedding_from_target": True},
        r"share_draft_embedding_from_target",
    ),
    "fusion": ({"input_fuse_type": "add"}, r"input_fuse_type 'add'"),
    "no rope": ({"position_embedding_type": "none"}, r"position_embedding_type 'none'"),
    "experts": ({"enable_moe": True}, r"enable_moe"),
    "scaled logits": ({"logit_scale": 0.5}, r"logit_scale 0.5"),
    "capped logits": ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping"),
    "chunks": ({"attention_chunk_size": 8192}, r"attention_chunk_size"),
    "in eagle_config": (
        {"eagle_config": {"sliding_window": 128}},
        r"eagle_config.sliding_window 128",
    ),
    "long": ({"k" * 5000 + "_norm": ["v" * 5000]}, r"an unknown layout"),
    "another count of states": ({"num_aux_hidden_states": 4}, r"num_aux_hidden_states: 4"),
    "fc_norm by its other name": ({"enable_fc_norm": True}, r"enable_fc_norm is True"),
}


@pytest.mark.parametrize("write", [write_generic_draft, write_specforge_draft])
@pytest.mark.parametrize("case", REFUSED)
def test_key_of_another_layout_is_refused_by_its_name(
    case: str, write: Write, tmp_path: Path
) -> None:
    keys, message = REFUSED[case]
    write(tmp_path, **keys)
    with pytest.raises(UserError) as caught:
        read_draft(tmp_path, target_spec())
    assert re.search(message, str(caught.value))
    assert len(str(caught.value)) < 600
    assert str(caught.value).isprintable()


def test_key_of_another_layout_in_the_layers_section_is_refused(tmp_path: Path) -> None:
    write_speculators_draft(tmp_path, aux=[2, 4, 5])
    config = json.loads((tmp_path / "config.json").read_text())
    config["transformer_layer_config"]["sliding_window"] = 4096
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"\(transformer_layer_config\.sliding_window 4096\)"):
        read_draft(tmp_path, target_spec())


NEUTRAL: dict[str, dict[str, Any]] = {
    "null": {"sliding_window": None, "efficient_lm_head_config": None, "layer_types": None},
    "off": {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
    "full attention": {
        "layer_types": ["full_attention"],
        "sliding_window": 4096,
        "use_sliding_window": True,
    },
    "on without a window": {"use_sliding_window": True},
    "values that change nothing": {
        "logit_scale": 1.0,
        "use_rope": True,
        "enable_moe": False,
        "num_experts": 0,
    },
    "not about the layers": {
        "_name_or_path": "x",
        "top_k": 50,
        "length_penalty": 1.0,
        "image_token_id": 5,
    },
    "as many states": {"num_aux_hidden_states": 3, "enable_fc_norm": False},
}


@pytest.mark.parametrize("case", NEUTRAL)
def test_key_that_changes_nothing_is_read(case: str, tmp_path: Path) -> None:
    write_generic_draft(tmp_path, **NEUTRAL[case])
    assert read_draft(tmp_path, target_spec()).producer == "generic"
