"""Read drafts of SafeAILab's EAGLE.

Facts from SafeAILab/EAGLE, eagle/model/cnets.py and eagle/traineagle3.
"""

from __future__ import annotations

from trt_eagle3.checkpoint.draft_files import DraftFiles
from trt_eagle3.checkpoint.manifest import Source
from trt_eagle3.checkpoint.producer import DEFAULT_BASE, Producer, RopeReading
from trt_eagle3.checkpoint.resolved_fields import ResolvedFields
from trt_eagle3.checkpoint.rope_schedule import RopeConfig

__all__ = ["SAFEAILAB"]


def _evidence(files: DraftFiles) -> str:
    plain = files.architecture in {"", "LlamaForCausalLM"} and files.layer_prefix == "midlayer"
    return "LlamaForCausalLM with midlayer tensors" if plain else ""


def _read_rope(config: RopeConfig, _: ResolvedFields) -> RopeReading:
    kind = config.kind("type", "rope_type")
    if kind in {"linear", "dynamic"}:
        return RopeReading(
            kind, DEFAULT_BASE, Source("convention", "scaled ropes of cnets.py have base 1e4")
        )
    if config.base is None:
        return RopeReading(
            kind, DEFAULT_BASE, Source("convention", "no rope_theta: cnets.py uses 1e4")
        )
    warning = ""
    if config.base != DEFAULT_BASE:
        warning = (
            f"rope: base {config.base:g} as in config.json, which EAGLE's inference uses. EAGLE's "
            "trainer ignores it and uses 1e4. If that trained it: draft.overrides.rope: "
            "{base: 1e4}; probe measures which fits"
        )
    return RopeReading(kind, config.base, Source("config", config.where), warning=warning)


SAFEAILAB = Producer(
    name="safeailab",
    evidence=_evidence,
    read_rope=_read_rope,
    aux_keys=(),  # hard coded in training and inference
    aux_ids="state",
    aux_pre_deepstack=False,  # the hidden state at the input of the next layer
    positions="linear",
)
