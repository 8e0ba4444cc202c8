"""The MTP head of a Qwen3.5 checkpoint: told apart from the target, and left to ``drafts/mtp``.

Its layer is of full attention, and its MLP is what the target's layers have: dense, or a mixture of
experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trt_eagle3.checkpoint.quantised.weight import Quantisation
from trt_eagle3.checkpoint.target import MtpHead
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.families.qwen3_5.decoder import HybridConfig
from trt_eagle3.spec import AttentionSpec, LayerSpec

__all__ = ["split_head", "without_head"]

_PREFIX = "mtp."


def split_head(
    decoder: HybridConfig, layers: Sequence[LayerSpec], tensors: Mapping[str, TensorRef]
) -> tuple[dict[str, TensorRef], MtpHead | None]:
    """The target's own tensors, and its MTP head.

    Raises:
        UserError: a head that the config announces and the checkpoint lacks, or the reverse.
    """
    head = {n.removeprefix(_PREFIX): r for n, r in tensors.items() if n.startswith(_PREFIX)}
    own = {name: ref for name, ref in tensors.items() if not name.startswith(_PREFIX)}
    _check_announced(decoder, head)
    if not head:
        return own, None
    layer = next(x for x in reversed(layers) if isinstance(x.mixer, AttentionSpec))
    return own, MtpHead(layer, head, decoder.fp8_block())


def without_head(quantisation: Quantisation | None) -> Quantisation | None:
    """``quantisation`` without scales of the head's keys and values: a draft's are not FP8."""
    if quantisation is None:
        return None
    scales = quantisation.kv_scales.items()
    own = {name: ref for name, ref in scales if not name.startswith(_PREFIX)}
    return replace(quantisation, kv_scales=own)


def _check_announced(decoder: HybridConfig, head: Mapping[str, TensorRef]) -> None:
    key = f"{decoder.section}mtp_num_hidden_layers"
    announced = decoder.config.whole(key, 0, least=0)
    if announced and not head:
        raise decoder.config.error(
            f"{key}: an MTP head is announced, and the checkpoint has no {_PREFIX}* tensors. Use "
            "the whole checkpoint, or set it to 0."
        )
    if head and not announced and decoder.config.get(key, "any") is not None:
        raise decoder.config.error(
            f"{key}: expected 1 or more beside {_PREFIX}* tensors, got 0. Use the checkpoint's own "
            "config.json."
        )
    layers = len({name.split(".")[1] for name in head if name.startswith("layers.")})
    if announced and layers != announced:
        raise decoder.config.error(
            f"{key}: an MTP head of {announced} is announced, and {_PREFIX}layers.* are of "
            f"{layers}. Use the whole checkpoint, or its own config.json."
        )
    key = f"{decoder.section}mtp_use_dedicated_embeddings"
    if head and decoder.config.get(key, "flag", False) and "embed_tokens.weight" not in head:
        raise decoder.config.error(
            f"{key}: true, and the checkpoint has no {_PREFIX}embed_tokens.weight. Use the whole "
            "checkpoint, or its own config.json."
        )
