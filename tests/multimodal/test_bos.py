"""A prompt has the BOS tokens that transformers gives it, whether its template or its tokenizer
writes them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.families.qwen2_5_vl.random_pair import TEMPLATE, save_qwen25
from trt_eagle3.families.registry import family_of, read_target

BOS = "<|vision_pad|>"


@pytest.mark.parametrize("of_template", [True, False])
def test_prompt_of_a_target_with_a_tower_has_one_bos(of_template: bool, tmp_path: Path) -> None:
    """transformers' processors add special tokens unless the text begins with BOS."""
    save_qwen25(tmp_path)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    bos_id = next(t["id"] for t in tokenizer["added_tokens"] if t["content"] == BOS)
    whole, special = {"id": "A", "type_id": 0}, {"id": BOS, "type_id": 0}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": special}, {"Sequence": whole}],
        "pair": [{"Sequence": whole}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [bos_id], "tokens": [BOS]}},
    }
    file.write_text(json.dumps(tokenizer))
    named = tmp_path / "tokenizer_config.json"
    named.write_text(json.dumps(json.loads(named.read_text()) | {"bos_token": BOS}))
    if of_template:
        (tmp_path / "chat_template.jinja").write_text("{{- bos_token -}}" + TEMPLATE)
    spec = read_target(tmp_path)
    processor = family_of(spec).processor(tmp_path, spec)
    for text in ("What is this?", f"What is {BOS}?"):
        found = processor.prompt(text).token_ids.tolist()
        assert (found[0], found.count(bos_id)) == (bos_id, 1)
