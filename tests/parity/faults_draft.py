"""Faults of the draft: what it is given, what it computes, what is proposed and accepted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.parity.fault import (
    Fault,
    decoding,
    draft_of,
    given,
    gives,
    moved,
    reweigh_draft,
    row_spoilt,
)
from tests.parity.planting import Planted, Seam, Tensors
from trt_eagle3.decode.forward.device_batch import DeviceBatch
from trt_eagle3.decode.speculation import verify
from trt_eagle3.decode.speculation.accept import AcceptedPaths
from trt_eagle3.decode.speculation.eagle import EagleDrafter
from trt_eagle3.decode.speculation.grow import DraftInputs, TreeGrower
from trt_eagle3.decode.speculation.proposal import Proposal
from trt_eagle3.decode.speculation.tree import AnyTree
from trt_eagle3.decode.step.stepper import Stepper
from trt_eagle3.spec import RopeSpec


def _guesses_kept(p: Planted) -> None:
    """Extend runs after the prompt leave the keys that the draft had written for its guesses."""
    saved: list[Tensors] = []

    def given(seam: Seam, inputs: Tensors) -> Tensors:
        saved[:] = [
            {name: cache.clone() for name, cache in seam.bound.items() if "_out" not in name}
        ]
        return inputs

    def gave(seam: Seam, inputs: Mapping[str, Tensor], outputs: Tensors) -> Tensors:
        if (
            decoding(dict(inputs))
            and inputs["inputs_embeds"].shape[1] > 1
            and _is_chain(inputs["tree_mask"][0])
        ):
            for name, old in saved[0].items():
                seam.bound[name].copy_(old)
        return outputs

    p.inside["draft"] = Seam(None, given, gave)  # type: ignore[arg-type]


def _is_chain(mask: Tensor) -> bool:
    return bool(mask.shape[0] == mask.shape[1] and torch.equal(mask, torch.ones_like(mask).tril()))


def _always_accepted(p: Planted) -> None:
    """The first child of every node passes."""
    true = verify.accept_sampled

    def first(proposal: Proposal, probs: Tensor, bonus: Tensor, uniform: Tensor) -> AcceptedPaths:
        dropped = proposal.dropped()
        certain = torch.ones_like(probs)
        certain = certain if dropped is None else certain.masked_fill(dropped, 0.0)
        return true(proposal, certain, bonus, uniform)

    def first_greedy(proposal: Proposal, target_ids: Tensor) -> AcceptedPaths:
        unused = torch.zeros_like(target_ids, dtype=torch.float64)
        return first(proposal.pruned(), unused, target_ids, unused)

    p.patch.setattr(verify, "accept_sampled", first)
    p.patch.setattr(verify, "accept_greedy", first_greedy)


def _extended_late(p: Planted) -> None:
    true = EagleDrafter.extend

    def extend(self: EagleDrafter, batch: DeviceBatch, *args: Any, **options: Any) -> Any:
        late = replace(batch, positions=batch.positions + 1)
        return true(self, late, *args, **options)

    p.patch.setattr(EagleDrafter, "extend", extend)


def _first_step_late(p: Planted) -> None:
    true = TreeGrower.grow

    def grow(self: TreeGrower, tree: AnyTree, inputs: DraftInputs) -> Proposal:
        return true(self, tree, replace(inputs, positions=inputs.positions + 1))

    p.patch.setattr(TreeGrower, "grow", grow)


DRAFT: Mapping[str, Fault] = {
    "accepts anything": Fault(
        "drafted tokens are accepted unseen",
        "tokens.speculative",
        "tokens",
        _always_accepted,
    ),
    "aux rows of other nodes": Fault(
        "the draft is given the aux rows of other tokens",
        "draft.aux",
        "aux_hidden_states[out(1)]",
        given(
            "outside",
            "fuse",
            lambda _, i: moved(i, "aux_hidden_states", lambda t: t.roll(1, dims=0)),
        ),
    ),
    "token not one ahead": Fault(
        "the draft's prompt rows have their own token in place of the next one",
        "draft.inputs_embeds",
        "inputs_embeds",
        given(
            "outside",
            "draft",
            lambda _, i: (
                i if decoding(i) else moved(i, "inputs_embeds", lambda t: t.roll(1, dims=1))
            ),
        ),
    ),
    "draft position": Fault(
        "the draft's committed rows stand one position late after the prompt",
        "draft.position_ids",
        "position_ids",
        _extended_late,
    ),
    "draft step position": Fault(
        "the draft's own steps stand one position late",
        "draft.position_ids",
        "position_ids.step1",
        _first_step_late,
    ),
    "fuse order": Fault(
        "the aux states of the first and last layer are swapped before fc",
        "draft.fuse",
        "features",
        given(
            "inside",
            "fuse",
            lambda _, i: moved(
                i, "aux_hidden_states", lambda t: torch.cat(t.chunk(3, dim=-1)[::-1], dim=-1)
            ),
        ),
    ),
    "draft norm skipped": Fault(
        "the draft's hidden_norm weight is ignored",
        "draft.features",
        "hidden_norm",
        reweigh_draft("layers.0.hidden_norm.weight", torch.ones_like),
    ),
    "draft rope": Fault(
        "the draft's rope base is 1e4 in place of 5e6",
        "draft.features",
        "layers.0.self_attn.q",
        draft_of(rope=RopeSpec.plain(64, 1e4)),
    ),
    "draft residual": Fault(
        "the draft adds its attention to the normed hidden state",
        "draft.features",
        "layers.0.attention_residual",
        draft_of(residual="normed"),
        also=("draft.acceptance",),
    ),
    "feedback": Fault(
        "features are fed back after the final norm in place of before it",
        "draft.features",
        "features_out",
        draft_of(feedback="post_norm"),
    ),
    "draft KV reused": Fault(
        "the draft keeps the keys of its guesses where rows with true features belong",
        "draft.features",
        "features_out.step0",
        _guesses_kept,
    ),
    "draft head": Fault(
        "two rows of the draft's head are swapped",
        "draft.logits",
        "logits.step0",
        reweigh_draft("lm_head.weight", lambda w: w[torch.tensor([1, 0, *range(2, len(w))])]),
    ),
    "d2t shifted": Fault(
        "draft ids become the next target ids",
        "bundle.tables",
        "draft's vocabulary",
        reweigh_draft("d2t", lambda d2t: d2t + 1),
        also=("draft.proposals",),
    ),
    "one draft row": Fault(
        "one row of many that the draft feeds back is too large",
        "draft.features",
        "features_out",
        gives("draft", row_spoilt("features_out", 1)),
    ),
    "never speculates": Fault(
        "a bundle with a draft never speculates",
        "draft.proposals",
        "proposals",
        lambda p: p.patch.setattr(Stepper, "speculates", lambda *_: False),
    ),
}
