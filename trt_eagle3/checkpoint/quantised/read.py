"""Read the weights of a target, with the tensors of a quantised weight as one ``QuantisedRef``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from trt_eagle3.checkpoint.model_config import ModelConfig
from trt_eagle3.checkpoint.quantised.awq import Awq
from trt_eagle3.checkpoint.quantised.claim import Claim, find_claim
from trt_eagle3.checkpoint.quantised.compressed_tensors import CompressedTensors
from trt_eagle3.checkpoint.quantised.fine_grained_fp8 import FineGrainedFp8
from trt_eagle3.checkpoint.quantised.gptq import Gptq
from trt_eagle3.checkpoint.quantised.modelopt import ModelOpt
from trt_eagle3.checkpoint.quantised.module_patterns import ModulePatterns
from trt_eagle3.checkpoint.quantised.producer import Found, Producer
from trt_eagle3.checkpoint.quantised.scales import checked
from trt_eagle3.checkpoint.quantised.weight import Quantisation, titles
from trt_eagle3.checkpoint.target_tensors import Prefixes, canonical_tensors
from trt_eagle3.checkpoint.tensor_index import FLOAT_DTYPES, TensorRef, open_index
from trt_eagle3.errors import UserError, clip

__all__ = ["PRODUCERS", "StoredWeights", "find_weights", "open_weights"]

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


@dataclass(frozen=True)
class StoredWeights:
    """The stored tensors of a checkpoint, and the quantisation that its files claim.

    Attributes:
        tensors: canonical name -> place; a quantised weight has several.
    """

    tensors: Mapping[str, TensorRef]
    claim: Claim | None

    def only(self, prefix: str) -> StoredWeights:
        """Return the tensors under ``prefix``, which is removed from the names."""
        part = {
            name.removeprefix(prefix): ref
            for name, ref in self.tensors.items()
            if name.startswith(prefix)
        }
        return replace(self, tensors=part)

    def without(self, prefix: str) -> StoredWeights:
        """Return all tensors except those under ``prefix``, which stay unchecked."""
        rest = {name: ref for name, ref in self.tensors.items() if not name.startswith(prefix)}
        return replace(self, tensors=rest)

    def weights(self) -> dict[str, TensorRef]:
        """Combine the tensors of each quantised weight. KV scales are omitted.

        Raises:
            UserError: a quantisation is not supported, or the tensors contradict it.
        """
        return self._made(self._producer())

    def read(self) -> tuple[dict[str, TensorRef], Quantisation | None]:
        """Return ``weights``, and the checkpoint's quantisation.

        Raises:
            UserError: as for ``weights``; or no weight is quantised despite the claim.
        """
        claim, producer = self.claim, self._producer()
        made = self._made(producer)
        if claim is None or producer is None:
            return made, None
        # stacked FP8 experts are not counted as modules yet
        if not titles(made.values()) and all(ref.dtype in FLOAT_DTYPES for ref in made.values()):
            raise UserError(
                f"{claim.directory}: {claim.place} names {clip(claim.told, 80)}, but no weight is "
                "quantised. Remove it from the config, or use the checkpoint's own files."
            )
        return made, Quantisation(
            claim.method,
            f"{producer.provenance()} ({claim.place})",
            producer.activations(),
            producer.excluded,
            titles(made.values()),
            {name: ref for name, ref in self.tensors.items() if _is_kv_scale(name)},
            producer.kv_cache(),
        )

    def _producer(self) -> Producer | None:
        claim = self.claim
        if claim is None:
            return None
        if claim.method not in PRODUCERS:
            raise UserError(
                f"{claim.directory}: quantised by {clip(claim.method)}: not supported (known: "
                f"{', '.join(PRODUCERS)}). Use another quantisation, or the unquantised checkpoint."
            )
        return PRODUCERS[claim.method](claim)

    def _made(self, producer: Producer | None) -> dict[str, TensorRef]:
        if self.claim is None or producer is None:
            return dict(self.tensors)
        weights = {name: ref for name, ref in self.tensors.items() if not _is_kv_scale(name)}
        return _weights(weights, producer, self.claim)


def open_weights(
    config: ModelConfig, prefixes: Prefixes, sections: tuple[str, ...] = ("",)
) -> tuple[dict[str, TensorRef], Quantisation | None]:
    """Read the weights of a checkpoint by canonical name, and its quantisation.

    Raises:
        UserError: as for ``find_weights`` and ``StoredWeights.read``.
    """
    return find_weights(config, prefixes, sections).read()


def find_weights(
    config: ModelConfig, prefixes: Prefixes, sections: tuple[str, ...] = ("",)
) -> StoredWeights:
    """Find the stored tensors of a checkpoint by canonical name.

    Raises:
        UserError: there are no valid weights, or two quantisations are claimed.
    """
    tensors = canonical_tensors(open_index(config.file.parent), prefixes)
    return StoredWeights(tensors, find_claim(config, sections))


def _is_kv_scale(name: str) -> bool:
    return name.rpartition(".")[2] in _KV_SCALES


def _weights(
    tensors: Mapping[str, TensorRef], producer: Producer, claim: Claim
) -> dict[str, TensorRef]:
    """Combine the tensors of every quantised module to one weight."""
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
