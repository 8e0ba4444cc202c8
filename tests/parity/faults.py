"""The catalogue of planted faults: what each one does, and the gate and tensor that must name it.

``docs/validate.md`` shows it as a table: ``python -m tests.parity.faults`` writes that table, and the tolerances'.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

from tests.parity.planting import MANIFEST, SPEC, Planted, Seam, Tensors
from tests.tiny import ROOT
from trt_eagle3.checkpoint.rope import RopeSpec
from trt_eagle3.checkpoint.target import TargetSpec
from trt_eagle3.decode import decoder, sampling, verify
from trt_eagle3.decode.accept import Accepted, accept
from trt_eagle3.decode.kv_cache import KVCache
from trt_eagle3.decode.prompt import Prompt, Vision
from trt_eagle3.parity.board import GATES
from trt_eagle3.parity.thresholds import THRESHOLDS

DOCUMENT = ROOT / "docs/validate.md"


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        gate: the first that fails. also: others that must fail with it. tensor: what the diagnosis names.
        sampled: whether it is seen in sampling alone.
    """

    what: str
    gate: str
    tensor: str
    plant: Callable[[Planted], None]
    sampled: bool = False
    also: tuple[str, ...] = ()


def _text(**changes: Any) -> TargetSpec:
    return dataclasses.replace(SPEC, text=dataclasses.replace(SPEC.text, **changes))


def _rope(layout: Any = "interleaved", sections: tuple[int, ...] = (12, 10, 10), base: float = 5e6) -> TargetSpec:
    return _text(rope=RopeSpec.plain(64, base, layout, sections))


def _swapped(left: str, right: str) -> TargetSpec:
    tensors = {**SPEC.tensors, left: SPEC.tensors[right], right: SPEC.tensors[left]}
    return dataclasses.replace(SPEC, tensors=tensors)


def _reweigh(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Planted], None]:
    return lambda p: p.reweigh("target", SPEC.tensors[name], change)


def _reweigh_draft(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Planted], None]:
    return lambda p: p.reweigh("draft", MANIFEST.tensors[name], change)


def _draft(graph: str = "draft", **changes: Any) -> Callable[[Planted], None]:
    return lambda p: p.rebuild(graph, draft=dataclasses.replace(MANIFEST, **changes))


def _given(side: str, graph: str, change: Callable[[Seam, Tensors], Tensors]) -> Callable[[Planted], None]:
    return lambda p: getattr(p, side).update({graph: Seam(None, given=change)})  # type: ignore[arg-type]


def _decoding(inputs: Tensors) -> bool:
    """A pass over rows after a prompt: prompts here are prefilled in one pass."""
    return int(inputs["past_lengths"][0]) > 0


def _moved(inputs: Tensors, name: str, change: Callable[[Tensor], Tensor]) -> Tensors:
    return {**inputs, name: change(inputs[name])}


def _seen(change: Callable[[Vision], Vision]) -> Callable[[Planted], None]:
    def plant(p: Planted) -> None:
        def changed(prompt: Prompt) -> Prompt:
            return dataclasses.replace(prompt, see=lambda: change(prompt.see()))

        p.prompt = changed

    return plant


def _without_last_row(vision: Vision) -> Vision:
    embeds = vision.embeds.clone()
    embeds[-1] = 0
    return Vision(embeds, vision.deepstack)


def _rounded_norm(model: onnx.ModelProto) -> None:
    """Round one layer's norm to bfloat16 and back."""
    graph, name = model.graph, "layers.2.post_attention_layernorm"
    at = next(i for i, node in enumerate(graph.node) if name in node.output)
    node = graph.node[at]
    node.output[list(node.output).index(name)] = f"{name}.exact"
    graph.node.insert(at + 1, helper.make_node("Cast", [f"{name}.exact"], [f"{name}.bf16"], to=TensorProto.BFLOAT16))
    graph.node.insert(at + 2, helper.make_node("Cast", [f"{name}.bf16"], [name], to=TensorProto.FLOAT))


def _other_scale(model: onnx.ModelProto) -> None:
    nodes = [node for node in model.graph.node if node.op_type == "TreeAttention"]
    scale = next(a for a in nodes[1].attribute if a.name == "scale")
    scale.f *= 0.9


