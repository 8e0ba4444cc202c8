"""Pages of past prompts, kept for prompts that begin alike.

A page is known by what stands in it and all before it: tokens, rope positions and, at visual rows,
the digest of the image. The row after it counts too, because the draft's last row of a page has the
embedding of that token: so the draft's keys and values, made from the target's features, are good
wherever the page is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from trt_eagle3.decode.kv_cache import PagePool
from trt_eagle3.decode.sequence import SequenceState
from trt_eagle3.multimodal import PixelPatches

__all__ = ["PrefixCache", "media_digests", "page_keys"]


def page_keys(sequence: SequenceState, num_rows: int, page_size: int) -> list[bytes]:
    """A key for each page that the first ``num_rows`` rows fill, so that a row is known after it.

    A page's key goes on from that of the page before, and the sequence remembers them.
    """
    known = sequence.page_keys
    count = min(num_rows, sequence.num_tokens - 1) // page_size
    if count > len(known):
        start, stop = len(known) * page_size, count * page_size + 1
        content = np.concatenate(
            [
                sequence.ids(start, stop).numpy()[None],
                sequence.prompt.positions(start, stop).numpy().astype(np.int64),
            ]
        )
        owners = _media_of_rows(sequence, stop)[start:]
        key = known[-1] if known else b"draft" if sequence.drafting else b"plain"
        for first in range(0, stop - start - 1, page_size):
            rows = slice(first, first + page_size + 1)
            digest = hashlib.sha256(key + content[:, rows].tobytes())
            for media in dict.fromkeys(owners[rows]):
                digest.update(media)
            key = digest.digest()
            known.append(key)
    return known[:count]


def _media_of_rows(sequence: SequenceState, stop: int) -> list[bytes]:
    """The digest of what stands at each row, empty at text."""
    prompt = sequence.prompt
    owners = [b""] * max(stop, len(prompt.token_ids))
    digests = [digest for digest, count in prompt.media for _ in range(count)]
    for row, digest in zip(prompt.visual_rows.nonzero().flatten().tolist(), digests, strict=True):
        owners[row] = digest
    return owners[:stop]


def media_digests(visuals: Sequence[PixelPatches], merged: int) -> tuple[tuple[bytes, int], ...]:
    """A digest of each image or video in order, and its rows in the prompt; ``merged``: patches
    that make one row.
    """
    return tuple((visual.digest, len(visual.pixels) // merged) for visual in visuals)


class PrefixCache:
    """Keeps pages besides the sequences that filled them; lets the least recently used go when
    others need them.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def num_idle(self) -> int:
        """Pages that only the cache owns."""
        return self._pool.num_idle

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest known beginning of ``keys``."""
        return [self._pages[key] for key in takewhile(self._pages.__contains__, keys)]

    def insert(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Keep filled ``pages``; those whose content is known stay as they are.

        A page counts as used after its followers, so that the end of a prompt is evicted before its
        beginning.
        """
        for key, page in reversed(list(zip(keys, pages, strict=True))):
            if key in self._pages:
                self._pool.refresh(self._pages[key])
            else:
                self._pool.keep(page)
                self._pages[key], self._keys[page] = page, key

    def evict(self, count: int) -> None:
        """Free ``count`` pages, or as many as no sequence uses."""
        for page in self._pool.idle_since(count):
            self._forget(page)

    def clear(self) -> None:
        """Give back every page."""
        for page in list(self._keys):
            self._forget(page)

    def _forget(self, page: int) -> None:
        del self._pages[self._keys.pop(page)]
        self._pool.release(page)
