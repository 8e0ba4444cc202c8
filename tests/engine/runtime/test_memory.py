"""What a bundle needs of a GPU's memory, and what is refused before anything is loaded."""

from __future__ import annotations

import pytest

from benchmarks.synthetic import write_draft, write_target
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.config import EngineConfig, LimitsConfig
from trt_eagle3.engine.runtime.memory import (
    MemoryNeed,
    check_fits,
    fill_memory,
    kv_room,
    memory_need,
)
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import read_target
from trt_eagle3.spec import TargetSpec

ENGINE = EngineConfig(backend="torch", device="cuda", dtype="bfloat16")
LIMITS = LimitsConfig(max_batch_size=8, max_seq_len=16384, max_visual_tokens=12288)

Pair = tuple[TargetSpec, DraftManifest]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    write_target(folder / "target", "8b")
    write_draft(folder / "draft", "8b")
    spec = read_target(folder / "target")
    return spec, read_draft(folder / "draft", spec)


def need(pair: Pair, **limits: int) -> MemoryNeed:
    return memory_need(*pair, LimitsConfig.model_validate(LIMITS.model_dump() | limits), ENGINE)


def test_weights_are_those_of_both_checkpoints(pair: Pair) -> None:
    spec, manifest = pair
    on_disk = sum(ref.num_bytes for ref in (*spec.tensors.values(), *manifest.tensors.values()))
    assert need(pair).weights == pytest.approx(on_disk, rel=0.01)


def test_kv_cache_is_that_of_every_sequence_or_of_the_tokens_allowed(pair: Pair) -> None:
    token = 2 * 2 * (36 + 1) * 8 * 128
    assert need(pair).kv_token == token
    assert need(pair).kv_cache == token * (8 * 16384 + 16)
    assert need(pair, max_kv_tokens=20000).kv_cache == token * (20000 + 16)


def test_fp8_kv_of_the_target_is_a_byte_a_number_and_prompts_want_room_to_widen_it(
    pair: Pair,
) -> None:
    fp8 = memory_need(*pair, LIMITS, ENGINE.model_copy(update={"kv_dtype": "fp8"}))
    assert fp8.kv_token == 2 * (36 + 2) * 8 * 128
    assert fp8.kv_cache == fp8.kv_token * (8 * 16384 + 16)
    assert fp8.prefill - need(pair).prefill == 512 << 20


def test_images_grow_with_the_permitted_tokens_and_not_with_their_square(pair: Pair) -> None:
    assert need(pair, max_visual_tokens=24576).images == 2 * need(pair).images
    assert need(pair).images < 2e9  # a photo of 12 megapixels is 11,844 tokens


def test_what_fits_is_taken(pair: Pair) -> None:
    found = need(pair)
    check_fits(found, found.total + (3 << 29), LIMITS)
    with pytest.raises(UserError):
        check_fits(found, found.total + (3 << 29) - 1, LIMITS)


def refusal(pair: Pair, free: float) -> str:
    with pytest.raises(UserError) as caught:
        check_fits(need(pair), int(free), LIMITS)
    return str(caught.value)


def test_a_refusal_names_the_kv_tokens_that_would_fit(pair: Pair) -> None:
    message = refusal(pair, 30e9)
    assert "the GPU has 30.0 GB free" in message
    tokens = int(message.partition("limits.max_kv_tokens: ")[2].partition(",")[0])
    check_fits(need(pair, max_kv_tokens=tokens // 16 * 16 - 16), int(30e9), LIMITS)
    with pytest.raises(UserError):
        check_fits(need(pair, max_kv_tokens=tokens + 64), int(30e9), LIMITS)


def test_a_refusal_names_a_shorter_sequence_where_one_alone_does_not_fit(pair: Pair) -> None:
    base = need(pair)
    message = refusal(pair, base.total - base.kv_cache + (3 << 29) + 5000 * base.kv_token)
    assert "limits.max_seq_len: 5000" in message


def test_a_refusal_names_fewer_visual_tokens_where_they_take_the_room(pair: Pair) -> None:
    base = need(pair)
    message = refusal(pair, base.weights + base.prefill + (3 << 29) + base.images // 2)
    visual = int(message.partition("limits.max_visual_tokens: ")[2].partition(",")[0])
    assert 5000 < visual < 6144


def test_a_refusal_says_where_nothing_helps(pair: Pair) -> None:
    assert "Use a GPU with more memory" in refusal(pair, 10e9)


CUDA_BYTES = 3 << 29


def filled(pair: Pair, free: float, **limits: float) -> LimitsConfig:
    """The limits as a GPU with so much ``free`` memory holds them."""
    wanted = LimitsConfig.model_validate(LIMITS.model_dump() | limits)
    return fill_memory(memory_need(*pair, wanted, ENGINE), int(free), wanted, 16)


def test_kv_cache_takes_its_share_of_what_is_left(pair: Pair) -> None:
    found = filled(pair, 40e9, max_batch_size=64)
    base = need(pair, max_batch_size=64)
    room = 40e9 - (base.total - base.kv_cache) - CUDA_BYTES
    assert found.max_kv_tokens is not None
    used = found.max_kv_tokens * base.kv_token
    assert 0.89 * room < used <= 0.9 * room
    assert found.max_kv_tokens % 16 == 0
    half = filled(pair, 40e9, max_batch_size=64, memory_fraction=0.45).max_kv_tokens
    assert half == pytest.approx(found.max_kv_tokens / 2, abs=32)


def test_kv_cache_is_no_larger_than_all_sequences_can_fill(pair: Pair) -> None:
    assert filled(pair, 139e9).max_kv_tokens is None


def test_tokens_that_are_named_count_whatever_the_share(pair: Pair) -> None:
    assert filled(pair, 40e9, max_kv_tokens=20000, memory_fraction=0.01).max_kv_tokens == 20000


def test_one_sequence_has_room_whatever_the_share(pair: Pair) -> None:
    assert filled(pair, 40e9, memory_fraction=0.01).max_kv_tokens == 16384


def test_gpu_that_cannot_hold_one_sequence_refuses_in_one_line(pair: Pair) -> None:
    with pytest.raises(UserError, match=r"limits: this bundle needs .*max_seq_len") as caught:
        filled(pair, 22.5e9)
    assert "\n" not in str(caught.value)


def test_rows_kept_for_the_draft_and_trees_count(pair: Pair) -> None:
    spec, manifest = pair
    one, many = (need(pair, max_batch_size=size).prefill for size in (1, 65))
    row = 2 * 3 * spec.hidden_size
    assert many - one == 64 * (512 * row + 12 * spec.vocab_size)
    wide = memory_need(spec, manifest, LIMITS, ENGINE, num_nodes=6).prefill
    assert wide - need(pair).prefill == 8 * 5 * 12 * spec.vocab_size


def test_room_is_one_line_with_sequences_and_tokens(pair: Pair) -> None:
    line = kv_room(need(pair, max_kv_tokens=32768), filled(pair, 40e9, max_kv_tokens=32768), 16)
    assert line == (
        "8 sequences at once, KV cache of 32,768 tokens (5.0 GB): 2.0 sequences of 16,384"
    )


def test_amounts_below_a_tenth_of_a_gigabyte_are_written_in_megabytes() -> None:
    need = MemoryNeed(
        weights=2_000_000_000, kv_cache=75_497_472, images=99_000_000, prefill=0, kv_token=1
    )
    assert str(need) == "2.2 GB (weights 2.0 GB, KV cache 75 MB, images 99 MB, prefill 0 MB)"
