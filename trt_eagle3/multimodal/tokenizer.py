"""Load the checkpoint's tokenizer, and decode a stream of token ids to text."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from trt_eagle3.errors import EnvironmentMissingError, UserError, clip, is_failure
from trt_eagle3.io.bounded_read import read_bounded
from trt_eagle3.multimodal.text_encoder import try_tokenizer

__all__ = ["StreamDecoder", "TokenBytes", "TokenPieces", "load_tokenizer"]

_MAX_TOKENIZER_BYTES = 128 << 20  # tokenizers of 256,000 tokens have about 35 MB
_MAX_STRIPPED = 1 << 16  # characters at an end of a token; real decoders strip 1
_MAX_DECODER_FACTOR = 64  # decoders of models in use replace one character by one
_OLD_FILES = (
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_UTF8 = codecs.getincrementaldecoder("utf-8")
_HALF_CHARACTER = "\ufffd"
# in ids: an unfinished character has at most three bytes, in at most as many ids
_TAIL, _MOST_PENDING = 3, 8


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load ``tokenizer.json`` of a directory, else ``vocab.json`` and ``merges.txt``.

    The latter are loaded by transformers. A bounded process loads a tokenizer first. Texts are
    encoded there too (``TextEncoder``). The tokenizer in this process only looks up tokens and
    decodes.

    Raises:
        UserError: there is no tokenizer, it is broken, or its decoder could lengthen texts without
            bound.
        EnvironmentMissingError: no process can be started.
    """
    path = directory / "tokenizer.json"
    try:
        if path.exists():
            source = read_bounded(path, _MAX_TOKENIZER_BYTES).decode()
            try_tokenizer(source)
            tokenizer = Tokenizer.from_str(source)
        elif (directory / "vocab.json").exists():
            for name in _OLD_FILES:
                if (directory / name).exists():
                    read_bounded(directory / name, _MAX_TOKENIZER_BYTES)
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True
            ).backend_tokenizer
        else:
            raise UserError(
                f"{directory}: no tokenizer.json. Copy the tokenizer files from the checkpoint."
            )
        _check_decoder(tokenizer)
    except (UserError, EnvironmentMissingError):
        raise
    except BaseException as error:  # bare Exception of the tokenizers library, and its panics
        if not is_failure(error):
            raise
        raise UserError(
            f"{directory}: broken tokenizer ({clip(error)}). Copy its files from the checkpoint "
            "again."
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _check_decoder(tokenizer: Tokenizer) -> None:
    """Check that the decoder is fast and cannot lengthen texts without bound.

    The decoder runs for every token of every answer, on a thread that all answers share.

    Raises:
        ValueError: the decoder has a regular expression, lengthens a text too much, or strips so
            many characters that the library's counter overflows.
    """
    if tokenizer.decoder is None:
        return
    factor = 1.0
    todo: list[Any] = [json.loads(tokenizer.to_str())["decoder"]]
    while todo:
        part = todo.pop()
        todo += part.get("decoders", [])
        if part["type"] == "Strip" and max(part["start"], part["stop"]) > _MAX_STRIPPED:
            raise ValueError(f"its decoder strips more than {_MAX_STRIPPED} characters")
        if part["type"] != "Replace":
            continue
        pattern = part["pattern"].get("String")
        if pattern is None:
            raise ValueError("its decoder replaces a regular expression, expected a fixed text")
        factor *= max(1.0, len(part["content"]) / max(1, len(pattern)))
        if factor > _MAX_DECODER_FACTOR:
            raise ValueError(f"its decoder lengthens a text more than {_MAX_DECODER_FACTOR} times")


class TokenBytes:
    """The bytes of each token. A token may hold a part of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {
            i: token.content.encode() for i, token in tokenizer.get_added_tokens_decoder().items()
        }

    def __call__(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for an id that the tokenizer lacks."""
        if token_id in self._added:
            return self._added[token_id]
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        return str(self._tokenizer.decode([token_id])).encode()


def _byte_characters() -> dict[str, int]:
    """Map each character of byte-level BPE to its byte (GPT-2's table).

    Bytes that are printable in Latin-1 map to themselves, all others to the characters from 256.
    """
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF = _byte_characters()


class TokenPieces:
    """The text that each token adds, shared by the ``StreamDecoder``s of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special = {
            i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self.is_byte_level = isinstance(tokenizer.decoder, ByteLevel)
        self._bytes: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes that a token of a byte-level tokenizer adds.

        Empty for a special token, and for an id that the tokenizer lacks.
        """
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._read(token_id)
        return found

    def _read(self, token_id: int) -> bytes:
        token = None if token_id in self.special else self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        return token.encode()


class StreamDecoder:
    """Decode a growing sequence of ids piece by piece.

    The joined pieces equal the decoding of all ids at once. A piece is held back while it ends
    inside a character. Returned text never changes.
    """

    def __init__(self, pieces: TokenPieces) -> None:
        self._pieces = pieces
        # if tokens are bytes, decode the new bytes without the tokenizer
        self._utf8 = _UTF8("replace") if pieces.is_byte_level else None
        # Ids of the last returned piece, then those not yet returned. The decoder may treat the
        # start of a text differently, so new ids are decoded after the previous piece.
        self._ids: list[int] = []
        self._returned = 0

    def push(self, token_id: int) -> str:
        """Append an id and return the text that it completes; empty inside a character."""
        if self._utf8 is not None:
            return self._utf8.decode(self._pieces[token_id])
        if token_id in self._pieces.special:
            return ""
        self._ids.append(token_id)
        piece = self._pending()
        if not piece.endswith(_HALF_CHARACTER):
            return self._take(piece)
        return self._take_certain() if len(self._ids) - self._returned > _MOST_PENDING else ""

    def flush(self) -> str:
        """Return the text still held back, with an unfinished character as U+FFFD."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        return self._take(self._pending())

    def _pending(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._returned])) :]

    def _take(self, piece: str) -> str:
        if piece:
            self._ids = self._ids[self._returned :]
            self._returned = len(self._ids)
        return piece

    def _take_certain(self) -> str:
        """Return text that later ids cannot change, so that invalid bytes are not held forever.

        This is the text of all but the last ids. They are cut where the texts of both parts join to
        the whole text, because a character may span several ids.
        """
        whole, context = self._decode(self._ids), self._decode(self._ids[: self._returned])
        for cut in range(len(self._ids) - _TAIL, self._returned, -1):
            head = self._decode(self._ids[:cut])
            if head + self._decode(self._ids[cut:]) == whole:
                self._ids, self._returned = self._ids[self._returned :], cut - self._returned
                return head[len(context) :]
        return ""

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._pieces.tokenizer.decode(ids, skip_special_tokens=True))
