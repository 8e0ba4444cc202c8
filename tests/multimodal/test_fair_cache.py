"""A cache bounded in bytes, of which every client keeps a share."""

from __future__ import annotations

from string import ascii_uppercase

import pytest

from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.fair_cache import FairCache
from trt_eagle3.multimodal.media_cache import MediaCacheSizes


def key(name: str) -> bytes:
    return name.encode()


def fill(cache: FairCache[str], client: str, names: str, num_bytes: int = 10) -> list[str]:
    """Put a value of each letter; returns the values that were evicted."""
    return [e.value for n in names for e in cache.put(key(n), n, num_bytes, client)]


def kept(cache: FairCache[str], names: str) -> str:
    return "".join(name for name in names if key(name) in cache)


def test_one_client_evicts_its_least_recently_used_value() -> None:
    cache = FairCache[str](30)
    assert fill(cache, "a", "xyz") == []
    assert cache.get(key("x"), "a") == "x"
    assert fill(cache, "a", "w") == ["y"]
    assert kept(cache, "xyzw") == "xzw"
    assert cache.num_bytes == 30


def test_client_that_floods_the_cache_evicts_only_its_own_values() -> None:
    cache = FairCache[str](50)
    fill(cache, "quiet", "ab")
    flood = list(ascii_uppercase)
    evicted = fill(cache, "flood", ascii_uppercase)
    assert evicted == flood[:-3]
    assert kept(cache, "ab") == "ab"


def test_new_client_takes_room_from_the_client_with_most_bytes() -> None:
    cache = FairCache[str](50)
    fill(cache, "large", "abcd")
    fill(cache, "small", "e")
    assert fill(cache, "new", "f") == ["a"]
    assert kept(cache, "abcdef") == "bcdef"


def test_value_that_another_client_used_outlives_its_first_client() -> None:
    cache = FairCache[str](50)
    fill(cache, "flood", "x")
    assert cache.get(key("x"), "quiet") == "x"
    fill(cache, "flood", ascii_uppercase)
    assert cache.get(key("x"), "quiet") == "x"


def test_client_that_was_idle_for_long_loses_its_values_first() -> None:
    cache = FairCache[str](30)
    now = 0.0
    cache.clock = lambda: now
    fill(cache, "gone", "a")
    now = 1000.0
    assert fill(cache, "busy", "bcd") == ["a"]
    assert fill(cache, "busy", "e") == ["b"]


def test_value_larger_than_the_cache_is_returned_and_evicts_nothing() -> None:
    cache = FairCache[str](30)
    fill(cache, "a", "xy")
    assert fill(cache, "a", "z", num_bytes=31) == ["z"]
    assert kept(cache, "xyz") == "xy"
    assert fill(FairCache[str](0), "a", "x", num_bytes=1) == ["x"]


def test_bytes_hits_and_misses_are_counted() -> None:
    cache = FairCache[str](30)
    fill(cache, "a", "x", num_bytes=7)
    fill(cache, "b", "x", num_bytes=7)
    assert (cache.get(key("x"), "a"), cache.get(key("y"), "a")) == ("x", None)
    assert (cache.num_bytes, cache.num_hits, cache.num_misses) == (7, 1, 1)
    cache.clear()
    assert (cache.num_bytes, key("x") in cache) == (0, False)
    assert fill(cache, "a", "xyz") == []


@pytest.mark.parametrize("value", [-1, 1.5, True, "1"])
def test_sizes_must_be_numbers_of_bytes(value: object) -> None:
    with pytest.raises(UserError, match="host_bytes: expected a number of bytes"):
        MediaCacheSizes(host_bytes=value)  # type: ignore[arg-type]
