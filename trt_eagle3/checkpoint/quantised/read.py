"""Reading the tensors of a target: a quantised weight's several become one ``QuantisedRef``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trt_eagle3.checkpoint.model_config import ModelConfig
from trt_eagle3.checkpoint.quantised.awq import Awq
from trt_eagle3.checkpoint.quantised.claim import Claim, find_claim
from trt_eagle3.checkpoint.quantised.compressed_tensors import CompressedTensors
from trt_eagle3.checkpoint.quantised.fine_grained_fp8 import FineGrainedFp8
from trt_eagle3.checkpoint.quantised.gptq import Gptq
from trt_eagle3.checkpoint.quantised.modelopt import ModelOpt
from trt_eagle3.checkpoint.quantised.module_patterns import ModulePatterns
from trt_eagle3.checkpoint.quantised.producer import Found, Producer
from trt_eagle3.checkpoint.quantised.scales import check_scale, checked
from trt_eagle3.checkpoint.quantised.weight import Quantisation, titles
from trt_eagle3.checkpoint.target_tensors import Prefixes, canonical_tensors
from trt_eagle3.checkpoint.tensor_index import FLOAT_DTYPES, TensorRef, open_index
from trt_eagle3.errors import UserError, clip

__all__ = ["PRODUCERS", "open_weights"]

PRODUCERS: Mapping[str, Callable[[Claim], Producer]] = {
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8": FineGrainedFp8,
    "gptq": Gptq,
    "modelopt": ModelOpt,
}
"""``quant_method`` -> its reader."""

_KV_SCALES = ("k_scale", "v_scale")
_DENSE_ONLY = ("embed_tokens", "visual.patch_embed.proj", "visual.pos_embed")


def open_weights(
    config: ModelConfig, prefixes: Prefixes, sections: tuple[str, ...] = ("",)
) -> tuple[dict[str, TensorRef], Quantisation | None]:
    """The tensors of a checkpoint by canonical name, and what it says of their quantisation.

    Raises:
        UserError: no sound weights; a quantisation that is not supported, or that its tensors
            contradict, by name.
    """
    tensors = canonical_tensors(open_index(config.file.parent), prefixes)
    claim = find_claim(config, sections)
    if claim is None:
        return tensors, None
    if claim.method not in PRODUCERS:
        raise UserError(
            f"{claim.directory}: quantised by {clip(claim.method)}: not supported (known: "
            f"{', '.join(PRODUCERS)}). Use another quantisation, or the unquantised checkpoint."
        )
    producer = PRODUCERS[claim.method](claim)
    kv_scales = _kv_scales(tensors, claim)
    weights = {name: ref for name, ref in tensors.items() if name not in kv_scales}
    made = _weights(weights, producer, claim)
    # FP8 experts in a stack are not recognised as a module's yet
    if not titles(made.values()) and all(ref.dtype in FLOAT_DTYPES for ref in made.values()):
        raise UserError(
            f"{claim.directory}: {claim.place} says {clip(claim.told, 80)}, and no weight is "
            "quantised. Remove it from the config, or use the checkpoint's own files."
        )
    return made, Quantisation(
        claim.method,
        f"{producer.provenance()} ({claim.place})",
        producer.activations(),
        producer.excluded,
        titles(made.values()),
        kv_scales,
        producer.kv_cache(),
    )


def _kv_scales(tensors: Mapping[str, TensorRef], claim: Claim) -> dict[str, TensorRef]:
    found = {n: ref for n, ref in tensors.items() if n.rpartition(".")[2] in _KV_SCALES}
    for name, ref in found.items():
        if name.startswith("visual."):
            raise UserError(
                f"{claim.directory}: {clip(ref.name)}: a scale of keys or values of the vision "
                "tower, which has no KV cache. Quantise the language model's alone."
            )
        check_scale(ref, claim.directory)
    return found


def _weights(
    tensors: Mapping[str, TensorRef], producer: Producer, claim: Claim
) -> dict[str, TensorRef]:
    """``tensors`` with every quantised module's as one weight."""
    modules: dict[str, dict[str, TensorRef]] = {}
    for name, ref in tensors.items():
        module, _, last = name.rpartition(".")
        modules.setdefault(module, {})[last] = ref
    excluded = ModulePatterns(producer.excluded, claim)
    made: dict[str, TensorRef] = {}
    for module, found in modules.items():
        own = {last for last in found if last in producer.suffixes}
        if own or not _is_dense(found):
            made[f"{module}.weight"] = _weight(module, found, producer, claim, excluded)
            own |= {"weight"}
        made |= {f"{module}.{last}": ref for last, ref in found.items() if last not in own}
    return made


def _is_dense(found: Found) -> bool:
    return "weight" not in found or found["weight"].dtype in FLOAT_DTYPES


def _weight(
    module: str, found: Found, producer: Producer, claim: Claim, excluded: ModulePatterns
) -> TensorRef:
    first = next(iter(found.values()))
    stored = first.name.rpartition(".")[0]
    if module.startswith(_DENSE_ONLY):
        raise UserError(
            f"{claim.directory}: {clip(first.name)}: a quantised table: not supported. Leave "
            f"{clip(module)} out of the quantisation."
        )
    if pattern := excluded.first(stored):
        raise UserError(
            f"{claim.directory}: {clip(stored)} is quantised, and {claim.place} excludes it "
            f"({clip(pattern, 80)}). Correct the config, or use the checkpoint's own files alone."
        )
    layouts = [{"qweight"}, {"weight_packed"}, {"weight"}]
    if sum(bool(names & found.keys()) for names in layouts) > 1:
        raise UserError(
            f"{claim.directory}: {clip(stored)} is stored in two formats at once "
            f"({', '.join(sorted(found))}). Use the checkpoint's own files alone."
        )
    return checked(producer.weight(stored, found), claim.directory)