def _stale_row(seam: Seam, inputs: Tensors) -> Tensors:
    """The row before the new ones holds another row's keys: as if its page had not been written."""
    if _decoding(inputs):
        row = int(inputs["past_lengths"][0]) - 1
        for name, cache in seam.bound.items():
            if name.startswith("k_cache."):
                size = 16
                slots = [int(inputs["page_table"][0, r // size]) * size + r % size for r in (row, row - 1)]
                cache[slots[0]] = cache[slots[1]]
    return inputs


def _guesses_kept(p: Planted) -> None:
    """Extend runs after the prompt leave the keys that the draft had written for its guesses."""
    saved: list[Tensors] = []

    def given(seam: Seam, inputs: Tensors) -> Tensors:
        saved[:] = [{name: cache.clone() for name, cache in seam.bound.items() if "_out" not in name}]
        return inputs

    def gave(seam: Seam, inputs: Mapping[str, Tensor], outputs: Tensors) -> Tensors:
        if _decoding(dict(inputs)) and inputs["inputs_embeds"].shape[1] > 1 and _is_chain(inputs["tree_mask"][0]):
            for name, old in saved[0].items():
                seam.bound[name].copy_(old)
        return outputs

    p.inside["draft"] = Seam(None, given, gave)  # type: ignore[arg-type]


def _is_chain(mask: Tensor) -> bool:
    return bool(mask.shape[0] == mask.shape[1] and torch.equal(mask, torch.ones_like(mask).tril()))


def _other_row(_: Seam, inputs: Mapping[str, Tensor], outputs: Tensors) -> Tensors:
    if inputs["logit_rows"].shape[1] == 1 and _decoding(dict(inputs)):
        outputs["logits"] = outputs["logits"].roll(1, dims=-1)
    return outputs


def _double_top_p(p: Planted) -> None:
    true = sampling.target_probs

    def twice(logits: Tensor, options: sampling.Sampling) -> Tensor:
        probs = true(logits, options)
        again = dataclasses.replace(options, temperature=1.0, top_k=0, min_p=0.0)
        return true(probs.clamp(min=1e-30).log().float(), again) if options.top_p < 1 else probs

    p.patch.setattr(sampling, "target_probs", twice)


def _biased(p: Planted) -> None:
    def lenient(tokens: Any, parents: Any, probs: Any, bonus: Any, uniform: Any) -> Accepted:
        return accept(tokens, parents, [math.sqrt(max(0.0, x)) if 0 < x < 0.5 else x for x in probs], bonus, uniform)

    p.patch.setattr(verify, "accept", lenient)


def _kept_mass(p: Planted) -> None:
    """The bonus token is drawn as if nothing had been rejected."""
    true = sampling.Sampler.verdict

    def verdict(self: Any, logits: Tensor, tokens: Tensor, parents: Tensor, mask: Tensor) -> Any:
        found = true(self, logits, tokens, parents, mask)
        if self.sampling.greedy:
            return found
        probs = sampling.target_probs(logits, self.sampling)
        return dataclasses.replace(found, bonus=torch.multinomial(probs, 1, generator=self._generator)[:, 0])

    p.patch.setattr(sampling.Sampler, "verdict", verdict)


def _without_min_p(p: Planted) -> None:
    true = sampling.target_probs
    p.patch.setattr(sampling, "target_probs", lambda x, options: true(x, dataclasses.replace(options, min_p=0.0)))


def _always_accepted(p: Planted) -> None:
    def first(tokens: Any, parents: Any, probs: Any, bonus: Any, uniform: Any) -> Accepted:
        return accept(tokens, parents, [1.0] * len(probs), bonus, uniform)

    p.patch.setattr(verify, "accept", first)


def _later_positions(p: Planted) -> None:
    true = decoder.draft_positions
    p.patch.setattr(decoder, "draft_positions", lambda m, first, *rest: true(m, first, *rest) + int(first > 0))


def _first_step_late(p: Planted) -> None:
    true = decoder.draft_decode_position
    p.patch.setattr(decoder, "draft_decode_position", lambda *args: true(*args) + 1)


def _other_manifest(raw: dict[str, Any]) -> None:
    raw["draft"]["aux_layers"] = [2, 4, 5]


def _rewrite(name: str, old: str, new: str) -> Callable[[Planted], None]:
    def plant(p: Planted) -> None:
        text = (p.bundle / name).read_text()
        assert old in text
        p.write(name, text.replace(old, new).encode())

    return plant


_STEP = "target.layer_steps"
FAULTS: Mapping[str, Fault] = {
    "manifest edited": Fault(
        "`bundle.json` names other aux layers than the draft's checkpoint",
        "bundle.meaning",
        "draft.aux_layers",
        lambda p: p.record(_other_manifest),
    ),
    "chat template": Fault(
        "a line break of the chat template is lost",
        "processor.token_ids",
        "token_ids",
        _rewrite("processor/chat_template.jinja", "assistant\\n", "assistant"),
    ),
    "pixel mean": Fault(
        "images are normalised with another mean",
        "processor.pixel_values",
        "patches",
        _rewrite("processor/preprocessor_config.json", "0.5", "0.48"),
    ),
    "height and width": Fault(
        "height and width of the rope positions are swapped",
        "processor.position_ids",
        "position_ids",
        lambda p: setattr(
            p, "inputs", lambda i: dataclasses.replace(i, position_ids=i.position_ids[torch.tensor([0, 2, 1])])
        ),
    ),
    "rope_delta of the prompt": Fault(
        "the prompt's rope_delta is missing",
        "processor.position_ids",
        "rope_delta",
        lambda p: setattr(p, "inputs", lambda i: dataclasses.replace(i, rope_delta=0)),
    ),
    "vision bias": Fault(
        "the q/k/v bias of a vision block is dropped",
        "vision.embeds",
        "blocks.2.attn.qkv",
        _reweigh("visual.blocks.2.attn.qkv.bias", torch.zeros_like),
    ),
    "vision activation": Fault(
        "exact GELU in place of its tanh form",
        "vision.embeds",
        "blocks.0.mlp.fc2",
        lambda p: p.rebuild(
            "vision", dataclasses.replace(SPEC, vision=dataclasses.replace(SPEC.vision, hidden_act="gelu"))
        ),
    ),
    "vision positions": Fault(
        "interpolated position embeddings of the wrong patches",
        "vision.embeds",
        "embeddings",
        _given("inside", "vision", lambda _, i: _moved(i, "pos_embed_rows", lambda t: t.roll(1, dims=1))),
    ),
    "deepstack order": Fault(
        "deepstack levels are taken from the right blocks in the wrong order",
        "vision.deepstack",
        "level.0",
        lambda p: p.rebuild(
            "vision", dataclasses.replace(SPEC, vision=dataclasses.replace(SPEC.vision, deepstack_layers=(3, 1, 5)))
        ),
    ),
    "dropped image row": Fault(
        "the last visual row of a prompt is empty",
        "target.inputs_embeds",
        "inputs_embeds",
        _seen(_without_last_row),
    ),
    "rotated image rows": Fault(
        "visual rows stand one place too late",
        "target.inputs_embeds",
        "inputs_embeds",
        _seen(lambda v: Vision(v.embeds.roll(1, dims=0), v.deepstack)),
    ),
    "deepstack not placed": Fault(
        "prefill gives the target no deepstack rows",
        "target.deepstack_embeds",
        "deepstack_embeds",
        _seen(lambda v: Vision(v.embeds, torch.zeros_like(v.deepstack))),
    ),
    "rope_delta in decoding": Fault(
        "decoded rows lack rope_delta",
        "target.position_ids",
        "position_ids",
        lambda p: setattr(p, "prompt", lambda prompt: dataclasses.replace(prompt, rope_delta=0)),
    ),
    "position off by one": Fault(
        "decoded rows stand one position late",
        "target.position_ids",
        "position_ids",
        _given("outside", "target", lambda _, i: _moved(i, "position_ids", lambda t: t + 1) if _decoding(i) else i),
    ),
    "leaking tree mask": Fault(
        "a node of the tree sees its siblings",
        "target.position_ids",
        "position_ids",
        _given(
            "outside",
            "target",
            lambda _, i: _moved(i, "tree_mask", lambda t: torch.ones_like(t).tril()) if _decoding(i) else i,
        ),
    ),
    "transposed weight": Fault(
        "an attention output projection is transposed",
        _STEP,
        "layers.3.self_attn.output",
        _reweigh("layers.3.self_attn.o_proj.weight", lambda w: w.T),
        also=("target.layers", "tokens.plain"),
    ),
    "rope sections": Fault(
        "rope sections [26, 3, 3] in place of [12, 10, 10]",
        _STEP,
        "layers.0.self_attn.q",
        lambda p: p.rebuild("target", _rope(sections=(26, 3, 3))),
    ),
    "chunked rope": Fault(
        "chunked rope sections in place of interleaved ones",
        _STEP,
        "layers.0.self_attn.q",
        lambda p: p.rebuild("target", _rope("chunked")),
    ),
    "rope base": Fault(
        "rope base 1e6 in place of 5e6",
        _STEP,
        "layers.0.self_attn.q",
        lambda p: p.rebuild("target", _rope(base=1e6)),
    ),
    "epsilon": Fault(
        "RMSNorm epsilon 1e-5 in place of 1e-6",
        _STEP,
        "layers.0.input_layernorm",
        lambda p: p.rebuild("target", _text(rms_norm_eps=1e-5)),
    ),
    "q and k norms": Fault(
        "the head norms of q and k are swapped",
        _STEP,
        "layers.2.self_attn.q",
        lambda p: p.rebuild("target", _swapped("layers.2.self_attn.q_norm.weight", "layers.2.self_attn.k_norm.weight")),
    ),
    "gate and up": Fault(
        "gate and up projections are swapped",
        _STEP,
        "layers.5.mlp.gate_up",
        lambda p: p.rebuild("target", _swapped("layers.5.mlp.gate_proj.weight", "layers.5.mlp.up_proj.weight")),
    ),
    "norm skipped": Fault(
        "a norm's weight is ignored",
        _STEP,
        "layers.4.post_attention_layernorm",
        _reweigh("layers.4.post_attention_layernorm.weight", torch.ones_like),
    ),
    "rounded norm": Fault(
        "a norm is rounded to bfloat16",
        _STEP,
        "layers.2.post_attention_layernorm",
        lambda p: p.edit("target", _rounded_norm),
    ),
    "attention scale": Fault(
        "attention scores of one layer are scaled by 0.9",
        _STEP,
        "layers.1.self_attn.out",
        lambda p: p.edit("target", _other_scale),
    ),
    "deepstack layer": Fault(
        "deepstack levels are added one layer too late",
        _STEP,
        "layers.0.output",
        _given("inside", "target", lambda _, i: _moved(i, "deepstack_embeds", lambda t: t.roll(1, dims=0))),
    ),
    "stale KV row": Fault(
        "the last committed row's keys are another row's while the target decodes",
        _STEP,
        "layers.0.self_attn.out",
        _given("inside", "target", _stale_row),
    ),
    "aux side": Fault(
        "aux states are taken after deepstack in place of before it",
        "target.aux",
        "aux_hidden_states[out(1)]",
        lambda p: p.rebuild("target", draft=dataclasses.replace(MANIFEST, aux_pre_deepstack=False)),
    ),
    "aux layer": Fault(
        "aux layers are off by one",
        "target.aux",
        "aux_hidden_states[out(1)]",
        lambda p: p.rebuild("target", draft=dataclasses.replace(MANIFEST, aux_layers=(2, 4, 5))),
    ),
    "head": Fault(
        "the token table stands where the head should",
        "target.logits_cosine",
        "logits",
        lambda p: p.rebuild("target", _swapped("lm_head.weight", "embed_tokens.weight")),
        also=("target.logits_l2", "target.top1", "target.top5"),
    ),
    "token of other logits": Fault(
        "the token said is not the best of the row's logits",
        "tokens.plain",
        "tokens",
        lambda p: p.outside.update({"target": Seam(None, gave=_other_row)}),  # type: ignore[arg-type]
    ),
    "no compaction": Fault(
        "accepted rows of a tree are not moved together in the KV cache",
        "verify.logits",
        "logits",
        lambda p: p.patch.setattr(KVCache, "move", lambda *_: None),
    ),
    "accepts anything": Fault(
        "drafted tokens are accepted unseen",
        "tokens.speculative",
        "tokens",
        _always_accepted,
    ),
    "aux rows of other nodes": Fault(
        "the draft is given the aux rows of other tokens",
        "draft.aux",
        "aux_hidden_states[out(1)]",
        _given("outside", "fuse", lambda _, i: _moved(i, "aux_hidden_states", lambda t: t.roll(1, dims=0))),
    ),
    "token not one ahead": Fault(
        "the draft's prompt rows have their own token in place of the next one",
        "draft.inputs_embeds",
        "inputs_embeds",
        _given(
            "outside",
            "draft",
            lambda _, i: i if _decoding(i) else _moved(i, "inputs_embeds", lambda t: t.roll(1, dims=1)),
        ),
    ),
    "draft position": Fault(
        "the draft's committed rows stand one position late after the prompt",
        "draft.position_ids",
        "position_ids",
        _later_positions,
    ),
    "draft step position": Fault(
        "the draft's own steps stand one position late",
        "draft.position_ids",
        "position_ids.step1",
        _first_step_late,
    ),
    "fuse order": Fault(
        "the aux states of the first and last layer are swapped before fc",
        "draft.fuse",
        "features",
        _given(
            "inside",
            "fuse",
            lambda _, i: _moved(i, "aux_hidden_states", lambda t: torch.cat(t.chunk(3, dim=-1)[::-1], dim=-1)),
        ),
    ),
    "draft norm skipped": Fault(
        "the draft's hidden_norm weight is ignored",
        "draft.features",
        "hidden_norm",
        _reweigh_draft("layers.0.hidden_norm.weight", torch.ones_like),
    ),
    "draft rope": Fault(
        "the draft's rope base is 1e4 in place of 5e6",
        "draft.features",
        "layers.0.self_attn.q",
        _draft(rope=RopeSpec.plain(64, 1e4)),
    ),
    "draft residual": Fault(
        "the draft adds its attention to the normed hidden state",
        "draft.features",
        "layers.0.attention_residual",
        _draft(residual="normed"),
        also=("draft.acceptance",),
    ),
    "feedback": Fault(
        "features are fed back after the final norm in place of before it",
        "draft.features",
        "features_out",
        _draft(feedback="post_norm"),
    ),
    "draft KV reused": Fault(
        "the draft keeps the keys of its guesses where rows with true features belong",
        "draft.features",
        "features_out.step0",
        _guesses_kept,
    ),
    "draft head": Fault(
        "two rows of the draft's head are swapped",
        "draft.logits",
        "logits.step0",
        _reweigh_draft("lm_head.weight", lambda w: w[torch.tensor([1, 0, *range(2, len(w))])]),
    ),
    "d2t shifted": Fault(
        "draft ids become the next target ids",
        "draft.proposals",
        "proposals",
        _reweigh_draft("d2t", lambda d2t: d2t + 1),
    ),
    "top_p twice": Fault(
        "top-p is applied to what top-p has left",
        "sampling.probabilities",
        "top_p 0.8",
        _double_top_p,
        sampled=True,
    ),
    "min_p ignored": Fault("min-p is not applied", "sampling.probabilities", "min_p 0.1", _without_min_p, sampled=True),
    "biased acceptance": Fault(
        "drafted tokens are accepted more often than their probability",
        "sampling.tokens",
        "temperature 0.7: first token",
        _biased,
        sampled=True,
    ),
    "sampling ignored": Fault(
        "requests that ask for sampling are answered greedily",
        "sampling.tokens",
        "the engine's own answers",
        lambda p: setattr(p, "request", lambda r: dataclasses.replace(r, sampling=sampling.GREEDY)),
        sampled=True,
    ),
    "rejected mass kept": Fault(
        "the bonus token is drawn as if no sibling had been rejected",
        "sampling.tokens",
        "temperature 0.7: first token",
        _kept_mass,
        sampled=True,
    ),
}


def fault_table() -> str:
    """The catalogue as Markdown."""
    rows = [
        f"| {fault.what} | {GATES[fault.gate].stage} | `{fault.gate}` | `{fault.tensor}` |" for fault in FAULTS.values()
    ]
    head = ["| planted fault | stage named | first gate that fails | tensor named |", "|---|---|---|---|"]
    return "\n".join([*head, *rows])


def threshold_table() -> str:
    """The tolerances as Markdown."""
    rows = [
        f"| `{name}` | {t.metric} ({'at most' if t.better == 'low' else 'at least'}) | "
        + " | ".join(f"{t.values[dtype]:.7g}" for dtype in ("float32", "float16", "bfloat16"))
        + " |"
        for name, t in THRESHOLDS.items()
    ]
    head = ["| threshold | metric | float32 | float16 | bfloat16 |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows])


def with_tables(text: str) -> str:
    """A document with the tables of today between their marks."""
    for name, table in (("thresholds", threshold_table()), ("faults", fault_table())):
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"
    return text


def main(document: Path = DOCUMENT) -> None:
    """Write the tables."""
    document.write_text(with_tables(document.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
