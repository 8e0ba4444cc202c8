"""Define ServingConfig: limits on untrusted requests. Every default is set here, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from trt_eagle3.decode.forward.chunks import MAX_STEP_MS
from trt_eagle3.errors import UserError
from trt_eagle3.io.validation import problem_text
from trt_eagle3.io.vllm_names import called_here
from trt_eagle3.multimodal import MediaPolicy
from trt_eagle3.multimodal.media_cache import MEDIA_CACHE, MediaCacheSizes

__all__ = ["WARM_UP_SIDE", "ServingConfig", "ToolFormatName"]

WARM_UP_SIDE = 64  # pixels of the warm-up image
_MAX_STOP_LEN = 1024  # characters; each token of an answer is compared with every stop word
ToolFormatName = Literal["auto", "hermes", "qwen3_xml", "qwen3_coder", "llama3_json", "llama3"]
Count = Annotated[int, Field(gt=0, le=1 << 40)]
CacheBytes = Annotated[int, Field(ge=0, le=1 << 40)]
Seconds = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)]


class ServingConfig(BaseModel):
    """Limits on untrusted requests.

    Attributes:
        allowed_hosts: hosts that image and video URLs may be fetched from. None by default: data
            URIs only.
        fetch_timeout_s: time limit for fetching one image or video.
        max_media: images and videos per request. max_media_bytes: encoded size of each image or
            video, in bytes.
        max_pixels: pixels of an image or of a video's frame. max_video_frames: frames of a video.
            max_video_pixels: pixels of a video, over all frames.
        embedding_cache_bytes: visual embeddings that are kept on the device for later requests; on
            a GPU at most an eighth of the memory that is free at the first image. 0: none.
        embedding_cache_host_bytes: visual embeddings that had to leave the device, kept in host
            memory. 0: none.
        image_cache_bytes: decoded and resized images that are kept for later requests. 0: none.
        max_prompt_chars: characters of a request's text, without its images and videos.
        max_stop_words: stop words per request, and as many stop tokens. The engine thread checks
            each one after every token.
        decode_timeout_s: time limit for decoding an image or a frame of a list. A client with slow
            images occupies a decoder of its share for that long. video_timeout_s: time limit for
            decoding a video file.
        max_body_bytes: bytes of an HTTP request to ``trt-eagle3 serve``. max_text_bytes: bytes of a
            request outside data URIs.
        max_json_values: texts, names, lists, objects and numbers in the JSON of a request.
        max_bodies_bytes: bytes of all HTTP requests that are not prepared yet. body_timeout_s:
            longest pause between blocks of a body. The whole body may take this plus one second per
            64 KiB.
        max_connections: connections to ``trt-eagle3 serve``. header_timeout_s: time for a
            connection to send a request's headers.
        send_timeout_s: a client that reads nothing for this long is disconnected.
        max_request_s: a request that takes longer ends with an error.
        max_step_s: an engine counts as hung after this time in one of three states: it has work and
            finishes no step, prompts wait and none is prepared, or its process does not answer.
            Then ``/health`` of ``trt-eagle3 serve`` is 503, and on Triton the model is not ready.
            Choose more than the longest step takes. null: no check.
        max_step_ms: target in milliseconds for the time between two tokens of an answer while
            prompts of others are prefilled. A smaller one gives more even streams, and later first
            tokens under load. It bounds a chunk of prompt rows, at most ``engine.prefill_chunk``
            rows and at least 256, by the costs that the start measured on a GPU; without them, as
            on the CPU, it has no effect.
        stream_interval_s: minimum time between pieces of a streamed answer on Triton; faster pieces
            are merged. The first piece is sent at once. Every response costs the server time. 0:
            one response per verify step.
        max_choices: answers per request (``n``).
        strict_fields: refuse unknown keys of a request, at any depth. Otherwise they are ignored,
            and the response header ``X-Ignored-Fields`` lists them.
        generation_config: use sampling settings of the checkpoint's ``generation_config.json``
            where a request has none. False: greedy decoding.
        log_prompts: write prompts to the log. False: the log has sizes, times and outcomes only.
        split_special_tokens: treat control tokens such as ``<|im_start|>`` in a client's text as
            text. False makes control tokens of them. None: the bundle's setting.
        tool_format: format of tool calls. hermes (JSON), qwen3_xml (Qwen3.5, Qwen3-Coder; also
            called qwen3_coder), llama3_json (Llama 3; also called llama3), or auto (the format in
            the checkpoint's chat template).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    allowed_hosts: tuple[str, ...] = ()
    fetch_timeout_s: Seconds = 10.0
    max_media: Count = 16
    max_media_bytes: Count = 20 << 20
    max_pixels: Annotated[Count, Field(ge=WARM_UP_SIDE**2)] = 1 << 25  # an 8K frame
    max_video_frames: Count = 7200  # two minutes at 60 per second
    max_video_pixels: Count = 1 << 31  # 768 frames of 1080p
    decode_timeout_s: Seconds = 10.0
    video_timeout_s: Seconds = 120.0
    embedding_cache_bytes: CacheBytes = MEDIA_CACHE.device_bytes
    embedding_cache_host_bytes: CacheBytes = MEDIA_CACHE.host_bytes
    image_cache_bytes: CacheBytes = MEDIA_CACHE.image_bytes
    max_prompt_chars: Count = 1_000_000
    max_stop_words: Count = 64
    max_body_bytes: Count = 64 << 20
    max_text_bytes: Count = 1 << 20
    max_json_values: Count = 1 << 16
    max_bodies_bytes: Count = 256 << 20
    max_connections: Count = 512
    header_timeout_s: Seconds = 10.0
    body_timeout_s: Seconds = 20.0
    send_timeout_s: Seconds = 120.0
    max_request_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    max_step_s: Seconds | None = 120.0
    max_step_ms: Annotated[float, Field(gt=0, le=60_000, allow_inf_nan=False)] = MAX_STEP_MS
    stream_interval_s: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.02
    max_choices: Count = 16
    strict_fields: bool = False
    generation_config: bool = True
    log_prompts: bool = False
    split_special_tokens: bool | None = None
    tool_format: ToolFormatName = "auto"

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _are_hosts(cls, hosts: Any) -> Any:
        if not isinstance(hosts, list | tuple) or not all(map(_is_host, hosts)):
            raise ValueError(
                'expected a list such as ["images.example.com", "*.example.com", "host:8080"]'
            )
        return hosts

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], origin: str) -> ServingConfig:
        """Validate ``values``; error messages name them ``origin``.

        Raises:
            UserError: an unknown field or a bad value.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            if first["type"] == "extra_forbidden":
                if ours := called_here(field):
                    raise UserError(f"{origin}: {field}: vLLM's name; {ours}") from error
                raise UserError(
                    f"{origin}: {field}: unknown. Known: {', '.join(cls.model_fields)}"
                ) from error
            message = problem_text(first)
            raise UserError(f"{origin}: {field}: {message}, got {first['input']!r:.80}") from error

    def check_prompt(self, prompt: str | Sequence[Any]) -> None:
        """Refuse a text, or messages whose texts are too long.

        Raises:
            UserError: more than ``max_prompt_chars``.
        """
        count = len(prompt) if isinstance(prompt, str) else sum(map(_num_chars, prompt))
        if count > self.max_prompt_chars:
            raise UserError(
                f"prompt: {count} characters, the limit is {self.max_prompt_chars}. Shorten it."
            )

    def check_stop(self, words: Sequence[str], token_ids: Sequence[int]) -> None:
        """Refuse too many or too long stop words and stop tokens: they slow all answers.

        Raises:
            UserError: more than ``max_stop_words`` of either, or a word of more than 1,024
                characters.
        """
        for name, count in (("stop", len(words)), ("stop_token_ids", len(token_ids))):
            if count > self.max_stop_words:
                raise UserError(
                    f"{name}: {count} of them, the limit is {self.max_stop_words}. Send fewer."
                )
        longest = max(map(len, words), default=0)
        if longest > _MAX_STOP_LEN:
            raise UserError(
                f"stop: a text of {longest} characters, the limit is {_MAX_STOP_LEN}. Shorten it."
            )

    def media(self) -> MediaPolicy:
        """Build the media policy of requests; it never allows files of this machine."""
        return MediaPolicy(
            paths=False,
            allowed_hosts=self.allowed_hosts,
            max_items=self.max_media,
            max_bytes=self.max_media_bytes,
            max_pixels=self.max_pixels,
            max_video_frames=self.max_video_frames,
            max_video_pixels=self.max_video_pixels,
            decode_timeout_s=self.decode_timeout_s,
            video_timeout_s=self.video_timeout_s,
            fetch_timeout_s=self.fetch_timeout_s,
        )

    def media_cache(self) -> MediaCacheSizes:
        """Return how much is kept of images and videos."""
        return MediaCacheSizes(
            self.embedding_cache_bytes, self.embedding_cache_host_bytes, self.image_cache_bytes
        )


def _is_host(value: Any) -> bool:
    name = value.removeprefix("*.") if isinstance(value, str) else ""
    return name != "" and not any(character in "/@?* \t\n" for character in name)


def _num_chars(message: Any) -> int:
    """Count the characters of a message's texts; invalid messages are refused elsewhere."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = [content] if isinstance(content, str) else content if isinstance(content, list) else []
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return sum(len(text) for text in texts if isinstance(text, str))
