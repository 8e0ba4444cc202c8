"""Read a target's own MTP head into a manifest.

The target's family has found all parts already. ``MtpHead`` holds the tensors and the layer, the
spec holds width, norms and vocabulary. A head with a mixture of experts is not a special case:
its ``MtpHead.layer`` has a ``SparseMoe``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trt_eagle3.checkpoint.experts import gather_experts
from trt_eagle3.checkpoint.manifest import Source
from trt_eagle3.checkpoint.resolved_fields import check_overrides
from trt_eagle3.checkpoint.target import MtpHead, TargetCheckpoint
from trt_eagle3.checkpoint.target_tensors import check_tensors, decoder_shapes
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.drafts.mtp.manifest import MtpManifest, as_served
from trt_eagle3.errors import UserError, clip
from trt_eagle3.spec import AttentionSpec

__all__ = ["head_shapes", "read_head"]

_WHY = {
    "hidden": "as servers of Qwen3.5 do; probe measures it",
    "norm_offset": "the target's norms",
    "image_rows": "the target's own embeddings, including vision rows",
    "embedding": "the target's own",
    "head": "the target's own",
    "aux_layers": "the target's last",
    "aux_pre_deepstack": "no visual level is added there",
}
_CONVENTION = "as Qwen3.5's heads are served"
_FROM_TARGET = ("rope", "rms_norm_eps")
_TABLES = ("embed_tokens.", "lm_head.", "shared_head.")


def read_head(target: TargetCheckpoint, overrides: Mapping[str, Any]) -> MtpManifest:
    """Read the MTP head of ``target``.

    Args:
        overrides: manifest field -> value, for fields that no tensor determines.
    Raises:
        UserError: there is no head; it has several layers or its own table; or tensors are
            missing, surplus or misshapen. The message names them.
    """
    given = check_overrides(overrides, manifest=MtpManifest)
    head = target.mtp
    if head is None:
        raise UserError(
            f"draft.checkpoint: mtp: {target.path} has no MTP head (no mtp.* tensors). "
            "transformers drops it when it saves: use the original checkpoint, name a draft's "
            "folder or Hub id, or leave the draft out."
        )
    _check_announced(head)
    tensors = head.stored.weights()
    _check_supported(target, tensors)
    mixer, size = head.layer.mixer, target.hidden_size
    assert isinstance(mixer, AttentionSpec), "a family's MTP layer attends"
    served = as_served(target)
    manifest = MtpManifest(
        producer=target.family,
        path=target.path,
        num_layers=1,
        hidden_size=size,
        target_hidden_size=size,
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        rope=mixer.rope,
        aux_layers=(target.num_layers - 1,),
        aux_pre_deepstack=False,
        embedding="target",
        head="target",
        tensors=gather_experts(tensors, [head.layer], size, target.path, head.fp8_block),
        max_position_embeddings=target.max_position_embeddings,
        sources=_sources(served, given),
        rms_norm_eps=target.norm.eps,
        layer=head.layer,
        **{**served, **given},
    )
    _check_shapes(manifest)
    return manifest


def head_shapes(manifest: MtpManifest) -> dict[str, tuple[int, ...]]:
    """Return canonical name and shape of every weight of the head itself."""
    size = manifest.hidden_size
    layer = decoder_shapes([manifest.layer], size, manifest.vocab_size, tied_head=True)
    del layer["embed_tokens.weight"]  # the target's
    norms = {f"pre_fc_norm_{part}.weight": (size,) for part in ("embedding", "hidden")}
    return {"fc.weight": (size, 2 * size), **norms, **layer}


def _sources(served: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Source]:
    """Return the source of each field that no tensor determines."""
    found = {name: Source("convention", _WHY.get(name, _CONVENTION)) for name in (*served, *_WHY)}
    found |= {name: Source("config", f"the target's {name}") for name in _FROM_TARGET}
    found["producer"] = Source("tensor", "mtp.*")
    return found | {name: Source("override", f"draft.overrides.{name}") for name in given}


def _check_announced(head: MtpHead) -> None:
    """Check that the config does not contradict the head."""
    config, names = head.config, head.stored.tensors
    key = f"{head.section}mtp_num_hidden_layers"
    announced = config.get(key, "whole")  # older configs lack it
    layers = len({name.split(".")[1] for name in names if name.startswith("layers.")})
    if announced == 0:
        raise config.error(
            f"{key}: expected 1 or more beside mtp.* tensors, got 0. Use the checkpoint's own "
            "config.json."
        )
    if announced not in {None, layers}:
        raise config.error(
            f"{key}: expected {layers}, the number of mtp.layers.*, got {announced}. Use the whole "
            "checkpoint, or its own config.json."
        )
    key = f"{head.section}mtp_use_dedicated_embeddings"
    if config.get(key, "flag", False) and "embed_tokens.weight" not in names:
        raise config.error(
            f"{key}: true, but the checkpoint has no mtp.embed_tokens.weight. Use the whole "
            "checkpoint, or its own config.json."
        )


def _check_supported(target: TargetCheckpoint, tensors: Mapping[str, TensorRef]) -> None:
    """Check that the head is like Qwen3.5's: one layer, without its own tables."""
    numbers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    if len(numbers) > 1:
        raise UserError(
            f"{target.path}: expected an MTP head of one layer, got {len(numbers)}. Use another "
            "draft."
        )
    own = next((name for name in tensors if name.startswith(_TABLES)), None)
    if own is not None:
        raise UserError(
            f"{target.path}: mtp.{clip(own)}: an MTP head with its own table is not supported. Use "
            "another draft."
        )


def _check_shapes(manifest: MtpManifest) -> None:
    """Check that the tensors are complete and have the right shapes, by their names on disk."""
    tensors = {f"mtp.{name}": ref for name, ref in manifest.tensors.items()}
    shapes = {f"mtp.{name}": shape for name, shape in head_shapes(manifest).items()}
    check_tensors(tensors, shapes, manifest.path)
