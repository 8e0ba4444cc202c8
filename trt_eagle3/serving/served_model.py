"""ServedModel: what readers of requests must know of the model that is served."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from trt_eagle3.decode.generation_config import default_sampling
from trt_eagle3.decode.sampling_params import GREEDY, SamplingParams
from trt_eagle3.multimodal import Processor
from trt_eagle3.multimodal.assistant_message import AnswerFormat
from trt_eagle3.multimodal.tokenizer import TokenBytes
from trt_eagle3.serving.config import ServingConfig
from trt_eagle3.serving.engine import Engine

__all__ = ["ServedModel"]


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model as clients see it.

    Attributes:
        names: that clients may ask for; answers name the one asked for, or the first.
        max_seq_len: tokens of prompt and answer together.
        defaults: of sampling, where a request says nothing.
        processor: tokenizer and chat template.
    """

    names: tuple[str, ...]
    max_seq_len: int
    defaults: SamplingParams
    processor: Processor

    @classmethod
    def of(cls, engine: Engine, serving: ServingConfig, names: Sequence[str] = ()) -> ServedModel:
        """The model of ``engine``; ``names``: the bundle's, where there are none."""
        bundle = engine.bundle
        defaults = default_sampling(bundle.path) if serving.generation_config else GREEDY
        return cls(
            tuple(names) or (bundle.record.config.name,),
            bundle.limits.max_seq_len,
            defaults,
            bundle.processor,
        )

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of each token."""
        return TokenBytes(self.processor.tokenizer)

    def answer_format(self, options: Mapping[str, Any]) -> AnswerFormat:
        """The form of answers under these options of the chat template.

        Raises:
            UserError: the template refuses them.
        """
        return self._answer_format(json.dumps(options, sort_keys=True))

    @cached_property
    def _answer_format(self) -> Callable[[str], AnswerFormat]:
        processor = self.processor
        return lru_cache(64)(lambda text: processor.answer_format(json.loads(text)))
