"""Holds a run against recomputation: transformers and the reference draft over the whole
sequence, with no cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.decode.pair import Proposal, Run
from trt_eagle3.parity.metrics import relative_error


class Recomputed:
    """The sequence of a run, computed in one go.

    Rows: all tokens but the last, whose row no pass has needed.
    """

    def __init__(self, run: Run) -> None:
        prompt, self.run = run.prompt, run
        self.tokens = torch.cat([prompt.token_ids, torch.tensor(run.tokens)])
        self.num_rows, num_prompt = len(self.tokens) - 1, len(prompt.token_ids)
        text = torch.arange(num_prompt, self.num_rows + 2) + prompt.rope_delta
        self.positions = torch.cat([prompt.position_ids.long(), text.expand(3, -1)], dim=1)
        visual = torch.zeros(self.num_rows, dtype=torch.bool)
        visual[:num_prompt] = prompt.visual_rows
        embeds = run.pair.tables[0].lookup(self.tokens[: self.num_rows])
        embeds[visual] = prompt.vision.embeds
        positions = self.positions[:, : self.num_rows]
        self.target = run.pair.target.states(embeds, positions, visual, prompt.vision.visual_levels)
        m, draft = run.manifest, run.pair.draft
        self.features = draft.fuse(self.target.aux(m.aux_layers, m.aux_pre_deepstack))
        self.embeds = self._draft_embeds(visual)
        rows = torch.arange(self.num_rows)
        mask = rows[:, None] >= rows
        self.logits, self.out = draft.forward(
            self.embeds, self.features, self.draft_positions(rows), mask
        )

    def _draft_embeds(self, visual: Tensor) -> Tensor:
        """Row t: token t + 1, or what the manifest puts at image rows."""
        m = self.run.manifest
        embeds = self.run.pair.tables[1].lookup(self.tokens[1:])
        if m.image_rows == "vision":
            for image, row in enumerate(visual.nonzero().flatten().tolist()):
                slot = row - 1 if m.image_rows_rotated else row
                if slot >= 0:
                    embeds[slot] = self.run.prompt.vision.embeds[image]
        return embeds

    def draft_positions(self, rows: Tensor) -> Tensor:
        """[3, n]: where draft ``rows`` stand; rows past the end are text."""
        m = self.run.manifest
        if m.positions == "linear":
            return (rows + m.position_shift).expand(3, -1)
        wanted = rows + m.position_shift
        known = self.positions.shape[1]
        late = (wanted + self.run.prompt.rope_delta).expand(3, -1)
        places = torch.where(wanted < known, self.positions[:, wanted.clamp(max=known - 1)], late)
        return places[:1].expand(3, -1) if m.positions == "temporal" else places

    def tree(self, proposal: Proposal) -> tuple[dict[int, Tensor], list[int]]:
        """Draft logits after the root and each inner node of a proposal, and the inner nodes in
        order.
        """
        tree, num_rows, draft = proposal.tree, proposal.num_rows, self.run.pair.draft
        logits, out = {0: self.logits[num_rows - 1]}, {0: self.out[num_rows - 1]}
        rows: list[int] = []  # inner nodes so far; each level runs them all anew
        for level in tree.levels:
            grown = [node for node in level if node in tree.parents]
            if not grown:
                break
            rows += grown
            ahead = self.run.pair.tables[1].lookup(torch.tensor([proposal.tokens[n] for n in rows]))
            features = torch.stack([out[tree.parents[n]] for n in rows])
            places = self.draft_positions(num_rows + tree.depths[rows] - 1)
            mask = torch.ones(num_rows + len(rows), num_rows + len(rows), dtype=torch.bool).tril()
            mask[num_rows:, num_rows:] = torch.tensor(
                [[_descends(tree.parents, a, b) for b in rows] for a in rows]
            )
            positions = torch.cat([self.draft_positions(torch.arange(num_rows)), places], dim=1)
            found, fed = draft.forward(
                torch.cat([self.embeds[:num_rows], ahead]),
                torch.cat([self.features[:num_rows], features]),
                positions,
                mask,
            )
            logits |= dict(zip(grown, found[-len(grown) :], strict=True))
            out |= dict(zip(grown, fed[-len(grown) :], strict=True))
        return logits, rows


def _descends(parents: tuple[int, ...], node: int, ancestor: int) -> bool:
    while node not in {ancestor, -1}:
        node = parents[node]
    return node == ancestor


def errors(run: Run) -> dict[str, float]:
    """The worst relative error of each kind.

    target: logits of prompt end and roots. greedy: emitted tokens below the best logit. extend: the
    draft's logits and features after its committed rows. tree: its logits in proposals. tokens:
    proposed tokens against their rank.
    """
    whole = Recomputed(run)
    expected = whole.target.logits
    found = {"target": 0.0, "greedy": 0.0, "extend": 0.0, "tree": 0.0, "tokens": 0.0}
    last_prompt_row = len(run.prompt.token_ids) - 1
    for row, logits in run.recorder.roots:
        if last_prompt_row <= row < whole.num_rows:
            found["target"] = max(found["target"], relative_error(logits, expected[row]))
    output_ids = expected[last_prompt_row:].gather(1, whole.tokens[last_prompt_row + 1 :, None])[
        :, 0
    ]
    found["greedy"] = float(
        ((expected[last_prompt_row:].max(-1).values - output_ids) / expected.abs().max()).max()
    )
    for length, state in run.recorder.states:
        row = length - 1
        pairs = ((state.logits, whole.logits[row]), (state.features, whole.out[row]))
        found["extend"] = max(found["extend"], *(relative_error(a, b) for a, b in pairs))
    for proposal in run.recorder.proposals:
        logits, inner = whole.tree(proposal)
        if inner:
            level = relative_error(
                torch.cat(proposal.logits), torch.stack([logits[node] for node in inner])
            )
            found["tree"] = max(found["tree"], level)
        found["tokens"] = max(found["tokens"], _token_error(run, proposal, logits))
    return found


def _token_error(run: Run, proposal: Proposal, logits: dict[int, Tensor]) -> float:
    """How far the proposed tokens' logits are from the rank-th best."""
    worst, d2t = 0.0, run.pair.d2t
    ids = torch.arange(run.manifest.draft_vocab_size) + (0 if d2t is None else d2t)
    for node, (parent, rank) in enumerate(
        zip(proposal.tree.parents, proposal.tree.ranks, strict=True)
    ):
        if parent < 0:
            continue
        draft_id = (ids == proposal.tokens[node]).nonzero().flatten()
        if not len(draft_id):
            return float("inf")
        row = logits[parent]
        gap = (row[draft_id[0]] - row.sort(descending=True).values[rank]).abs() / row.abs().max()
        worst = max(worst, float(gap))
    return worst
