"""Read drafts of AngelSlim.

Facts from Tencent/AngelSlim 67394ce,
compressor/speculative/train/models/draft/llama_eagle3.py.
"""

from __future__ import annotations

from trt_eagle3.checkpoint.draft_files import DraftFiles
from trt_eagle3.checkpoint.manifest import Source
from trt_eagle3.checkpoint.producer import DEFAULT_BASE, Producer, RopeReading
from trt_eagle3.checkpoint.resolved_fields import ResolvedFields
from trt_eagle3.checkpoint.rope_schedule import RopeConfig

__all__ = ["ANGELSLIM"]

_SECTIONS = (24, 20, 20)  # default of its MRotaryEmbedding


def _evidence(files: DraftFiles) -> str:
    named = files.architecture == "Eagle3LlamaForCausalLM" and files.layer_prefix == "midlayer"
    return "Eagle3LlamaForCausalLM with midlayer tensors" if named else ""


def _read_rope(config: RopeConfig, _: ResolvedFields) -> RopeReading:
    kind = config.kind("type", "rope_type")
    if kind == "mrope" or config.interleaved:
        base, sections = config.base or DEFAULT_BASE, config.sections or _SECTIONS
        scaled = "default" if kind == "mrope" else kind
        return RopeReading(scaled, base, Source("config", config.where), "interleaved", sections)
    warning = ""
    if config.base not in {None, DEFAULT_BASE}:
        warning = (
            f"rope: config.json has base {config.base:g}, but AngelSlim's 1-D rope is trained "
            "with 1e4"
        )
    return RopeReading(
        kind, DEFAULT_BASE, Source("convention", "the 1-D rope ignores rope_theta"), warning=warning
    )


def _quirks(fields: ResolvedFields) -> None:
    if (
        fields.files.find("tie_word_embeddings", "flag")
        and "lm_head.weight" in fields.files.tensors
    ):
        fields.warn(
            "tie_word_embeddings is true beside a separate lm_head.weight; the tensor is used"
        )


ANGELSLIM = Producer(
    name="angelslim",
    evidence=_evidence,
    read_rope=_read_rope,
    aux_keys=("aux_hidden_states_layer_ids",),
    aux_ids="out",
    aux_pre_deepstack=True,
    quirks=_quirks,
)
