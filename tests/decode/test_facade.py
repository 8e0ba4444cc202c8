"""What a user of ``LLM`` meets: prompts one by one and in lists, streams, types, an end."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import trt_eagle3
from tests.decode.bundle import config_of, save_pair
from trt_eagle3 import (
    LLM,
    ClosedError,
    Generation,
    OverloadedError,
    Request,
    SamplingParams,
    UserError,
    build,
)
from trt_eagle3.decode.request.conversation import RawPrompt

TEXTS = ["What is it?", "And this?", "Nothing more?", "One more?", "The last one?"]
CHAT = [{"role": "user", "content": "And this?"}]
RED = Image.new("RGB", (64, 64), "red")
NINE = SamplingParams(max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder)
    return build(config_of(folder, limits={"max_seq_len": 200, "max_waiting": 2})).path


@pytest.fixture(scope="module")
def llm(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle) as llm:
        yield llm


def tokens(llm: LLM, prompt: Any, **options: Any) -> tuple[int, ...]:
    return llm.generate(prompt, sampling=NINE, **options).token_ids


def test_list_of_prompts_is_answered_in_order_though_fewer_may_wait(llm: LLM) -> None:
    expected = [tokens(llm, text) for text in TEXTS]
    found = llm.generate(TEXTS, sampling=NINE)
    assert [answer.token_ids for answer in found] == expected


def test_long_answers_of_a_list_wait_for_no_reader(llm: LLM) -> None:
    sampling = NINE.updated(max_tokens=120)
    found = llm.generate(TEXTS[:3], sampling=sampling, speculation=False)
    assert [len(answer.token_ids) for answer in found] == [120] * 3
    assert llm.metrics().preempted == 0


def test_list_mixes_texts_and_messages_with_images_and_sampling_of_their_own(llm: LLM) -> None:
    samplings = [NINE, NINE.updated(max_tokens=4), NINE]
    prompts = [TEXTS[0], CHAT, TEXTS[1]]
    found = llm.generate(prompts, images=[RED, None, [RED, RED]], sampling=samplings)
    assert [len(answer.token_ids) for answer in found] == [9, 4, 9]
    assert found[0].token_ids == tokens(llm, TEXTS[0], images=[RED])
    assert found[1].token_ids == tokens(llm, CHAT)[:4]
    assert found[2].token_ids == tokens(llm, TEXTS[1], images=[RED, RED])


def test_lists_of_other_lengths_are_refused_by_name(llm: LLM) -> None:
    for name, value, message in (
        ("images", [RED], "images: expected an entry for each of 2 prompts, got 1"),
        ("images", RED, "images: expected a list with an entry for each of 2 prompts, got Image"),
        ("sampling", [NINE] * 3, "sampling: expected an entry for each of 2 prompts, got 3"),
        ("sampling", {"seed": 1}, "sampling: expected a list"),
        (
            "videos",
            [{"a": 1}, None],
            "videos: expected paths, URLs.*, one or a list of them, got dict",
        ),
    ):
        with pytest.raises(UserError, match=message):
            llm.generate(TEXTS[:2], **{name: value})  # type: ignore[arg-type]


def test_list_of_no_prompts_is_a_list_of_no_answers(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.generate([], NINE, n=2) == []


def test_wrong_prompt_of_a_list_cancels_the_others(llm: LLM) -> None:
    with pytest.raises(UserError, match="the limit is 199"):
        llm.generate([TEXTS[0], "word " * 300], sampling=NINE.updated(max_tokens=150))
    assert tokens(llm, TEXTS[0])


def test_options_take_the_place_of_sampling_fields(llm: LLM) -> None:
    expected = tokens(llm, TEXTS[0])
    assert llm.generate(TEXTS[0], sampling=NINE, max_tokens=4).token_ids == expected[:4]
    assert llm.generate(TEXTS[0], max_tokens=4, ignore_eos=True).token_ids == expected[:4]


def test_generate_takes_sampling_params_by_position_and_by_both_names(llm: LLM) -> None:
    expected, four = tokens(llm, TEXTS[0]), NINE.updated(max_tokens=4)
    assert llm.generate(TEXTS[0], NINE).token_ids == expected
    assert llm.generate(TEXTS[0], sampling_params=NINE).token_ids == expected
    assert llm.generate(TEXTS[0], NINE, max_tokens=4).token_ids == expected[:4]
    found = llm.generate(TEXTS[:2], [NINE, four])
    assert [len(answer.token_ids) for answer in found] == [9, 4]
    assert llm.stream(TEXTS[0], four).finish().token_ids == expected[:4]
    assert llm.submit(TEXTS[0], sampling_params=four).finish().token_ids == expected[:4]


def test_sampling_given_twice_is_refused(llm: LLM) -> None:
    with pytest.raises(UserError, match="sampling_params: given twice"):
        llm.generate(TEXTS[0], NINE, sampling_params=NINE)
    with pytest.raises(UserError, match="a Request holds its own"):
        llm.submit(Request(TEXTS[0], sampling=NINE), NINE)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("max_token", "max_tokens"), ("image", "images"), ("temprature", "temperature")],
)
def test_unknown_option_is_refused_with_the_nearest_known_one(
    llm: LLM, name: str, nearest: str
) -> None:
    unknown: dict[str, Any] = {name: 4}
    for ask in (llm.generate, llm.stream, llm.submit):
        with pytest.raises(
            UserError, match=rf"^{name}: unknown option\. Did you mean {nearest}\? Options: "
        ):
            ask(TEXTS[0], **unknown)  # type: ignore[operator]


def test_n_answers_of_a_prompt_are_those_of_their_seeds(llm: LLM) -> None:
    sampled = NINE.updated(temperature=2.0, seed=7)
    expected = [tokens_of(llm.generate(TEXTS[0], sampled, seed=seed)) for seed in (7, 8, 9)]
    assert expected[0] != expected[1]
    assert [tokens_of(answer) for answer in llm.generate(TEXTS[0], sampled, n=3)] == expected
    two = llm.generate(TEXTS[:2], sampled, n=3)
    assert [len(answers) for answers in two] == [3, 3]
    assert [tokens_of(answer) for answer in two[0]] == expected
    drawn = llm.generate(TEXTS[0], sampled, seed=None, n=4)
    assert len({tokens_of(answer) for answer in drawn}) > 1


def test_n_greedy_answers_are_equal(llm: LLM) -> None:
    found = llm.generate(TEXTS[0], NINE, n=2)
    assert [tokens_of(answer) for answer in found] == [tokens(llm, TEXTS[0])] * 2
    assert len(llm.generate(TEXTS[0], NINE, n=1)) == 1


@pytest.mark.parametrize("n", [0, -1, True, "2"])
def test_bad_n_is_refused(llm: LLM, n: Any) -> None:
    for ask in (llm.generate, llm.chat):
        with pytest.raises(UserError, match="n: expected a whole number of at least 1, got"):
            ask(CHAT, n=n)  # type: ignore[operator]


def tokens_of(answer: Generation) -> tuple[int, ...]:
    return answer.token_ids


def test_chat_without_generation_prompt_has_a_shorter_prompt(llm: LLM) -> None:
    usual = llm.chat(CHAT, max_tokens=1).generation.prompt_tokens
    without = llm.chat(CHAT, max_tokens=1, add_generation_prompt=False)
    assert without.generation.prompt_tokens < usual


def test_token_ids_are_prompts_alone_and_in_lists(llm: LLM) -> None:
    ids = llm.tokenizer.encode("one more of these").ids
    expected = llm.generate(RawPrompt("one more of these"), NINE).token_ids
    assert llm.generate(ids, NINE).token_ids == expected
    assert llm.generate({"prompt_token_ids": ids}, NINE).token_ids == expected
    assert llm.prepare(ids).token_ids.tolist() == ids
    found = llm.generate([ids, {"prompt_token_ids": ids}, TEXTS[0]], NINE)
    assert [answer.token_ids for answer in found] == [expected, expected, tokens(llm, TEXTS[0])]
    [found_alone] = llm.generate([{"prompt_token_ids": ids}], NINE)
    assert found_alone.token_ids == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, "a"], "prompt: expected token ids, got 'a' among them"),
        ([1, -1], "prompt: expected token ids, got -1 among them"),
        ([True], "prompt: expected token ids, got True among them"),
        ([1, 2**40], "prompt: expected token ids, got 1099511627776 among them"),
        ({"prompt_token_ids": "1"}, "prompt_token_ids: expected a list, got str"),
        ({"prompt_token_ids": []}, "prompt: no token. Give at least one."),
        (
            {"role": "user", "content": "x"},
            "prompt: expected a mapping with prompt_token_ids alone, got ['role', 'content']. Put "
            "a chat message into a list.",
        ),
        (
            {"prompt": "x", "multi_modal_data": {}},
            "prompt: expected a mapping with prompt_token_ids alone, got ['prompt', "
            "'multi_modal_data']. Give the text alone, and images and videos as images= and "
            "videos=.",
        ),
    ],
)
def test_bad_token_ids_are_refused_in_one_line(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        llm.generate(prompt)
    assert str(error.value) == message


def test_token_ids_take_no_images(llm: LLM) -> None:
    with pytest.raises(UserError, match="a prompt without chat template takes none"):
        llm.generate([1, 2], images=RED)


def test_tokenizer_is_read_only(llm: LLM) -> None:
    assert llm.tokenizer is llm.bundle.processor.tokenizer
    with pytest.raises(AttributeError):
        llm.tokenizer = None  # type: ignore[misc, assignment]


def test_numpy_images_equal_pillow_images(llm: LLM) -> None:
    red = np.asarray(RED)
    expected = tokens(llm, TEXTS[0], images=RED)
    assert tokens(llm, TEXTS[0], images=red) == expected
    assert tokens(llm, TEXTS[0], images=[red[:, ::-1]]) == expected  # strided
    part = {"type": "image", "image": red}
    text = {"type": "text", "text": TEXTS[0]}
    assert tokens(llm, [{"role": "user", "content": [part, text]}]) == expected


@pytest.mark.parametrize(
    ("array", "got"),
    [
        (np.zeros((8, 8, 3), np.float32), "float32 [8, 8, 3]"),
        (np.zeros((8, 8), np.uint8), "uint8 [8, 8]"),
        (np.zeros((3, 8, 8), np.uint8), "uint8 [3, 8, 8]"),
        (np.zeros((2, 8, 8, 3), np.uint8), "uint8 [2, 8, 8, 3]"),
        (np.zeros(3, np.uint8), "uint8 [3]"),
    ],
)
def test_other_arrays_are_refused_in_one_line(llm: LLM, array: Any, got: str) -> None:
    with pytest.raises(UserError) as error:
        llm.generate(TEXTS[0], images=array)
    expected = f"expected an array of uint8 [height, width, 3], got {got}. Convert it first."
    assert str(error.value).endswith(expected)
    assert "\n" not in str(error.value)


def test_one_image_and_one_stop_text_need_no_list(llm: LLM) -> None:
    listed = llm.generate(TEXTS[0], NINE, images=[RED], stop=["zzz"])
    assert llm.generate(TEXTS[0], NINE, images=RED, stop="zzz").token_ids == listed.token_ids


def test_streams_say_what_generate_says(llm: LLM) -> None:
    expected = llm.generate(TEXTS[0], sampling=NINE)

    async def read() -> list[int]:
        chunks = llm.astream(TEXTS[0], sampling=NINE)
        return [token async for chunk in chunks for token in chunk.token_ids]

    assert asyncio.run(read()) == list(expected.token_ids)
    assert "".join(c.text for c in llm.stream(TEXTS[0], sampling=NINE)) == expected.text


def test_leaving_an_async_stream_cancels_its_request(llm: LLM) -> None:
    before = llm.metrics().requests.get("cancelled", 0)

    async def leave() -> None:
        chunks = llm.astream(TEXTS[0], sampling=NINE.updated(max_tokens=150), speculation=False)
        async for _ in chunks:
            break
        await chunks.aclose()
        while llm.metrics().requests.get("cancelled", 0) == before:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(leave(), 30))


def test_closed_llm_says_so_whatever_is_asked_of_it(bundle: Path) -> None:
    with LLM(bundle) as llm:
        assert repr(llm) == f"LLM({str(bundle)!r})"
        llm.generate(TEXTS[0], sampling=NINE)
    assert repr(llm).endswith(", closed)")
    assert not llm.ready

    async def read() -> list[Any]:
        return [chunk async for chunk in llm.astream(TEXTS[0])]

    for ask in (
        lambda: llm.generate(TEXTS[0]),
        lambda: llm.generate(TEXTS),
        lambda: llm.stream(TEXTS[0]),
        lambda: llm.submit(Request(TEXTS[0])),
        lambda: asyncio.run(read()),
        llm.__enter__,
        llm.start,
    ):
        with pytest.raises(ClosedError, match=r"this LLM is closed\. Load it again") as error:
            ask()
        assert isinstance(error.value, OverloadedError)
    assert llm.metrics().requests == {"length": 1}, "counters can still be read"
    llm.close()


def test_llm_that_nobody_holds_leaves_no_thread(bundle: Path) -> None:
    before = set(threading.enumerate())
    llm = LLM(bundle)
    llm.generate(TEXTS[0], sampling=NINE)
    started = {t for t in threading.enumerate() if t.name == "trt-eagle3-decode"} - before
    assert len(started) == 1
    gone = weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    for thread in started:
        thread.join(30)
        assert not thread.is_alive()


def test_answer_keeps_its_llm(bundle: Path) -> None:
    expected = len(LLM(bundle).stream(TEXTS[0], sampling=NINE).finish().token_ids)
    assert expected == 9


USER = """
from collections.abc import Sequence
from typing import assert_type
import trt_eagle3
from trt_eagle3 import LLM, Chunk, Generation, SamplingParams

