"""What a TensorRT cannot do is refused by ``build`` in one line, before any weight is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Install
from tests.families.drawn_pairs import draw_pair
from tests.families.internvl.random_pair import save_internvl
from tests.families.qwen3_5.random_pair import save_hybrid
from tests.families.random_pairs import config_of
from trt_eagle3.engine.trt import bundle
from trt_eagle3.errors import UserError
from trt_eagle3.pipeline import build

Save = Callable[[Path], object]
FLOAT32: dict[str, Any] = {"dtype": "float32", "residual": "compute"}
BFLOAT16: dict[str, Any] = {"dtype": "bfloat16"}
REFUSED: dict[str, tuple[Save, dict[str, Any], str]] = {
    "heads of a tower": (
        lambda folder: save_internvl(
            folder / "target", vision={"hidden_size": 132, "num_attention_heads": 1}
        ),
        {},
        "TensorRT's plugin VisionAttention: heads have 132 channels, expected a multiple of 4, at "
        "most 128",
    ),
    "experts in float32": (
        lambda folder: draw_pair("qwen3_moe", folder),
        FLOAT32,
        "TensorRT's plugin FusedMoe: experts in float32 are not supported, set engine.dtype",
    ),
    "heads of linear attention": (
        lambda folder: save_hybrid(folder / "target", moe=False, linear_value_head_dim=132),
        {},
        "TensorRT's plugin GatedDelta: linear heads have 132 channels, expected a multiple of 4",
    ),
    "bfloat16": (
        lambda folder: draw_pair("llama", folder),
        BFLOAT16,
        "engine.dtype: bfloat16 needs TensorRT 10 or later, this is 8.6.0. Use float16",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_tensorrt_8_cannot_do_is_refused_before_weights_are_written(
    case: str, install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save, engine, reason = REFUSED[case]
    install("8.6.0")
    monkeypatch.setattr(bundle, "write_tables", lambda *_: pytest.fail("weights are written"))
    save(tmp_path)
    engine = {"prefill_chunk": 64, "backend": "tensorrt", **engine}
    config = config_of(tmp_path / "target", None, tmp_path / "engines", engine=engine)
    with pytest.raises(UserError) as refused:
        build(config)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not list((tmp_path / "engines").glob("random*"))
