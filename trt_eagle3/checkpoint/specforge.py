"""Read drafts of SpecForge.

Facts from sgl-project/SpecForge a6b6b02, specforge/modeling/draft/llama3_eagle.py, and its PR 431.
"""

from __future__ import annotations

from trt_eagle3.checkpoint.draft_files import DraftFiles
from trt_eagle3.checkpoint.manifest import Source
from trt_eagle3.checkpoint.modelopt import OWN_KEY
from trt_eagle3.checkpoint.producer import DEFAULT_BASE, Producer, RopeReading
from trt_eagle3.checkpoint.resolved_fields import ResolvedFields
from trt_eagle3.checkpoint.rope_schedule import RopeConfig

__all__ = ["SPECFORGE"]


_PARALLEL = "PEagleDraftModel"


def _evidence(files: DraftFiles) -> str:
    if files.architecture == _PARALLEL:
        return f"architecture {_PARALLEL}"
    if files.architecture != "LlamaForCausalLMEagle3":
        return ""
    if files.layer_prefix == "midlayer":
        return "LlamaForCausalLMEagle3 with midlayer tensors"
    other = files.find(OWN_KEY, "any") is not None
    return "LlamaForCausalLMEagle3 with t2d" if "t2d" in files.tensors and not other else ""


def _read_rope(config: RopeConfig, fields: ResolvedFields) -> RopeReading:
    base = config.base or DEFAULT_BASE
    source = (
        Source("config", config.where)
        if config.values or config.base
        else Source("default", "no rope key")
    )
    if config.interleaved and config.part == 1.0:  # else it is copied from the target
        return RopeReading(
            "default",
            DEFAULT_BASE,
            Source(
                "convention",
                "PR 431, the only revision that reads mrope_interleaved, trains chunked with "
                "base 1e4",
            ),
            "chunked",
            config.sections,
            f"rope: config.json has interleaved, base {base:g}; PR 431 trained chunked, base 1e4 "
            "nevertheless. If yours was trained as in config.json: draft.overrides.rope: {layout: "
            f"interleaved, base: {base:g}}}",
        )
    kind = config.kind()
    if kind == "mrope":
        if not config.sections:
            raise fields.error(
                "config.json rope_type mrope: mrope_section is missing. Set "
                "draft.overrides.rope.sections."
            )
        return RopeReading("default", base, source, "chunked", config.sections)
    warning = ""
    if config.sections:
        warning = (
            "rope: mrope_section beside rope_type default is ignored, as in SpecForge's training"
        )
    return RopeReading(kind, base, source, warning=warning)


def _quirks(fields: ResolvedFields) -> None:
    if fields.files.architecture == _PARALLEL:
        key = "norm_before_residual"
        normed = fields.files.find(key, "flag")
        fields.put("residual", "normed" if normed else "hidden", "config", f"{key} {normed}")
    norm_output = fields.files.find("norm_output", "flag")
    if norm_output:
        fields.warn(
            "norm_output is true, but SpecForge trains with the features before the norm; "
            "feedback stays pre_norm"
        )
    elif norm_output is False and "feedback" not in fields.overrides:
        raise fields.error(
            "norm_output is false: in SpecForge that means logits without the final norm, which "
            "is not supported. If it came from a server's config instead, set "
            "draft.overrides.feedback: pre_norm."
        )
    fields.put("feedback", "pre_norm", "convention", "SpecForge feeds the features before the norm")


SPECFORGE = Producer(
    name="specforge",
    evidence=_evidence,
    read_rope=_read_rope,
    aux_keys=("eagle_config.eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"),
    aux_ids="out",
    aux_pre_deepstack=True,
    whole_heads=True,
    mrope_shift=1,  # positions of the ids shifted left by one
    quirks=_quirks,
)
