"""Pages of past prompts, kept for prompts that begin alike.

A page is known by what stands in it and all before it: tokens, rope positions and, at visual rows, the digest of the
image. The row after it counts too, because the draft's last row of a page has the embedding of that token: so the
draft's keys and values, made from the target's features, are good wherever the page is.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

import numpy as np
from torch import Tensor

from trt_eagle3.decode.kv_cache import PagePool
from trt_eagle3.decode.sequence import SequenceState

__all__ = ["PrefixCache", "media_digests", "page_keys"]


def page_keys(sequence: SequenceState, num_rows: int, page_size: int) -> list[bytes]:
    """A key for each page that the first ``num_rows`` rows fill, so that a row is known after it."""
    count = min(num_rows, sequence.num_tokens - 1) // page_size
    stop = count * page_size + 1
    content = np.concatenate(
        [sequence.ids(0, stop).numpy()[None], sequence.prompt.positions(0, stop).numpy().astype(np.int64)]
    )
    owners = _media_of_rows(sequence, stop)
    key = b"draft" if sequence.drafting else b"plain"
    keys = []
    for page in range(count):
        rows = slice(page * page_size, (page + 1) * page_size + 1)
        digest = hashlib.sha256(key + content[:, rows].tobytes())
        for media in dict.fromkeys(owners[rows]):
            digest.update(media)
        key = digest.digest()
        keys.append(key)
    return keys


def _media_of_rows(sequence: SequenceState, stop: int) -> list[bytes]:
    """The digest of what stands at each row, empty at text."""
    prompt = sequence.prompt
    owners = [b""] * max(stop, len(prompt.token_ids))
    digests = [digest for digest, count in prompt.media for _ in range(count)]
    for row, digest in zip(prompt.visual_rows.nonzero().flatten().tolist(), digests, strict=True):
        owners[row] = digest
    return owners[:stop]


def media_digests(patches: Tensor, grid_thw: Tensor, merged: int) -> tuple[tuple[bytes, int], ...]:
    """A digest of each image or video, and its rows in the prompt.

    Args:
        patches: float32 [n, D] of all of them in order. grid_thw: int64 [G, 3]. merged: patches that make one row.
    """
    sizes = grid_thw.prod(dim=1).tolist()
    parts = zip(grid_thw, patches.split(sizes), sizes, strict=True)
    return tuple(
        (hashlib.sha256(grid.numpy().tobytes() + part.contiguous().numpy().tobytes()).digest(), size // merged)
        for grid, part, size in parts
    )


class PrefixCache:
    """Owns pages besides the sequences that filled them; gives back the least recently used when others need them."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def num_idle(self) -> int:
        """Pages that only the cache owns; may be asked from another thread than the one that changes them."""
        return sum(self._pool.owners(page) == 1 for page in list(self._pages.values()))

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest known beginning of ``keys``."""
        known = list(takewhile(self._pages.__contains__, keys))
        self._use(known)
        return [self._pages[key] for key in known]

    def insert(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Keep filled ``pages``; those whose content is known stay as they are."""
        for key, page in zip(keys, pages, strict=True):
            if key not in self._pages:
                self._pool.share([page])
                self._pages[key] = page
        self._use(keys)

    def _use(self, keys: Sequence[bytes]) -> None:
        """A page counts as used after its followers, so that the end of a prompt is evicted before its beginning."""
        for key in reversed(keys):
            self._pages.move_to_end(key)

    def evict(self, count: int) -> None:
        """Free ``count`` pages, or as many as no sequence uses."""
        for key in [key for key, page in self._pages.items() if self._pool.owners(page) == 1][:count]:
            self._pool.give_back([self._pages.pop(key)])

    def clear(self) -> None:
        """Give back every page."""
        self._pool.give_back(list(self._pages.values()))
        self._pages.clear()
