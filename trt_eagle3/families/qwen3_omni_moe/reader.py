"""Read the thinker of a Qwen3-Omni checkpoint."""

from __future__ import annotations

from trt_eagle3.checkpoint.model_config import ModelConfig
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.checkpoint.target_tensors import UNREAD, Prefixes
from trt_eagle3.families.qwen3.sparse_layers import SparseLayers
from trt_eagle3.families.qwen3_vl.reader import read_qwen3_vl

__all__ = ["POSITIONS_PER_SECOND", "read_thinker"]

POSITIONS_PER_SECOND = "position_id_per_seconds"
"""Key of ``VisionSpec.own``, as in the config: rope positions per second of a video."""

_ARCHITECTURE = "Qwen3OmniMoeForConditionalGeneration"
_LINEARS = (("ln_q.", "norm."), ("mlp.0.", "linear_fc1."), ("mlp.2.", "linear_fc2."))


def read_thinker(config: ModelConfig) -> TargetCheckpoint:
    """Read the thinker. Its config is a section of the checkpoint's.

    Raises:
        UserError: its kind is not supported, or its tensors do not fit.
    """
    section = config.get("thinker_config", "object")
    if not section:
        raise config.error("thinker_config: expected an object, got none")
    inherited = ("architectures", "quantization_config", "compression_config")
    told = {key: config.values[key] for key in inherited if key in config.values}
    thinker = ModelConfig({**section, "architectures": None, **told}, config.file)
    levels = thinker.get("vision_config.deepstack_visual_indexes", "wholes", (8, 16, 24))
    per_second = thinker.whole(POSITIONS_PER_SECOND, 25)
    return read_qwen3_vl(
        thinker,
        "qwen3_omni_moe",
        _ARCHITECTURE,
        SparseLayers(always_renormalises=False, by_default=True),
        _prefixes(len(levels)),
        {POSITIONS_PER_SECOND: per_second},
    )


def _prefixes(num_levels: int) -> Prefixes:
    mergers = {"merger.": "merger."}
    mergers |= {f"merger_list.{i}.": f"deepstack_merger_list.{i}." for i in range(num_levels)}
    return (
        *(
            (f"thinker.visual.{old}{theirs}", f"visual.{new}{ours}")
            for old, new in mergers.items()
            for theirs, ours in _LINEARS
        ),
        ("thinker.visual.", "visual."),
        ("thinker.model.", ""),
        ("thinker.lm_head.", "lm_head."),
        ("thinker.audio_tower.", f"{UNREAD}audio_tower."),
        ("talker.", f"{UNREAD}talker."),
        ("code2wav.", f"{UNREAD}code2wav."),
    )
