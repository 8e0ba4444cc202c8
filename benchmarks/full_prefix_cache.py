"""Fill the prefix cache before a measurement, as an hour of serving does."""

from __future__ import annotations

from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.prefix_cache import PrefixCache

__all__ = ["fill_prefix_cache", "fill_with_prefixes"]


def fill_prefix_cache(engine: LLM) -> None:
    """Fill the prefix cache of an idle ``engine``, if its bundle has one."""
    core = engine._started()
    pool, prefixes = core.pool, core.prefixes
    if prefixes is not None:
        core._ask(lambda: fill_with_prefixes(pool, prefixes))


def fill_with_prefixes(pool: PagePool, prefixes: PrefixCache) -> int:
    """Fill all free pages with prefixes that no prompt has.

    Returns:
        The number of pages.
    """
    pages = pool.take(pool.num_free)
    prefixes.insert([b"unused %d" % page for page in pages], pages)
    pool.give_back(pages)
    return len(pages)
