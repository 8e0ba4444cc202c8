"""Read the sparse layers of a Qwen3 decoder, and the sizes of their mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

from trt_eagle3.checkpoint.model_config import ModelConfig
from trt_eagle3.errors import quote
from trt_eagle3.spec import SparseMoe

__all__ = ["SparseLayers"]

_MAX_EXPERTS = 1 << 14


@dataclass(frozen=True)
class SparseLayers:
    """Read the sparse layers of a config's section.

    Attributes:
        always_renormalises: whether transformers divides the weights of a token's experts by their
            sum regardless of ``norm_topk_prob``. Otherwise that key decides.
        by_default: default of ``norm_topk_prob``.
        shared_expert: whether every token also goes through a shared expert with its own width.
    """

    always_renormalises: bool
    by_default: bool = False
    shared_expert: bool = False

    def moe(self, config: ModelConfig, section: str) -> SparseMoe:
        """Read the mixture of experts that all sparse layers have.

        Raises:
            UserError: a count is missing, or contradicts another.
        """
        experts = self._num_experts(config, section)
        top_k = config.whole(f"{section}num_experts_per_tok")
        if top_k > experts:
            raise config.error(
                f"{section}num_experts_per_tok: expected at most num_experts = {experts}, got "
                f"{top_k}"
            )
        by_default = self.always_renormalises or self.by_default
        renormalise = config.get(f"{section}norm_topk_prob", "flag", by_default)
        if self.always_renormalises and not renormalise:
            raise config.error(
                f"{section}norm_topk_prob: expected true, got false: transformers renormalises in "
                "this family in any case. Correct it."
            )
        width = config.whole(f"{section}moe_intermediate_size")
        shared = self._shared_width(config, section)
        return SparseMoe(experts, top_k, width, renormalise, shared)

    def indices(self, config: ModelConfig, section: str) -> set[int]:
        """Return the indices of the sparse layers.

        These are the layers whose number, counted from 1, is a multiple of ``decoder_sparse_step``,
        except those in ``mlp_only_layers``.

        Raises:
            UserError: the decoder lacks a named layer.
        """
        count = config.whole(f"{section}num_hidden_layers")
        step = config.whole(f"{section}decoder_sparse_step", 1)
        dense = config.get(f"{section}mlp_only_layers", "wholes", [])
        for layer in dense:
            if not 0 <= layer < count:
                raise config.error(
                    f"{section}mlp_only_layers: expected layers 0 to {count - 1}, got "
                    f"{quote(layer)}"
                )
        return {i for i in range(count) if (i + 1) % step == 0 and i not in dense}

    def _shared_width(self, config: ModelConfig, section: str) -> int:
        key = f"{section}shared_expert_intermediate_size"
        return config.whole(key) if self.shared_expert else 0

    def _num_experts(self, config: ModelConfig, section: str) -> int:
        """Return ``num_experts``, which transformers also writes as ``num_local_experts``."""
        keys = [f"{section}{key}" for key in ("num_experts", "num_local_experts")]
        told = {key: config.whole(key) for key in keys if config.get(key, "any") is not None}
        if len(set(told.values())) > 1:
            both = " and ".join(f"{key} {value}" for key, value in told.items())
            raise config.error(f"{both}: expected one number of experts. Correct it.")
        experts = next(iter(told.values())) if told else config.whole(keys[0])
        if experts > _MAX_EXPERTS:
            raise config.error(f"{keys[0]}: expected at most {_MAX_EXPERTS}, got {experts}")
        return experts
