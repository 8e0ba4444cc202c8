"""The text of an answer and its end: stop texts, end tokens, limits, and what is held back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.multimodal.record_goldens import train_tokenizer
from trt_eagle3.decode.request.output import Output
from trt_eagle3.decode.request.request import Chunk
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.multimodal import StreamDecoder
from trt_eagle3.multimodal.tokenizer import TokenPieces

EOS, WORDS = 9, ["ab", "c", "bc", "abc", " ", "x", "\u00e9", "!", ""]
TOKENIZER = train_tokenizer().backend_tokenizer
PIECES = TokenPieces(TOKENIZER)


class Words:
    """In place of a tokenizer's decoder: each token is a text, the end token none.

    ``tail`` comes out at the flush.
    """

    def __init__(self, tail: str = "") -> None:
        self.tail = tail

    def push(self, token: int) -> str:
        return "" if token == EOS else WORDS[token]

    def flush(self) -> str:
        tail, self.tail = self.tail, ""
        return tail


def output(tail: str = "", max_tokens: int = 100, **fields: Any) -> Output:
    sampling = SamplingParams(max_tokens=max_tokens, **fields)
    return Output(sampling, cast(StreamDecoder, Words(tail)), (EOS,))


def take(out: Output, *passes: Sequence[int], full: bool = False) -> list[Chunk]:
    """Chunks until the end; ``full`` at the last pass."""
    chunks: list[Chunk] = []
    for i, tokens in enumerate(passes):
        if out.finish_reason is None:
            chunks.append(out.take(tokens, full=full and i == len(passes) - 1))
    return chunks


def ref_answer(
    tokens: Sequence[int], stops: Sequence[str], ends: Sequence[int], max_tokens: int
) -> tuple[list[int], str, str | None]:
    """Ids, text and reason, by looking at the whole text again after every token."""
    text = ""
    for count, token in enumerate(tokens, start=1):
        text += "" if token == EOS else WORDS[token]
        places = [text.find(stop) for stop in stops if stop in text]
        if places:
            return list(tokens[:count]), text[: min(places)], "stop"
        if token in ends:
            return list(tokens[:count]), text, "stop"
        if count == max_tokens:
            return list(tokens[:count]), text, "length"
    return list(tokens), text, None


@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=25),
    stops=st.lists(
        st.sampled_from(["a", "bc", "cab", "cc", "abcab", " x", "b c", "\u00e9!"]), max_size=3
    ),
    stop_token_ids=st.lists(st.integers(0, 8), max_size=1),
    ignore_eos=st.booleans(),
    max_tokens=st.integers(1, 30),
    data=st.data(),
)
def test_any_answer_in_any_passes_ends_where_the_whole_text_says(
    tokens: list[int],
    stops: list[str],
    stop_token_ids: list[int],
    ignore_eos: bool,
    max_tokens: int,
    data: Any,
) -> None:
    out = output(
        stop=stops, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos, max_tokens=max_tokens
    )
    chunks: list[Chunk] = []
    rest = tokens
    while rest and out.finish_reason is None:
        width = data.draw(st.integers(1, 6))
        before = out.text
        chunks.append(out.take(rest[:width]))
        rest = rest[width:]
        assert out.text == before + chunks[-1].text
    ids, text, reason = ref_answer(
        tokens, stops, [*stop_token_ids, *([] if ignore_eos else [EOS])], max_tokens
    )
    assert (out.token_ids, out.finish_reason) == (ids, reason)
    assert [token for chunk in chunks for token in chunk.token_ids] == ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [reason]
    if reason:
        assert out.text == text
    else:  # what is held back is the longest end that may become a stop text
        held = text[len(out.text) :]
        assert text.startswith(out.text)
        beginnings = [stop[:n] for stop in stops for n in range(1, len(stop))]
        assert held == max((b for b in beginnings if text.endswith(b)), key=len, default="")


def test_stop_text_across_token_borders_is_found_and_left_out() -> None:
    out = output(stop=["bcab"])
    chunks = take(out, [5], [2], [0], [5])  # x bc ab
    assert [chunk.text for chunk in chunks] == ["x", "", ""]
    assert (out.text, out.token_ids, out.finish_reason) == ("x", [5, 2, 0], "stop")


def test_stop_text_inside_an_accepted_path_drops_the_tokens_after_it() -> None:
    out = output(stop=["c!"])
    (chunk,) = take(out, [5, 1, 7, 5, 5])
    assert (chunk.token_ids, chunk.text, chunk.finish_reason) == ((5, 1, 7), "x", "stop")


def test_of_two_stop_texts_in_one_token_the_earlier_cuts() -> None:
    out = output(stop=["c", "b"])
    assert take(out, [5, 3])[-1].text == "xa"
    assert out.finish_reason == "stop"


def test_stop_text_in_the_middle_of_a_token_cuts_the_token() -> None:
    out = output(stop=["b"])
    assert [chunk.text for chunk in take(out, [3])] == ["a"]
    assert out.token_ids == [3]


def test_text_that_may_become_a_stop_text_is_held_back_and_then_released() -> None:
    out = output(stop=["abc!", "c x"])
    texts = [chunk.text for chunk in take(out, [0], [1], [4], [7], [5])]
    assert texts == ["", "", "ab", "c !", "x"]


def test_text_held_back_is_released_at_the_limit_and_at_an_end_token() -> None:
    for out, passes in (
        (output(stop=["abc!"], max_tokens=2), ([0], [1])),
        (output(stop=["abc!"]), ([0], [1, EOS])),
    ):
        assert "".join(chunk.text for chunk in take(out, *passes)) == "abc"
        assert out.finish_reason in {"length", "stop"}


def test_unfinished_character_comes_out_at_the_end_and_may_complete_a_stop_text() -> None:
    out = output(tail="\ufffd", max_tokens=2)
    assert take(out, [0, 5])[-1].text == "abx\ufffd"
    out = output(tail="\ufffd!", stop=["x\ufffd"], max_tokens=2)
    assert (take(out, [0, 5])[-1].text, out.finish_reason) == ("ab", "stop")


def test_full_sequence_ends_by_length_unless_it_ends_anyway() -> None:
    out = output(stop=["cx"])
    assert [(c.text, c.finish_reason) for c in take(out, [0], [1], full=True)] == [
        ("ab", None),
        ("c", "length"),
    ]
    out = output()
    assert take(out, [0, EOS, 1], full=True)[-1] == Chunk((0, EOS), "ab", "stop")


def test_accepted_lengths_are_of_forwards_that_verified_drafts_and_of_tokens_that_are_kept() -> (
    None
):
    assert output().take([0, 1]).accepted_lengths == ()
    assert output().take([0, 1], drafted=True).accepted_lengths == (2,)
    assert output().take([0, EOS, 1], drafted=True).accepted_lengths == (2,)


def test_end_token_ends_only_where_it_is_not_ignored() -> None:
    assert take(output(), [0, EOS, 1])[-1] == Chunk((0, EOS), "ab", "stop")
    assert take(output(ignore_eos=True), [0, EOS, 1])[-1] == Chunk((0, EOS, 1), "abc", None)
    assert take(output(ignore_eos=True, stop_token_ids=[EOS]), [0, EOS, 1])[-1] == Chunk(
        (0, EOS), "ab", "stop"
    )


def test_stop_token_is_the_last_token_and_its_text_is_in_the_answer() -> None:
    out = output(stop_token_ids=[5])
    assert take(out, [0, 5, 1])[-1] == Chunk((0, 5), "abx", "stop")
    assert out.text == "abx"


@given(
    ids=st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), min_size=1, max_size=30),
    width=st.integers(1, 5),
)
def test_text_of_any_ids_is_what_the_tokenizer_makes_of_them(ids: list[int], width: int) -> None:
    sampling = SamplingParams(max_tokens=len(ids), stop=["\0never", "never\0"])
    out = Output(sampling, StreamDecoder(PIECES), ())
    chunks = take(out, *(ids[i : i + width] for i in range(0, len(ids), width)))
    assert out.finish_reason == "length"
    assert (
        "".join(chunk.text for chunk in chunks)
        == out.text
        == TOKENIZER.decode(ids, skip_special_tokens=True)
    )


def test_stop_text_of_half_characters_is_found_once_they_are_whole() -> None:
    ids = TOKENIZER.encode("so \U0001f600 far").ids
    for stop, text in (("\U0001f600", "so "), (" far", "so \U0001f600")):
        out = Output(SamplingParams(stop=[stop]), StreamDecoder(PIECES), ())
        take(out, *([i] for i in ids))
        assert (out.text, out.finish_reason) == (text, "stop")


def never_held(_: Output) -> int:
    return 0


def cut_by_token(self: Output) -> str | None:
    """A stop text must be all of what is held."""
    if self._held not in self._stops:
        return None
    self.finish_reason, self._held = "stop", ""
    return ""


FAULTS: dict[str, tuple[str, Any]] = {
    "nothing held back": ("_may_stop", never_held),
    "stop text only at a token's border": ("_cut", cut_by_token),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_in_the_search_for_stop_texts_is_caught(fault: str, monkeypatch: Any) -> None:
    def says() -> list[Any]:
        across, inside = output(stop=["bcab"]), output(stop=["b"])
        take(across, [5], [2], [0])
        take(inside, [3], [1])
        return [across.text, across.finish_reason, inside.text, inside.finish_reason]

    right = ["x", "stop", "a", "stop"]
    assert says() == right
    monkeypatch.setattr(Output, *FAULTS[fault])
    assert says() != right
