"""Define ServedModel: the model's names, limits and formats, for request readers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from trt_eagle3.decode.request.conversation import Conversation
from trt_eagle3.decode.request.generation_config import default_sampling
from trt_eagle3.decode.sampling.sampling_params import GREEDY, SamplingParams
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
        names: names that requests may use. An answer repeats the requested name, or has the first
            one.
        max_seq_len: tokens of prompt plus answer.
        defaults: sampling parameters where a request has none.
        processor: tokenizer and chat template.
    """

    names: tuple[str, ...]
    max_seq_len: int
    defaults: SamplingParams
    processor: Processor

    @classmethod
    def of(cls, engine: Engine, serving: ServingConfig, names: Sequence[str] = ()) -> ServedModel:
        """Return the model of ``engine``; empty ``names``: the bundle's name."""
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

    def answer_format(self, conversation: Conversation) -> AnswerFormat:
        """Return the form of the answer to a conversation.

        Raises:
            UserError: the template refuses the conversation's options.
        """
        options = json.dumps(conversation.template_options, sort_keys=True)
        return conversation.answer_format(self._answer_format(options, bool(conversation.offered)))

    @cached_property
    def _answer_format(self) -> Callable[[str, bool], AnswerFormat]:
        find = self.processor.answer_format
        return lru_cache(64)(
            lambda options, with_tools: find(json.loads(options), with_tools=with_tools)
        )
