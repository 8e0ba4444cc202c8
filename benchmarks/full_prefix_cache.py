"""A prefix cache that is full before anything is measured, as an hour of serving leaves it."""

from __future__ import annotations

from trt_eagle3.decode.kv_cache import PagePool
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.prefix_cache import PrefixCache

__all__ = ["fill_prefix_cache", "fill_with_prefixes"]


def fill_prefix_cache(engine: LLM) -> None:
    """``fill_with_prefixes`` of an idle ``engine``; nothing, where its bundle keeps no prefixes."""
    core = engine._started()
    pool, prefixes = core.pool, core.prefixes
    if prefixes is not None:
        core._ask(lambda: fill_with_prefixes(pool, prefixes))


def fill_with_prefixes(pool: PagePool, prefixes: PrefixCache) -> int:
    """Let prefixes of prompts that nobody will ask fill all free pages, as those of an hour of
    serving do; how many pages that are.
    """
    pages = pool.take(pool.num_free)
    prefixes.insert([b"nobody's %d" % page for page in pages], pages)
    pool.give_back(pages)
    return len(pages)
