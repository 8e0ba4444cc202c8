"""Processor: convert prompts of text, images and videos to graph inputs, and token ids to text."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from trt_eagle3.errors import UserError, quote
from trt_eagle3.multimodal.assistant_message import AnswerFormat
from trt_eagle3.multimodal.caller import NO_CALLER, Caller
from trt_eagle3.multimodal.chat_template import NO_OPTIONS, ChatTemplate
from trt_eagle3.multimodal.control_tokens import ControlTokens
from trt_eagle3.multimodal.decoder_pool import DecoderPool
from trt_eagle3.multimodal.end_tokens import tokenizer_eos_id
from trt_eagle3.multimodal.fair_cache import FairCache
from trt_eagle3.multimodal.final_message import PromptEnding
from trt_eagle3.multimodal.image import ImageSource, describe
from trt_eagle3.multimodal.media_loader import MediaLoader
from trt_eagle3.multimodal.message_reader import MediaSlot, MessageReader
from trt_eagle3.multimodal.pixel_config import PixelConfig
from trt_eagle3.multimodal.policy import LOCAL_MEDIA, MediaPolicy
from trt_eagle3.multimodal.prepared import PixelPatches, normalise
from trt_eagle3.multimodal.prompt_rules import Grid, PromptRules, RulesOf
from trt_eagle3.multimodal.tokenizer import StreamDecoder, TokenPieces, load_tokenizer
from trt_eagle3.multimodal.tool_formats import ToolFormat, named_tool_format
from trt_eagle3.multimodal.tools import Tool
from trt_eagle3.multimodal.video import VideoSource, patch_times
from trt_eagle3.multimodal.visual_part import (
    PROCESSOR_OPTIONS,
    ignored_keys,
    with_processor_options,
)
from trt_eagle3.spec import TargetSpec

__all__ = ["ModelInputs", "Processor"]

_log = logging.getLogger("trt_eagle3")

# Shapes: P prompt tokens, N patches, D patch values, G images and videos


@dataclass(frozen=True)
class ModelInputs:
    """The graph inputs of one prompt.

    Attributes:
        token_ids: int64 [P], with image and video pads expanded.
        position_ids: int32 [3, P], axes time, height, width.
        rope_delta: max position + 1 - P. The position of a decoded token at index c is c plus this.
        visuals: all images and videos in prompt order, as bytes; `prepared.normalise` computes the
            tower's patches.
        grid_thw: int64 [G, 3], one row per image (t = 1) and per video.
        visual_rows: bool [P], True at the rows of visual embeddings, in order.
        grid_seconds: float32 [G], seconds between temporal patches of a video; 0 for an image.
    """

    token_ids: Tensor
    position_ids: Tensor
    rope_delta: int
    visuals: tuple[PixelPatches, ...]
    grid_thw: Tensor
    visual_rows: Tensor
    grid_seconds: Tensor = field(default_factory=lambda: torch.empty(0))

    @cached_property
    def patches(self) -> Tensor:
        """float32 [N, D], equal to those of transformers' processor; [0, 0] for text."""
        return normalise(self.visuals)


@dataclass(frozen=True)
class _Visual:
    """One image or video of a prompt.

    Attributes:
        text: the text that replaces its pad.
        seconds: seconds between temporal patches of a video.
    """

    name: str
    patches: PixelPatches
    text: str
    seconds: float = 0.0

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.patches.grid


