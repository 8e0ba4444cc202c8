"""Streaming gives what decoding all ids at once gives, and never half a character."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel, Decoder, Metaspace, Sequence
from transformers import AutoTokenizer

from tests.multimodal.record_goldens import train_tokenizer
from trt_eagle3.errors import UserError
from trt_eagle3.multimodal import Processor, StreamDecoder
from trt_eagle3.multimodal.tokenizer import TokenPieces, load_tokenizer

HF_TOKENIZER = train_tokenizer()
TOKENIZER: Tokenizer = HF_TOKENIZER.backend_tokenizer
token_ids = st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=40)


def with_decoder(decoder: Decoder) -> Tokenizer:
    """The same tokens, otherwise made into text."""
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.decoder = decoder
    return tokenizer


# What is not known to be bytes is decoded by the tokenizer.
PIECES = {
    "bytes": TokenPieces(TOKENIZER),
    "tokens": TokenPieces(with_decoder(Sequence([ByteLevel()]))),
}
by_pieces = pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())


def stream(ids: list[int], pieces: TokenPieces = PIECES["bytes"]) -> list[str]:
    decoder = StreamDecoder(pieces)
    return [*(decoder.push(i) for i in ids), decoder.flush()]


def test_only_a_byte_level_decoder_is_read_byte_by_byte() -> None:
    assert [pieces.is_byte_level for pieces in PIECES.values()] == [True, False]
    assert not TokenPieces(with_decoder(Metaspace())).is_byte_level


@by_pieces
@settings(max_examples=200, deadline=None)
@given(ids=token_ids)
def test_pieces_of_any_ids_join_to_the_whole_text(pieces: TokenPieces, ids: list[int]) -> None:
    assert "".join(stream(ids, pieces)) == TOKENIZER.decode(ids, skip_special_tokens=True)


def test_added_tokens_that_are_no_bytes_are_their_own_text() -> None:
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    texts = ["<tool>", "\u4e2d\u6587", "two words", "\u00e9", "\u00e9\u4e2d"]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    ids = [tokenizer.token_to_id(text) for text in texts]
    decoder = StreamDecoder(TokenPieces(tokenizer))
    text = "".join([*(decoder.push(i) for i in ids), decoder.flush()])
    assert text == tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30).filter(lambda text: "\ufffd" not in text))
def test_pieces_of_a_text_hold_no_half_character(text: str) -> None:
    for pieces in PIECES.values():
        found = stream(TOKENIZER.encode(text).ids, pieces)
        assert "".join(found) == text
        assert not any("\ufffd" in piece for piece in found)


def test_decoding_token_by_token_would_be_noticed() -> None:
    ids = TOKENIZER.encode("h\u00e9 \U0001f600").ids
    assert "".join(TOKENIZER.decode([i]) for i in ids) != "h\u00e9 \U0001f600"


@by_pieces
def test_special_tokens_are_left_out(pieces: TokenPieces) -> None:
    ids = TOKENIZER.encode("a<|im_end|>b").ids
    assert stream(ids, pieces) == ["a", "", "b", ""]


@by_pieces
def test_unfinished_character_comes_out_at_flush(pieces: TokenPieces) -> None:
    first = TOKENIZER.encode("\U0001f600").ids[0]
    assert stream([first], pieces) == ["", "\ufffd"]


BYTES = [i for i in range(TOKENIZER.get_vocab_size()) if "\ufffd" in TOKENIZER.decode([i])]
SPECIAL = [i for i, token in TOKENIZER.get_added_tokens_decoder().items() if token.special]


@by_pieces
@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(
        st.sampled_from([*BYTES, *SPECIAL[:2], *TOKENIZER.encode("a\u00e9\u4e2d\U0001f600").ids]),
        max_size=60,
    )
)
def test_pieces_of_bytes_that_make_no_text_join_to_the_whole_text(
    pieces: TokenPieces, ids: list[int]
) -> None:
    assert "".join(stream(ids, pieces)) == TOKENIZER.decode(ids, skip_special_tokens=True)


@by_pieces
@pytest.mark.parametrize("token", [BYTES[0], SPECIAL[0]])
def test_answer_of_one_id_for_ever_does_not_cost_more_with_every_id(
    pieces: TokenPieces, token: int
) -> None:
    """An end token that is to be ignored, or half a character again and again."""
    decoder = StreamDecoder(pieces)
    texts = [decoder.push(token) for _ in range(200)]
    assert len(decoder._ids) < 20
    assert "".join([*texts, decoder.flush()]) == TOKENIZER.decode(
        [token] * 200, skip_special_tokens=True
    )


@by_pieces
def test_flush_twice_returns_nothing_twice(pieces: TokenPieces) -> None:
    decoder = StreamDecoder(pieces)
    decoder.push(TOKENIZER.encode("a").ids[0])
    assert (decoder.flush(), decoder.flush()) == ("", "")


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=40))
def test_ids_equal_those_of_hfs_tokenizer(text: str) -> None:
    assert TOKENIZER.encode(text).ids == HF_TOKENIZER(text)["input_ids"]


def test_directory_is_read_as_hf_reads_it(published: Path) -> None:
    ours, theirs = load_tokenizer(published), AutoTokenizer.from_pretrained(str(published))
    text = "<|im_start|>user\nDescribe this image.<|im_end|>"
    assert ours.encode(text).ids == theirs(text)["input_ids"]


def test_decode_leaves_special_tokens_out(processor: Processor) -> None:
    assert processor.decode(processor.tokenizer.encode("Hi<|im_end|>").ids) == "Hi"


def test_missing_and_broken_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="broken tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json"])
def test_load_tokenizer_special_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="got a FIFO"):
        load_tokenizer(tmp_path)
