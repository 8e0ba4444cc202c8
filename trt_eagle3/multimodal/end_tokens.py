"""End tokens: the tokenizer's ``eos_token``, and a warning if the configs omit it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from trt_eagle3.errors import UserError, clip
from trt_eagle3.multimodal.processor_files import read_processor_json
from trt_eagle3.multimodal.tokenizer import load_tokenizer

__all__ = ["end_token_warnings", "tokenizer_eos_id"]

_PLACES = ("tokenizer_config.json", "special_tokens_map.json")


def tokenizer_eos_id(directory: Path, tokenizer: Tokenizer) -> int | None:
    """Return the id of the tokenizer's ``eos_token``; None if it has none.

    Raises:
        UserError: a file cannot be read.
    """
    for path in (directory / name for name in _PLACES):
        value = read_processor_json(path).get("eos_token") if path.exists() else None
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str):
            found: int | None = tokenizer.token_to_id(token)
            return found
    return None


def end_token_warnings(directory: Path, eos_token_ids: Sequence[int]) -> Iterator[str]:
    """Warn if a checkpoint's configs omit its tokenizer's ``eos_token``.

    Chat templates end turns with that token. An unreadable tokenizer causes no warning.
    """
    try:
        tokenizer = load_tokenizer(directory)
        eos = tokenizer_eos_id(directory, tokenizer)
    except UserError:
        return
    if eos is None or eos in eos_token_ids:
        return
    named = ", ".join(_title(tokenizer, i) for i in eos_token_ids[:4]) or "none"
    yield (
        f"end tokens: the configs name {named}; the tokenizer's eos_token is "
        f"{_title(tokenizer, eos)}, and answers end there too. Add {eos} to eos_token_id in "
        "generation_config.json."
    )


def _title(tokenizer: Tokenizer, token_id: int) -> str:
    return f"{clip(tokenizer.id_to_token(token_id) or 'unknown', 40)} ({token_id})"
