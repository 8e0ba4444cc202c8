"""PrefixCache: pages of past prompts, kept for prompts with the same prefix.

The key of a page covers its content and all content before it: tokens, rope positions and, at
visual rows, the digest of the image. It also covers the row after the page: the draft's last row
of a page has the embedding of its token. So the draft's keys and values, made from the target's
features, are valid wherever the key matches. A page that was filled without the draft serves only
sequences without a draft. A page with the same key and the draft's rows replaces it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType

import numpy as np
import torch

from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.sequence import SequenceState, Snapshot
from trt_eagle3.decode.memory.state import Prefix

__all__ = ["PrefixCache", "may_begin", "page_keys"]

_NO_SNAPSHOTS: Mapping[int, Snapshot] = MappingProxyType({})


_WORTH_PAGES = 16  # least pages of a text that is worth waiting for another sequence's prefill


def page_keys(sequence: SequenceState, num_rows: int, page_size: int) -> list[bytes]:
    """Return a key for each page that the first ``num_rows`` rows fill.

    The row after a page must be known too. A page's key extends the key of the previous page. The
    keys are cached in ``sequence.page_keys``.
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
        key = known[-1] if known else b""
        for first in range(0, stop - start - 1, page_size):
            rows = slice(first, first + page_size + 1)
            digest = hashlib.sha256(key + content[:, rows].tobytes())
            for media in dict.fromkeys(owners[rows]):
                digest.update(media)
            key = digest.digest()
            known.append(key)
    return known[:count]


def _media_of_rows(sequence: SequenceState, stop: int) -> list[bytes]:
    """Return the media digest of each row, empty at text rows."""
    prompt = sequence.prompt
    owners = [b""] * max(stop, len(prompt.token_ids))
    digests = [digest for digest, count in prompt.media for _ in range(count)]
    for row, digest in zip(prompt.visual_rows.nonzero().flatten().tolist(), digests, strict=True):
        owners[row] = digest
    return owners[:stop]


def may_begin(
    sequence: SequenceState,
    running: Sequence[SequenceState],
    cache: PrefixCache | None,
    *,
    with_snapshot: bool = False,
) -> bool:
    """Return whether ``sequence`` may start now. A backpressured sequence may not.

    If the same prompt is being prefilled for another sequence, it waits to reuse those pages. So
    of several answers to one prompt, one prefills it. It does not wait for a short text, if
    ``cache`` has the pages already, or if it needs the logits of its prompt. ``with_snapshot``: as
    for ``PrefixCache.find``.
    """
    prompt = sequence.prompt
    worth = len(prompt.token_ids) > _WORTH_PAGES * sequence.pool.page_size or bool(prompt.media)
    if sequence.backpressured or cache is None or not worth or sequence.needs_prompt_logits:
        return not sequence.backpressured
    is_prefilled = any(
        not s.tokens
        and s.drafting >= sequence.drafting
        and s.prompt.media == prompt.media
        and torch.equal(s.prompt.token_ids, prompt.token_ids)
        for s in running
    )
    return not is_prefilled or cache.knows(sequence, with_snapshot=with_snapshot)


