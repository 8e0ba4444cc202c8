"""The registry: every check, in the order in which data flows through the engine.

The first check that fails locates the fault. To add a check, write its function and add its line.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from trt_eagle3.parity.checks import (
    batching,
    bundle,
    draft,
    inputs,
    kv,
    options,
    processor,
    sampling,
    sampling_entropy,
    target,
    tokens,
    tools_format,
    vision,
    weights,
)
from trt_eagle3.parity.checks.check_recorder import Check, Measurements
from trt_eagle3.parity.checks.evidence import Evidence

__all__ = ["CHECKS", "run_check"]

_CHECKS = (
    Check(
        "bundle.meaning",
        "bundle",
        "geometry and draft manifest, against the checkpoints",
        "exact",
        bundle.check_meaning,
        needs_pytorch=False,
    ),
    Check(
        "bundle.files",
        "bundle",
        "weights and processor files, byte for byte as in the checkpoints",
        "exact",
        bundle.check_files,
    ),
    Check(
        "bundle.tables",
        "bundle",
        "token tables and draft vocabulary, for every token",
        "exact",
        bundle.check_tables,
    ),
    Check(
        "weights.values",
        "weights",
        "quantised weights as the engine dequantises them, every number",
        "exact",
        weights.check_values,
        lacks=weights.lacks_quantised,
    ),
    Check(
        "weights.made",
        "weights",
        "weights that the build quantised, against the checkpoint's",
        "made_weights",
        weights.check_made,
        lacks=weights.lacks_made,
    ),
    Check(
        "processor.token_ids",
        "processor",
        "prompt token ids",
        "exact",
        processor.check_token_ids,
        needs_pytorch=False,
    ),
    Check(
        "processor.position_ids",
        "processor",
        "rope positions and rope_delta of the prompt",
        "exact",
        processor.check_position_ids,
        needs_pytorch=False,
    ),
    Check(
        "processor.pixel_values",
        "processor",
        "patches and grids",
        "pixel_values",
        processor.check_pixel_values,
        needs_pytorch=False,
        lacks=vision.lacks_tower,
    ),
    Check(
        "vision.embeds",
        "vision",
        "visual embeddings",
        "vision",
        vision.check_visual_embeds,
        needs_pytorch=False,
        lacks=vision.lacks_tower,
    ),
    Check(
        "vision.deepstack",
        "vision",
        "deepstack levels",
        "vision",
        vision.check_visual_levels,
        needs_pytorch=False,
        lacks=vision.lacks_levels,
    ),
    Check(
        "target.inputs_embeds",
        "prefill",
        "token embeddings and visual rows that the target receives",
        "exact",
        inputs.check_inputs_embeds,
    ),
    Check(
        "target.deepstack_embeds",
        "prefill",
        "deepstack rows that the target receives",
        "exact",
        inputs.check_visual_level_inputs,
        lacks=vision.lacks_levels,
    ),
    Check(
        "target.position_ids",
        "decode",
        "rope positions of every row, including decoded and verified rows",
        "exact",
        inputs.check_position_ids,
        needs_pytorch=False,
    ),
    Check(
        "kv.rows",
        "target",
        "keys and values in the FP8 cache, against their rows and scales",
        "exact",
        kv.check_rows,
        lacks=kv.lacks_fp8,
    ),
    Check(
        "kv.attention",
        "target",
        "attention of every layer over the numbers in the FP8 cache",
        "kv_attention",
        kv.check_attention,
        lacks=kv.lacks_fp8,
    ),
    Check(
        "target.layer_steps",
        "target",
        "each decoder layer, from the engine's own input",
        "layer_step",
        target.check_layer_steps,
    ),
    Check(
        "target.layers",
        "target",
        "each decoder layer's output",
        "layer_output",
        target.check_layers,
        needs_pytorch=False,
    ),
    Check(
        "target.aux",
        "target",
        "aux hidden states",
        "aux",
        target.check_aux,
        needs_draft=True,
        needs_pytorch=False,
    ),
    Check(
        "target.logits_cosine",
        "target",
        "logits: direction",
        "logits_cosine",
        target.check_logits_cosine,
        needs_pytorch=False,
    ),
    Check(
        "target.logits_l2",
        "target",
        "logits: size of the error",
        "logits_l2",
        target.check_logits_l2,
        needs_pytorch=False,
    ),
    Check(
        "target.top1",
        "target",
        "logits: best token where the reference is certain",
        "top1",
        target.check_top1,
        needs_pytorch=False,
    ),
    Check(
        "target.top5",
        "target",
        "logits: best token where the reference is uncertain",
        "top5",
        target.check_top5,
        needs_pytorch=False,
    ),
    Check(
        "tokens.plain",
        "decode",
        "greedy tokens without speculation, against the reference",
        "token_failures",
        tokens.check_autoregressive_tokens,
        needs_pytorch=False,
    ),
    Check(
        "tokens.text",
        "decode",
        "text of the answers, against transformers' decoding of their tokens",
        "exact",
        tokens.check_text,
    ),
    Check(
        "verify.logits",
        "verify",
        "logits of verified rows, against the reference",
        "logits_l2",
        tokens.check_verify_logits,
        needs_draft=True,
    ),
    Check(
        "tokens.speculative",
        "decode",
        "greedy tokens with speculation, against those without",
        "token_failures",
        tokens.check_speculative_tokens,
        needs_draft=True,
        needs_pytorch=False,
    ),
    Check(
        "draft.aux",
        "draft extend",
        "aux rows that the draft receives, against the reference",
        "aux",
        draft.check_aux,
        needs_draft=True,
    ),
    Check(
        "draft.inputs_embeds",
        "draft extend",
        "token embeddings that the draft receives",
        "exact",
        draft.check_inputs_embeds,
        needs_draft=True,
    ),
    Check(
        "draft.position_ids",
        "draft extend",
        "rope positions of the draft's rows",
        "exact",
        draft.check_position_ids,
        needs_draft=True,
    ),
    Check(
        "draft.fuse",
        "fuse",
        "features of the aux hidden states",
        "draft_features",
        draft.check_fuse,
        needs_draft=True,
    ),
    Check(
        "draft.features",
        "draft",
        "features fed back, over four steps",
        "draft_steps",
        draft.check_features,
        needs_draft=True,
    ),
    Check(
        "draft.logits",
        "draft",
        "draft logits over four steps",
        "draft_steps",
        draft.check_logits,
        needs_draft=True,
    ),
    Check(
        "draft.proposals",
        "propose",
        "proposed tokens are among the draft's best, and a tree was verified",
        "exact",
        draft.check_proposals,
        needs_draft=True,
    ),
    Check(
        "draft.acceptance",
        "accept",
        "acceptance by position, against the reference draft's own",
        "acceptance",
        draft.check_acceptance,
        needs_draft=True,
        needs_pytorch=False,
    ),
    Check(
        "batch.tokens",
        "batch",
        "tokens of all prompts at once, against each alone",
        "token_failures",
        batching.check_tokens,
    ),
    Check(
        "batch.logits",
        "batch",
        "logits of all prompts at once, against the reference",
        "logits_l2",
        batching.check_logits,
    ),
    Check(
        "batch.acceptance",
        "batch",
        "acceptance of all prompts at once, against each alone",
        "acceptance",
        batching.check_acceptance,
        needs_draft=True,
    ),
    Check(
        "sampling.probabilities",
        "sampling",
        "processed target probabilities",
        "sampling_probabilities",
        sampling.check_probabilities,
    ),
    Check(
        "sampling.tokens",
        "sampling",
        "frequencies of sampled tokens",
        "sampling_frequencies",
        sampling_entropy.check_tokens,
    ),
    Check(
        "options.grammar",
        "options",
        "answers with a grammar, parsed by independent parsers",
        "exact",
        options.check_grammar,
    ),
    Check(
        "options.tools_format",
        "options",
        "tool calls: parsed independently, in pieces, and as the chat template writes them",
        "exact",
        tools_format.check_tools_format,
    ),
    Check(
        "options.tokens",
        "options",
        "tokens with grammars, penalties, stop texts, seeds: with and without speculation",
        "token_failures",
        options.check_tokens,
    ),
    Check(
        "options.seeds",
        "options",
        "tokens of a seed, sampled twice",
        "seed_draws",
        options.check_seeds,
    ),
    Check(
        "options.logprobs",
        "options",
        "log-probabilities of emitted tokens, against the reference's",
        "logprobs",
        options.check_logprobs,
    ),
)
CHECKS: Mapping[str, Check] = {check.name: check for check in _CHECKS}


def run_check(evidence: Evidence, m: Measurements, left_out: Collection[str] = ()) -> None:
    """Run one check, or record why it is skipped or does not apply."""
    check = m.check
    if check.name in left_out:
        m.skip("left out")
    elif check.needs_pytorch and evidence.pytorch is None:
        m.skip("only against PyTorch")
    elif check.needs_draft and evidence.manifest is None:
        m.not_applicable("a bundle without a draft")
    elif lacking := check.lacks(evidence):
        m.not_applicable(lacking)
    else:
        check.function(evidence, m)