class Processor:
    """Tokenizer, chat template and pixel rules of one checkpoint."""

    def __init__(
        self,
        spec: TargetSpec,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        rules: PromptRules,
        image_config: PixelConfig | None,
        video_config: PixelConfig | None,
        max_prompt_len: int | None = None,
        media: MediaPolicy = LOCAL_MEDIA,
        decoders: DecoderPool | None = None,
        split_special_tokens: bool = True,
        eos_token_id: int | None = None,
        tool_format: ToolFormat | None = None,
        image_cache_bytes: int = 0,
    ) -> None:
        """Check the tokenizer against ``spec``.

        Args:
            image_config, video_config: None if ``rules`` accept neither.
            split_special_tokens: control tokens in message texts are encoded as text.
            eos_token_id: the tokenizer's end token.
            tool_format: format of calls; None: the one that ``template`` teaches.
            image_cache_bytes: most bytes of decoded and resized images that are kept.
        """
        self.tokenizer = tokenizer
        self.template = template
        self.rules = rules
        self.image_config = image_config
        self.video_config = video_config
        self.max_prompt_len = max_prompt_len
        self.media = media
        self.decoders = decoders
        self.images = FairCache[PixelPatches](image_cache_bytes)
        _check_table(tokenizer, spec.vocab_size)
        known = eos_token_id is not None and eos_token_id < spec.vocab_size
        self.end_token_ids = tuple(
            dict.fromkeys((*spec.eos_token_ids, *((eos_token_id,) if known else ())))
        )
        """Tokens that end an answer: the end tokens of the configs and of the tokenizer."""
        self._control = ControlTokens(tokenizer, rules.control_tokens)
        self._splits = split_special_tokens
        self._tool_format = tool_format
        self._text_only = spec.vision is None
        self._tiled = image_config is not None and image_config.tile_side is not None

    @classmethod
    def from_directory(
        cls,
        directory: Path,
        spec: TargetSpec,
        rules: RulesOf,
        *,
        max_prompt_len: int | None = None,
        media: MediaPolicy = LOCAL_MEDIA,
        decoders: DecoderPool | None = None,
        split_special_tokens: bool = True,
        tool_format: str = "auto",
        image_cache_bytes: int = 0,
    ) -> Processor:
        """Read the processor files of a checkpoint, or of a bundle's ``processor/`` folder.

        Args:
            spec: the target's token ids and vision geometry.
            rules: how its family writes images and videos into a prompt.
            max_prompt_len: longest prompt in tokens that the engine accepts; None: no limit.
            media: permitted sources and sizes of images and videos.
            decoders: processes that decode them; None: this process.
            split_special_tokens: encode control tokens such as ``<|im_start|>`` in message texts as
                text, as transformers' option of that name does. False encodes them as control
                tokens, which is transformers' default.
            tool_format: name of the format of tool calls; ``auto``: the one that the chat template
                teaches.
            image_cache_bytes: most bytes of decoded and resized images that are kept for later
                prompts; 0: none.
        Raises:
            UserError: a file is missing, broken, or of another checkpoint than ``spec``; or the
                format is unknown.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise UserError(
                f"{directory}: no such directory. Give the folder that holds tokenizer.json."
            )
        tokenizer = load_tokenizer(directory)
        template = ChatTemplate.from_directory(directory, processor=spec.vision is not None)
        made = rules(spec, tokenizer)
        pixels = made.pixels(directory)
        return cls(
            spec,
            tokenizer,
            template,
            made,
            pixels.image if pixels else None,
            pixels.video if pixels else None,
            max_prompt_len,
            media,
            decoders,
            split_special_tokens,
            tokenizer_eos_id(directory, tokenizer),
            None if tool_format == "auto" else named_tool_format(tool_format),
            image_cache_bytes,
        )

    @property
    def tool_format(self) -> ToolFormat:
        """The format of tool calls."""
        return self._tool_format or self.template.tool_format

    @property
    def text_arguments(self) -> bool:
        """Whether the template gets the arguments of past calls as text. Otherwise, as objects."""
        return self.template.text_arguments and self.tool_format.takes_text_arguments

    def answer_format(
        self, options: Mapping[str, Any] = NO_OPTIONS, *, with_tools: bool = False
    ) -> AnswerFormat:
        """Return the format of answers under these options of the chat template.

        ``with_tools``: for requests with tools.

        Raises:
            UserError: the template rejects the options.
        """
        return AnswerFormat(
            self.template.reasoning(options, with_tools=with_tools), self.tool_format
        )

    def prompt(
        self,
        text: str,
        images: Sequence[ImageSource] = (),
        videos: Sequence[VideoSource] = (),
        system: str | None = None,
        caller: Caller = NO_CALLER,
    ) -> ModelInputs:
        """Prepare one user turn: the images, then the videos, then the text.

        Raises:
            UserError: as for `messages`.
        """
        content: list[Mapping[str, Any]] = [{"type": "image", "image": image} for image in images]
        content += [{"type": "video", "video": video} for video in videos]
        content.append({"type": "text", "text": text})
        turns: list[Mapping[str, Any]] = [{"role": "user", "content": content}]
        if system is not None:
            turns.insert(0, {"role": "system", "content": system})
        return self.messages(turns, caller)

    def messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        caller: Caller = NO_CALLER,
        *,
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] = NO_OPTIONS,
        ending: PromptEnding = "generation_prompt",
    ) -> ModelInputs:
        """Prepare a conversation. ``content`` is a string or a list of parts, in order.

        Parts: ``{"type": "text", "text": str}``, ``{"type": "image", "image": ImageSource}``,
        ``{"type": "video", "video": VideoSource}``, OpenAI's ``{"type": "image_url", "image_url":
        {"url": data URI}}`` and ``video_url``, and transformers' ``url``, ``path`` or ``base64`` in
        place of ``image``. The names of `MediaOptions` may stand beside a source or beside its
        ``url``. Other keys cause a warning. An assistant's ``content`` may be None beside its
        ``tool_calls``.

        Args:
            tools: functions that the model may call.
            options: further variables of the chat template, such as ``enable_thinking``.
            ending: what the prompt ends with.
        Raises:
            UserError: a part is unknown, an image or video is unreadable, unusable or excluded by
                ``media``, or the prompt is longer than ``max_prompt_len``. Without
                ``split_special_tokens``, also if a text contains an image or video pad.
            RequestCancelledError: ``caller`` was cancelled.
        """
        if not messages:
            raise UserError("messages: expected at least one, got none.")
        self._check_count(messages)
        turns, slots = self._reader.read(messages)
        # a server reads no paths, and reports the keys itself
        if self.media.paths and (ignored := self.ignored_keys(messages)):
            _log.warning("keys of messages are ignored: %s", ", ".join(ignored[:8]))
        visuals = self._load_all(slots, caller)
        literals: list[str] = []
        functions: list[dict[str, Any]] = [tool.to_template() for tool in tools]
        if self._splits:
            parts = [turns, functions, options]
            turns, functions, options = self._control.protect(parts, literals)
        rendered = self.template.render(turns, functions, options, ending)
        text = self._expand(rendered, slots, visuals)
        # as transformers: the BOS of a text-only chat is its template's, others have exactly one
        ids = self._control.encode(
            text,
            literals,
            caller,
            add_special_tokens=not (self._text_only or self.template.starts_with_bos(text)),
        )
        return self._inputs(ids, visuals)

    def ignored_keys(
        self, messages: Sequence[Mapping[str, Any]], where: str = "messages"
    ) -> tuple[str, ...]:
        """Return the paths of unknown keys in message parts, as ``messages[0].content[1].uuid``.

        ``where``: path of the list of messages.
        """
        return ignored_keys(messages, where=where, tiled=self._tiled)

    def with_options(
        self, messages: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[list[Any], tuple[str, ...]]:
        """Add vLLM's ``mm_processor_kwargs`` to the images and videos of ``messages``.

        Returns:
            The messages, and the unknown names in ``options``.
        """
        unknown = tuple(name for name in options if name not in PROCESSOR_OPTIONS)
        return with_processor_options(messages, options, tiled=self._tiled), unknown

    def raw(self, prompt: str | Sequence[int], caller: Caller = NO_CALLER) -> ModelInputs:
        """Prepare a prompt without chat template: token ids, or a text with control tokens.

        Raises:
            UserError: the prompt has no token, an id that the tokenizer lacks, an image or video
                pad, or more than ``max_prompt_len`` tokens.
            RequestCancelledError: ``caller`` was cancelled.
        """
        ids = self.tokenize(prompt, caller) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise UserError("prompt: no token. Give at least one.")
        pads = {self.tokenizer.token_to_id(pad) for pad in self.rules.pads.values()}
        for token_id in ids:
            if self.tokenizer.id_to_token(token_id) is None or token_id in pads:
                raise UserError(
                    f"prompt: token {token_id}: expected an id of the tokenizer that is no image "
                    "or video pad."
                )
        return self._inputs(ids, [])

    def tokenize(self, text: str, caller: Caller = NO_CALLER) -> list[int]:
        """Encode a text to ids. Control tokens in it are encoded as tokens.

        Raises:
            UserError: the tokenizer fails, or exceeds its time or memory.
            RequestCancelledError: ``caller`` was cancelled.
        """
        return self._control.encoder.encode(text, caller)

    def _inputs(self, ids: Sequence[int], visuals: Sequence[_Visual]) -> ModelInputs:
        token_ids = torch.tensor(ids, dtype=torch.int64)
        self._check_len(token_ids.numel(), self._sizes(visuals))
        grid_thw = torch.tensor([visual.grid for visual in visuals], dtype=torch.int64).reshape(
            -1, 3
        )
        visual_rows = self.rules.visual_rows(token_ids)
        seconds = torch.tensor([visual.seconds for visual in visuals])
        position_ids, rope_delta = self.rules.positions(visual_rows, grid_thw, seconds)
        patches = tuple(visual.patches for visual in visuals)
        return ModelInputs(
            token_ids, position_ids, rope_delta, patches, grid_thw, visual_rows, seconds
        )

    def warm_up(self) -> None:
        """Start the encoding processes and load the tokenizer there.

        Raises:
            UserError, EnvironmentMissingError: a process cannot start or cannot load it.
        """
        self._control.warm_up()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode token ids to text, without special tokens."""
        return str(self.tokenizer.decode([int(i) for i in token_ids], skip_special_tokens=True))

    def stream_decoder(self) -> StreamDecoder:
        """Create a decoder for ids that arrive one by one.

        It has ``push(id) -> str``, and ``flush() -> str`` for the end.
        """
        return StreamDecoder(self._token_pieces)

    @cached_property
    def _reader(self) -> MessageReader:
        return MessageReader(
            self.rules,
            text_arguments=self.text_arguments,
            refuse_pads=not self._splits,
            tiled=self._tiled,
        )

    @cached_property
    def _token_pieces(self) -> TokenPieces:
        return TokenPieces(self.tokenizer)

    def _load_all(self, slots: Sequence[MediaSlot], caller: Caller) -> list[_Visual]:
        """Load every visual. Check their number first and the prompt length after each."""
        most = self.media.max_items
        if most is not None and len(slots) > most:
            raise UserError(
                f"prompt: {len(slots)} images and videos, the limit is {most}. Send fewer."
            )
        visuals: list[_Visual] = []
        if self.image_config is None or self.video_config is None:
            return visuals
        loader = MediaLoader(
            self.image_config,
            self.video_config,
            self.media,
            self.decoders,
            caller,
            self._check_grid,
            self.images if self.images.max_bytes else None,
        )
        with contextlib.closing(loader.each(self._load, list(enumerate(slots)))) as found:
            for visual in found:
                visuals.append(visual)
                sizes = self._sizes(visuals)
                self._check_len(sum(count for _, count in sizes), sizes)
        return visuals

    def _load(self, loader: MediaLoader, numbered: tuple[int, MediaSlot]) -> _Visual:
        index, slot = numbered
        where = f"(visual {index + 1} of the prompt)"
        if slot.kind == "image":
            name = f"{describe(slot.source)} {where}" if index else describe(slot.source)
            patches = loader.image(slot.source, name, slot.options)
            return _Visual(name, patches, self.rules.image_text(patches.grid))
        name = f"video {where}" if index else "video"
        patches, taken = loader.video(slot.source, name, slot.options)
        frames = loader.video_config.temporal_patch_size
        text = self.rules.video_text(patches.grid, patch_times(taken.seconds, frames))
        return _Visual(name, patches, text, frames / taken.fps)

    def _expand(self, text: str, slots: Sequence[MediaSlot], visuals: Sequence[_Visual]) -> str:
        """Replace each pad by its visual's text."""
        pads = [self.rules.pads[slot.kind] for slot in slots]
        found = self._reader.pads.findall(text)
        if found != pads:
            raise UserError(
                f"chat template: expected pads for {len(pads)} images and videos in order, got "
                f"{len(found)}. Put images and videos into user messages, or use the checkpoint's "
                "own chat template."
            )
        texts = iter(visual.text for visual in visuals)
        return self._reader.pads.sub(lambda _: next(texts), text)

    def _check_count(self, messages: Sequence[Any]) -> None:
        """Check the number of messages and parts before the template renders them."""
        contents = [
            message.get("content") if isinstance(message, Mapping) else None for message in messages
        ]
        count = sum(len(content) if isinstance(content, list) else 1 for content in contents)
        if self.max_prompt_len is not None and count > self.max_prompt_len:
            raise UserError(
                f"prompt: {count} messages and parts, expected at most {self.max_prompt_len}, the "
                "limit of a prompt's tokens. Send fewer."
            )

    def _check_grid(self, name: str, grid: Grid) -> None:
        """Check that a video fits into a prompt."""
        count = self.rules.num_tokens(grid)
        self._check_len(count, [(name, count)])

    def _check_len(self, length: int, visuals: Sequence[tuple[str, int]]) -> None:
        """Check the prompt length. ``visuals``: the name and the token count of each."""
        if self.max_prompt_len is not None and length > self.max_prompt_len:
            sizes = ", ".join(f"{name} {count}" for name, count in visuals)
            of_these = f" (of these {sizes})" if visuals else ""
            raise UserError(
                f"prompt: {length} tokens{of_these}, the limit is {self.max_prompt_len}. Shorten "
                "the text, use smaller images or fewer frames, or build with a larger "
                "limits.max_seq_len."
            )

    def _sizes(self, visuals: Sequence[_Visual]) -> list[tuple[str, int]]:
        return [(visual.name, self.rules.num_tokens(visual.grid)) for visual in visuals]


def _check_table(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Check that every token of the tokenizer has an embedding.

    A token without one would stop the engine.
    """
    token, last = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if last >= vocab_size:
        raise UserError(
            f"tokenizer: {quote(token, 80)} has id {last}, the target's token table {vocab_size} "
            "rows. The tokenizer is another checkpoint's, or tokens were added to it alone: copy "
            "this checkpoint's own."
        )