class PrefixCache:
    """Keeps filled pages of sequences, and evicts the least recently used on demand.

    For some pages it also keeps a snapshot of the per-sequence states after the page.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._drafted = set[int]()  # pages that the draft's rows fill too
        self._snapshots = OrderedDict[bytes, Snapshot]()  # least recently used first

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def num_idle(self) -> int:
        """Pages that only the cache owns."""
        return self._pool.num_idle

    @property
    def num_snapshots(self) -> int:
        """Snapshots that the cache holds."""
        return len(self._snapshots)

    def find(self, sequence: SequenceState, *, with_snapshot: bool = False) -> Prefix:
        """Find the longest cached prefix of ``sequence`` that leaves at least one row to compute.

        ``with_snapshot``: only a prefix whose snapshot is cached too. Rows whose logits are needed
        are computed again, so for them it finds none.
        """
        if sequence.needs_prompt_logits:
            return Prefix((), None)
        keys = page_keys(sequence, sequence.num_prefill - 1, self._pool.page_size)
        return self.match(keys, with_snapshot=with_snapshot, drafted=sequence.drafting)

    def knows(self, sequence: SequenceState, *, with_snapshot: bool = False) -> bool:
        """Return whether ``find`` would find all pages that can be cached for ``sequence``."""
        keys = page_keys(sequence, sequence.num_prefill - 1, self._pool.page_size)
        is_known = all(self._knows(key, drafted=sequence.drafting) for key in keys)
        return is_known and not (with_snapshot and keys and keys[-1] not in self._snapshots)

    def remember(self, sequence: SequenceState) -> None:
        """Keep the pages that the rows of ``sequence`` fill."""
        keys = page_keys(sequence, sequence.num_written, self._pool.page_size)
        count = len(keys)
        pages, snapshots = sequence.pages.held[:count], sequence.take_snapshots(count)
        self.insert(keys, pages, snapshots, drafted=sequence.drafting)

    def match(
        self, keys: Sequence[bytes], *, with_snapshot: bool = False, drafted: bool = False
    ) -> Prefix:
        """Find the longest cached prefix of ``keys``, as for ``find``.

        ``drafted``: only pages that the draft's rows fill too.
        """
        known = list(takewhile(lambda key: self._knows(key, drafted=drafted), keys))
        if with_snapshot:
            while known and known[-1] not in self._snapshots:
                known.pop()
        snapshot = self._snapshots.get(known[-1]) if with_snapshot and known else None
        if snapshot is not None:
            self._snapshots.move_to_end(known[-1])
        return Prefix(tuple(self._pages[key] for key in known), snapshot)

    def insert(
        self,
        keys: Sequence[bytes],
        pages: Sequence[int],
        snapshots: Mapping[int, Snapshot] = _NO_SNAPSHOTS,
        *,
        drafted: bool = False,
    ) -> None:
        """Keep filled ``pages``. A cached page stays, unless only the new one has draft rows.

        ``drafted``: the draft's rows fill the new pages. ``snapshots``: by the number of pages
        before them; the cache takes ownership.

        A page counts as used later than the pages after it. So the end of a prompt is evicted
        before its start.
        """
        for key, page in reversed(list(zip(keys, pages, strict=True))):
            if self._knows(key, drafted=drafted):
                self._pool.refresh(self._pages[key])
            else:
                self._put(key, page, drafted=drafted)
        for num_pages, snapshot in snapshots.items():
            self._keep_snapshot(keys[num_pages - 1], snapshot)

    def _knows(self, key: bytes, *, drafted: bool) -> bool:
        return key in self._pages and (not drafted or self._pages[key] in self._drafted)

    def _put(self, key: bytes, page: int, *, drafted: bool) -> None:
        """Cache ``page`` under ``key``; it replaces a page without the draft's rows."""
        self._pool.keep(page)
        if key in self._pages:
            self._release_page(self._pages[key])
        self._pages[key], self._keys[page] = page, key
        if drafted:
            self._drafted.add(page)

    def _keep_snapshot(self, key: bytes, snapshot: Snapshot) -> None:
        if key in self._snapshots:
            snapshot.release()
        else:
            self._snapshots[key] = snapshot
        self._snapshots.move_to_end(key)

    def evict_snapshot(self) -> bool:
        """Release the least recently used snapshot; returns whether there was one."""
        if not self._snapshots:
            return False
        self._snapshots.popitem(last=False)[1].release()
        return True

    def evict(self, count: int) -> None:
        """Free ``count`` pages, or all that no sequence uses if fewer."""
        for page in self._pool.idle_since(count):
            self._forget(page)

    def clear(self) -> None:
        """Release every page."""
        for page in list(self._keys):
            self._forget(page)

    def _forget(self, page: int) -> None:
        key = self._keys[page]
        del self._pages[key]
        if key in self._snapshots:
            self._snapshots.pop(key).release()
        self._release_page(page)

    def _release_page(self, page: int) -> None:
        del self._keys[page]
        self._drafted.discard(page)
        self._pool.release(page)
