"""Faults of the bundle, the processor, the vision tower, and of what the target is given."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.parity.fault import Fault, decoding, given, gives, moved, reweigh, rewrite, row_spoilt
from tests.parity.planting import MANIFEST, SPEC, Planted
from trt_eagle3.decode.forward.runner import TargetIds
from trt_eagle3.decode.request.prompt import Vision
from trt_eagle3.decode.request.vision_encoder import VisionEncoder
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.multimodal.tokenizer import StreamDecoder


def _seen(change: Callable[[Vision], Vision]) -> Callable[[Planted], None]:
    def plant(p: Planted) -> None:
        true = VisionEncoder.encode
        p.patch.setattr(VisionEncoder, "encode", lambda *args: change(true(*args)))

    return plant


def _without_last_row(vision: Vision) -> Vision:
    embeds = vision.embeds.clone()
    embeds[-1] = 0
    return Vision(embeds, vision.visual_levels)


def _other_manifest(raw: dict[str, Any]) -> None:
    raw["draft"]["aux_layers"] = [2, 4, 5]


def _other_type(raw: dict[str, Any]) -> None:
    raw["engine"]["dtype"] = "bfloat16"


def _other_merge(p: Planted) -> None:
    """Two tokens that no prompt here has change places, as in a tokenizer of another revision."""
    raw = json.loads((p.bundle / "processor/tokenizer.json").read_text())
    vocabulary = raw["model"]["vocab"]
    one, two = (token for token, i in vocabulary.items() if i in {300, 301})
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    p.write("processor/tokenizer.json", json.dumps(raw, ensure_ascii=False).encode())


def _rare_row(p: Planted) -> None:
    """The program finds no embedding of one token, which no prompt here has."""
    true = EmbeddingTable.lookup

    def lookup(self: EmbeddingTable, ids: Tensor) -> Tensor:
        return true(self, ids).masked_fill((ids == SPEC.vocab_size - 3)[..., None], 0.0)

    p.patch.setattr(EmbeddingTable, "lookup", lookup)


def _rare_ids(p: Planted) -> None:
    true, last = TargetIds.__call__, MANIFEST.draft_vocab_size - 1
    p.patch.setattr(
        TargetIds, "__call__", lambda self, ids: true(self, torch.where(ids == last, 0, ids))
    )


def _without_last(values: Tensor) -> Tensor:
    return torch.cat([values[:-3], values[-3:] * 0])


def _lossy_text(p: Planted) -> None:
    true = StreamDecoder.push
    p.patch.setattr(StreamDecoder, "push", lambda self, token: true(self, token).replace("e", ""))


INPUTS: Mapping[str, Fault] = {
    "manifest edited": Fault(
        "`bundle.json` names other aux layers than the draft's checkpoint",
        "bundle.meaning",
        "draft.aux_layers",
        lambda p: p.record(_other_manifest),
    ),
    "engine type": Fault(
        "`bundle.json` calls the engine bfloat16, whose tolerances are wider",
        "bundle.meaning",
        "engine.dtype",
        lambda p: p.record(_other_type),
    ),
    "rare embedding on disk": Fault(
        "the embeddings of three tokens that no prompt has are lost on disk",
        "bundle.files",
        "target: embed_tokens.weight",
        reweigh("embed_tokens.weight", _without_last),
        looks=("files",),
    ),
    "tokenizer": Fault(
        "two tokens that no prompt has change places in the bundle's tokenizer",
        "bundle.files",
        "processor/tokenizer.json",
        _other_merge,
        looks=("files",),
    ),
    "rare embedding": Fault(
        "the program finds no embedding of a token that no prompt has",
        "bundle.tables",
        "token table",
        _rare_row,
    ),
    "rare draft id": Fault(
        "the program takes the last draft id for another token",
        "bundle.tables",
        "draft's vocabulary",
        _rare_ids,
    ),
    "chat template": Fault(
        "a line break of the chat template is lost",
        "processor.token_ids",
        "token_ids",
        rewrite("processor/chat_template.jinja", "assistant\\n", "assistant"),
    ),
    "pixel mean": Fault(
        "images are normalised with another mean",
        "processor.pixel_values",
        "patches",
        rewrite("processor/preprocessor_config.json", "0.5", "0.48"),
    ),
    "height and width": Fault(
        "height and width of the rope positions are swapped",
        "processor.position_ids",
        "position_ids",
        lambda p: setattr(
            p,
            "inputs",
            lambda i: dataclasses.replace(i, position_ids=i.position_ids[torch.tensor([0, 2, 1])]),
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
        reweigh("visual.blocks.2.attn.qkv.bias", torch.zeros_like),
    ),
    "vision activation": Fault(
        "exact GELU in place of its tanh form",
        "vision.embeds",
        "blocks.0.mlp.fc2",
        lambda p: p.rebuild(
            "vision",
            dataclasses.replace(SPEC, vision=dataclasses.replace(SPEC.vision, hidden_act="gelu")),
        ),
    ),
    "vision positions": Fault(
        "interpolated position embeddings of the wrong patches",
        "vision.embeds",
        "embeddings",
        given(
            "inside", "vision", lambda _, i: moved(i, "pos_embed_rows", lambda t: t.roll(1, dims=1))
        ),
    ),
    "deepstack order": Fault(
        "deepstack levels are taken from the right blocks in the wrong order",
        "vision.deepstack",
        "level.0",
        lambda p: p.rebuild(
            "vision",
            dataclasses.replace(
                SPEC, vision=dataclasses.replace(SPEC.vision, level_blocks=(3, 1, 5))
            ),
        ),
    ),
    "one visual row": Fault(
        "one visual row of many is too large",
        "vision.embeds",
        "visual_embeds",
        gives("vision", row_spoilt("visual_embeds", 0, more_than=10)),
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
        _seen(lambda v: Vision(v.embeds.roll(1, dims=0), v.visual_levels)),
    ),
    "deepstack not placed": Fault(
        "prefill gives the target no deepstack rows",
        "target.deepstack_embeds",
        "deepstack_embeds",
        _seen(lambda v: Vision(v.embeds, torch.zeros_like(v.visual_levels))),
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
        given(
            "outside",
            "target",
            lambda _, i: moved(i, "position_ids", lambda t: t + 1) if decoding(i) else i,
        ),
    ),
    "leaking tree mask": Fault(
        "a node of the tree sees its siblings",
        "target.position_ids",
        "position_ids",
        given(
            "outside",
            "target",
            lambda _, i: (
                moved(i, "tree_mask", lambda t: torch.ones_like(t).tril()) if decoding(i) else i
            ),
        ),
    ),
    "text": Fault("the streamed text lacks a letter", "tokens.text", "text", _lossy_text),
}
