"""Trees in a record: find the row of the sequence of each node of a verify forward.

Shapes: T tree nodes, m rows of the sequence, H hidden, V vocab.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trt_eagle3.parity.record.answers import RecordedAnswer
from trt_eagle3.parity.record.engine import RecordedForward
from trt_eagle3.parity.record.trace import ForwardRows, logits_of, rows_of

__all__ = ["node_logits", "parents_of", "path_rows", "verified_logits"]


def node_logits(f: RecordedForward, rows: ForwardRows) -> dict[int, Tensor]:
    """Return logits [V] by node, of a forward over a tree."""
    return {logit.row - rows.start: logit.values for logit in logits_of(f, rows)}


def parents_of(mask: Tensor) -> list[int]:
    """Return each node's parent by a mask bool [T, T]: its last visible node; -1 for the root."""
    parents = []
    for i, row in enumerate(mask.tolist()):
        seen = [j for j, visible in enumerate(row) if visible and j != i]
        parents.append(seen[-1] if seen else -1)
    return parents


def path_rows(f: RecordedForward, rows: ForwardRows, table: Tensor) -> dict[int, int]:
    """Map sequence rows to nodes of a verify forward that hold the sequence's own tokens.

    Args:
        table: [m, H]: embeddings of the sequence's tokens; the root holds token ``past``.
    """
    embeds = rows.cut(f.inputs["inputs_embeds"])
    if rows.past >= len(table) or not torch.equal(embeds[0], table[rows.past]):
        return {}
    parents = parents_of(rows.mask)
    found, node, row = {rows.past: 0}, 0, rows.past
    while row + 1 < len(table):
        children = [i for i, parent in enumerate(parents) if parent == node]
        child = next((i for i in children if torch.equal(embeds[i], table[row + 1])), None)
        if child is None:
            break
        node, row = child, row + 1
        found[row] = node
    return found


def verified_logits(answer: RecordedAnswer, table: Tensor) -> dict[int, Tensor]:
    """Map sequence rows to their logits [V] in verify forwards with speculation.

    Only kept columns are returned, and only rows whose next token is the answer's.

    Args:
        table: as in ``path_rows``, of the tokens that are the same with and without speculation.
    """
    found = {}
    for forward in answer.speculative_forwards:
        rows = rows_of(forward) if forward.graph == "target" else None
        if rows is None or rows.past < answer.prompt_len:
            continue
        given = node_logits(forward, rows)
        for row, node in path_rows(forward, rows, table).items():
            if node in given and row < answer.num_rows:
                found[row] = given[node]
    return found
