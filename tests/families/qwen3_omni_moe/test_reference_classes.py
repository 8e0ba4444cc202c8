"""transformers' classes that the reference uses are those of every supported version."""

from __future__ import annotations

import ast
from pathlib import Path

from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as hf

REFERENCE = Path(__file__).parents[3] / "trt_eagle3/families/qwen3_omni_moe/reference.py"
IN_5_17 = frozenset(
    {
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        "Qwen3OmniMoeThinkerTextDecoderLayer",
        "Qwen3OmniMoeThinkerTextRMSNorm",
        "Qwen3OmniMoeThinkerTextRotaryEmbedding",
        "Qwen3OmniMoeVisionEncoder",
        "apply_rotary_pos_emb",
    }
)
"""Names of transformers 5.17's module that may be used; read from its wheel."""


def test_reference_uses_names_of_5_17_and_of_the_installed_version() -> None:
    tree = ast.parse(REFERENCE.read_text(encoding="utf-8"))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "hf"
    }
    assert used <= IN_5_17
    assert all(hasattr(hf, name) for name in used)