with LLM("engines/pair") as llm:
    assert_type(llm, LLM)
    sampling = SamplingParams(temperature=0.7, max_tokens=256)
    assert_type(llm.generate("What is this?", images=["a.png"], sampling=sampling), Generation)
    assert_type(llm.generate([{"role": "user", "content": "What?"}]), Generation)
    assert_type(llm.generate(["What is this?", "And this?"], sampling=sampling), list[Generation])
    assert_type(llm.generate(["What?"], images=["a.png"], max_tokens=5), list[Generation])
    for chunk in llm.stream("What is this?", seed=1):
        assert_type(chunk, Chunk)

async def main(llm: LLM) -> None:
    async for chunk in llm.astream("What is this?"):
        assert_type(chunk, Chunk)

assert_type(trt_eagle3.load("engines/pair"), LLM)
llm.generate("What?", max_token=5)  # WRONG
llm.generate("What?", temperature="hot")  # WRONG
llm.stream(5)  # WRONG
trt_eagle3.Sampling  # WRONG
"""


# what a user's own mypy has: libraries are left out, which takes 3 s in place of minutes
MYPY = """
[mypy]
strict = true
follow_imports = silent
[mypy-torch.*,numpy.*,onnx.*,onnxruntime.*,transformers.*,tokenizers.*,PIL.*,av.*,pydantic.*]
follow_imports = skip
follow_imports_for_stubs = true
"""


def test_types_of_a_user_are_known(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    assert (Path(trt_eagle3.__file__).parent / "py.typed").is_file()
    program, config = tmp_path / "user.py", tmp_path / "mypy.ini"
    program.write_text(USER)
    config.write_text(MYPY)
    options = ["--config-file", str(config), "--cache-dir", str(tmp_path / "cache")]
    command = [sys.executable, "-m", "mypy", *options, str(program)]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    wrong = {i for i, line in enumerate(USER.splitlines(), 1) if line.endswith("# WRONG")}
    errors = {
        int(line.split(":")[1]) for line in found.splitlines() if line.startswith(str(program))
    }
    assert errors == wrong, found


def test_everything_that_is_exported_is_there_and_described() -> None:
    for name in trt_eagle3.__all__:
        assert getattr(trt_eagle3, name) is not None
        assert name in (trt_eagle3.__doc__ or "") or name in {"FinishReason", "SamplingOptions"}
    assert set(trt_eagle3.__all__) <= set(dir(trt_eagle3))
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = trt_eagle3.Engine  # type: ignore[attr-defined]


def test_import_alone_loads_no_torch() -> None:
    program = """
        import sys, trt_eagle3
        heavy = {"torch", "onnx", "numpy", "pydantic", "transformers"} & set(sys.modules)
        assert not heavy, heavy
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
