"""The decoder, one sequence at a time: speculative says what plain says, and cycles compute what
they claim to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.decode.check import errors
from tests.decode.pair import (
    NUM_PAGES,
    PAGE_SIZE,
    VOCAB,
    Pair,
    Recorder,
    make_pair,
    make_prompt,
    run,
    shuffled_pool,
)
from tests.reference.compare import FAULT_FLOOR, FLOAT32_TOLERANCE
from trt_eagle3.decode.forward.device_batch import DeviceBatch
from trt_eagle3.decode.forward.runner import AttentionMetadata, DraftRunner, TargetIds
from trt_eagle3.decode.memory.kv_cache import KVCache
from trt_eagle3.decode.request.prompt import Prompt
from trt_eagle3.decode.speculation import eagle
from trt_eagle3.decode.speculation.accept import AcceptedPaths
from trt_eagle3.decode.speculation.dynamic_tree import Candidates, DynamicTree
from trt_eagle3.decode.speculation.eagle import EagleDrafter
from trt_eagle3.decode.speculation.grow import TreeGrower
from trt_eagle3.decode.speculation.proposal import tree_proposal
from trt_eagle3.decode.speculation.tree import AnyTree, Tree
from trt_eagle3.decode.step.stepper import Stepper
from trt_eagle3.spec import RopeSpec

INTERLEAVED = RopeSpec.plain(8, 1e4, "interleaved", (2, 1, 1))
PAIRS: dict[str, dict[str, Any]] = {
    "3d": {"rope": INTERLEAVED},
    "3d shifted, vision rows": {"rope": INTERLEAVED, "position_shift": 1, "image_rows": "vision"},
    "temporal, vision rows unrotated": {
        "positions": "temporal",
        "image_rows": "vision",
        "image_rows_rotated": False,
        "aux_pre_deepstack": True,
        "feedback": "post_norm",
    },
    "linear shifted, own embedding, 2 layers": {
        "positions": "linear",
        "position_shift": 1,
        "embedding": "own",
        "hidden_size": 16,
        "num_layers": 2,
        "residual": "normed",
        "norm_before_fc": True,
    },
    "full vocab, target head": {"head": "target", "draft_vocab_size": VOCAB, "aux_layers": (0, 3)},
}
CHAIN = Tree.from_paths([(0,), (0, 0), (0, 0, 0)])
BUSHY = Tree.from_paths(
    [(0,), (1,), (2,), (3,), (4,), (0, 0), (0, 1), (1, 0), (3, 0), (4, 0), (0, 1, 0), (3, 0, 0)]
)
WIDE = Tree.from_paths([(i,) for i in range(8)] + [(i, j) for i in range(3) for j in range(4)])
LATE = Tree.from_paths([(0,), (1,), (2,), (2, 0), (2, 1), (2, 1, 0), (2, 1, 1)])
DYNAMIC = DynamicTree(depth=3, topk=3, num_nodes=10)
TREES = {"chain": CHAIN, "bushy": BUSHY, "wide": WIDE, "late": LATE, "dynamic": DYNAMIC}
TEXT = [9]
IMAGES = [3, (2, 3), 2, (2, 2), 3]
LAYOUTS: dict[str, list[Any]] = {"text": TEXT, "images": IMAGES}
NUM_TOKENS = 24
"""Of the runs whose every cycle is recomputed."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Each pair of ``PAIRS``, made once."""
    made: dict[str, Pair] = {}

    def pair(name: str) -> Pair:
        if name not in made:
            made[name] = make_pair(tmp_path_factory.mktemp("pair"), seed=len(name), **PAIRS[name])
        return made[name]

    return pair


@pytest.fixture(scope="module")
def plain_tokens(pairs: Callable[[str], Pair]) -> Callable[[str, str], list[int]]:
    """What each pair says plainly to each layout of ``LAYOUTS``, asked once."""
    return cache(
        lambda name, layout: (
            run(
                pairs(name), make_prompt(pairs(name), LAYOUTS[layout], seed=1), None, NUM_TOKENS
            ).tokens
        )
    )


CASES = [(name, tree, "images") for name in PAIRS for tree in TREES]
CASES += [(name, tree, "text") for name, tree in zip(PAIRS, TREES, strict=True)]
"""Every pair in every tree; text alone, which the other layout holds too, once for each."""


@pytest.mark.parametrize(("name", "tree", "layout"), CASES)
def test_speculative_run_says_what_plain_says_and_every_cycle_equals_recomputation(
    pairs: Callable[[str], Pair],
    plain_tokens: Callable[[str, str], list[int]],
    name: str,
    tree: str,
    layout: str,
) -> None:
    pair, plain = pairs(name), plain_tokens(name, layout)
    prompt = make_prompt(pair, LAYOUTS[layout], seed=1)
    speculative = run(pair, prompt, TREES[tree], NUM_TOKENS)
    count = min(len(plain), len(speculative.tokens))
    assert count >= NUM_TOKENS
    assert speculative.tokens[:count] == plain[:count]
    assert len(speculative.recorder.proposals) == len(speculative.passes) - 1
    worst = errors(speculative)
    assert max(worst.values()) < FLOAT32_TOLERANCE, worst


def test_trees_of_these_tests_do_get_accepted_and_need_compaction(
    pairs: Callable[[str], Pair], monkeypatch: Any
) -> None:
    moves: list[int] = []
    move = KVCache.move

    def counted(cache: KVCache, source: torch.Tensor, destination: torch.Tensor) -> None:
        moves.append(int((source != destination).sum()))
        move(cache, source, destination)

    monkeypatch.setattr(KVCache, "move", counted)
    pair = pairs("3d")
    done = run(pair, make_prompt(pair, IMAGES, seed=1), BUSHY)
    assert len(moves) >= 3
    assert max(moves) >= 1
    assert max(len(tokens) for tokens in done.passes) >= 3


def lose_extend_rows(patch: Any) -> None:
    """The draft keeps the rows that it drafted from its own features; only the last is extended."""
    extend = EagleDrafter.extend

    def last_only(
        self: Any, batch: DeviceBatch, proposal: Any, paths: AcceptedPaths, aux: Any, **options: Any
    ) -> Any:
        skip = int(paths.counts[0]) - 1
        late = replace(
            batch,
            num_computed_tokens=batch.num_computed_tokens + skip,
            positions=batch.positions + skip,
        )
        one = torch.ones_like(paths.counts)
        tokens, node = paths.tokens[:, skip : skip + 1], int(paths.path[0, skip])
        last = replace(paths, counts=one, tokens=tokens, path=torch.zeros_like(tokens))
        alone = tree_proposal(Tree.root_only(), proposal.tokens[:, :1])
        return extend(self, late, alone, last, aux[:, [node]], **options)

    patch.setattr(EagleDrafter, "extend", last_only)


def roll_features(patch: Any) -> None:
    fuse = DraftRunner.fuse
    patch.setattr(DraftRunner, "fuse", lambda self, aux: fuse(self, aux).roll(1, -2))


def stale_features(patch: Any) -> None:
    """Rows of verified tokens get the draft's own last features instead of the target's."""
    forward, fuse, extend = DraftRunner.forward, DraftRunner.fuse, EagleDrafter.extend
    last: dict[str, Any] = {"extends": False}

    def noted(self: DraftRunner, *args: Any) -> Any:
        logits, features = forward(self, *args)
        last["features"] = features[:, -1:]
        return logits, features

    def extended(self: Any, *args: Any, **options: Any) -> Any:
        last["extends"] = True
        found = extend(self, *args, **options)
        last["extends"] = False
        return found

    def stale(self: DraftRunner, aux: torch.Tensor) -> torch.Tensor:
        true = fuse(self, aux)
        return last["features"].expand_as(true).contiguous() if last["extends"] else true

    patch.setattr(DraftRunner, "forward", noted)
    patch.setattr(DraftRunner, "fuse", stale)
    patch.setattr(EagleDrafter, "extend", extended)


def lose_rope_delta(owner: type, method: str) -> Callable[[Any], None]:
    """``method`` is given the row index for the rope position."""

    def plant(patch: Any) -> None:
        original = getattr(owner, method)

        def wrong(self: Any, *args: Any, **options: Any) -> Any:
            lost = [
                replace(x, positions=x.num_computed_tokens) if isinstance(x, DeviceBatch) else x
                for x in args
            ]
            return original(self, *lost, **options)

        patch.setattr(owner, method, wrong)

    return plant


def mix_slot_and_position(patch: Any) -> None:
    inputs = AttentionMetadata.inputs

    def mixed(self: AttentionMetadata, logit_rows: Any) -> Any:
        return {**inputs(self, logit_rows), "past_lengths": self.positions[0, :, 0]}

    patch.setattr(AttentionMetadata, "inputs", mixed)


def shift_draft_position(by: Callable[[int, int], int]) -> Callable[[Any], None]:
    def plant(patch: Any) -> None:
        patch.setattr(
            eagle,
            "draft_decode_position",
            lambda _m, num_rows, position: by(num_rows, position),
        )

    return plant


FAULTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "draft KV reused": ("extend", lose_extend_rows),
    "features off by one row": ("extend", roll_features),
    "features not the target's": ("extend", stale_features),
    "target KV not compacted": (
        "target",
        lambda patch: patch.setattr(KVCache, "move", lambda *_: None),
    ),
    "rope delta lost in verify": ("target", lose_rope_delta(Stepper, "_rows")),
    "rope delta lost in extend": ("extend", lose_rope_delta(EagleDrafter, "extend")),
    "rope delta lost in propose": ("tree", lose_rope_delta(EagleDrafter, "_grow")),
    "draft position off by one": ("tree", shift_draft_position(lambda _, position: position + 1)),
    "slot taken from position": ("target", mix_slot_and_position),
    "tree mask lost": (
        "tree",
        lambda patch: patch.setattr(
            Tree, "mask", property(lambda t: torch.ones(2 * (t.num_nodes,)).tril().bool())
        ),
    ),
    "d2t ignored": (
        "tokens",
        lambda patch: patch.setattr(TargetIds, "__call__", lambda _, ids: ids),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_in_the_loop_is_caught(
    pairs: Callable[[str], Pair], monkeypatch: Any, fault: str
) -> None:
    pair = pairs("3d")
    key, plant = FAULTS[fault]
    plant(monkeypatch)
    found = errors(run(pair, make_prompt(pair, IMAGES, seed=1), BUSHY))
    assert found[key] > FAULT_FLOOR, found


def feed_first_parent(patch: Any) -> None:
    add = Candidates.add

    def wrong(self: Candidates, *args: Any) -> Any:
        frontier = add(self, *args)
        return replace(frontier, parents=torch.zeros_like(frontier.parents))

    patch.setattr(Candidates, "add", wrong)


def lose_draft_mask(patch: Any) -> None:
    level = TreeGrower._level

    def wrong(self: TreeGrower, inputs: Any, depth: int, tokens: Any, fed: Any, mask: Any) -> Any:
        return level(self, inputs, depth, tokens, fed, torch.ones_like(mask))

    patch.setattr(TreeGrower, "_level", wrong)


def lose_verify_mask(patch: Any) -> None:
    """In the target's forward every node sees all nodes before it."""
    rows = Stepper._rows

    def wrong(self: Stepper, proposal: Any, batch: Any) -> Any:
        every = torch.ones_like(proposal.mask).tril()
        return rows(self, replace(proposal, mask=every), batch)

    patch.setattr(Stepper, "_rows", wrong)


DYNAMIC_FAULTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "features of another parent": ("tree", feed_first_parent),
    "draft mask lost": ("tree", lose_draft_mask),
    "verify mask lost": ("target", lose_verify_mask),
    "d2t ignored": FAULTS["d2t ignored"],
}


@pytest.mark.parametrize("fault", DYNAMIC_FAULTS)
def test_planted_fault_in_a_dynamic_tree_is_caught(
    pairs: Callable[[str], Pair], monkeypatch: Any, fault: str
) -> None:
    pair = pairs("3d")
    key, plant = DYNAMIC_FAULTS[fault]
    plant(monkeypatch)
    found = errors(run(pair, make_prompt(pair, IMAGES, seed=1), DYNAMIC))
    assert found[key] > FAULT_FLOOR, found


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("3d", {"image_rows": "vision"}),
        ("3d", {"position_shift": 1}),
        ("3d", {"positions": "linear"}),
        ("3d shifted, vision rows", {"image_rows": "pad"}),
        ("3d shifted, vision rows", {"image_rows_rotated": False}),
        ("3d shifted, vision rows", {"position_shift": 0}),
        ("temporal, vision rows unrotated", {"positions": "linear"}),
    ],
)
def test_wrong_manifest_field_of_the_loop_is_caught(
    pairs: Callable[[str], Pair], name: str, changes: dict[str, Any]
) -> None:
    pair = pairs(name)
    found = errors(run(pair, make_prompt(pair, IMAGES, seed=1), BUSHY, **changes))
    assert found["extend"] > FAULT_FLOOR, found
    # a draft that is read wrongly never changes what is said
    assert found["target"] < FLOAT32_TOLERANCE


def test_wrong_embedding_table_is_caught(pairs: Callable[[str], Pair]) -> None:
    pair = pairs("3d")
    other = pairs("full vocab, target head").tables[0]
    done = run(
        replace(pair, tables=(pair.tables[0], other)), make_prompt(pair, TEXT, seed=1), CHAIN
    )
    assert errors(replace(done, pair=pair))["extend"] > FAULT_FLOOR


@pytest.mark.parametrize("tree", [None, *TREES.values()], ids=["plain", *TREES])
@pytest.mark.parametrize("max_seq_len", [10, 11, 14, 23, 24, 25])
def test_run_ends_at_max_seq_len_with_the_plain_tokens(
    pairs: Callable[[str], Pair], tree: AnyTree | None, max_seq_len: int
) -> None:
    pair = pairs("3d")
    prompt = make_prompt(pair, TEXT, seed=1)
    expected = run(pair, prompt, None).tokens[: max_seq_len - len(prompt.token_ids)]
    done = run(pair, prompt, tree, num_tokens=1000, max_seq_len=max_seq_len)
    assert done.tokens == expected


def test_run_decodes_plainly_once_the_tree_no_longer_fits(pairs: Callable[[str], Pair]) -> None:
    pair = pairs("3d")
    prompt = make_prompt(pair, TEXT, seed=1)
    done = run(pair, prompt, WIDE, num_tokens=1000, max_seq_len=50)
    assert all(proposal.num_rows + WIDE.num_nodes < 50 for proposal in done.recorder.proposals)
    first_plain = 1 + len(done.recorder.proposals)
    assert 1 < first_plain < len(done.passes)
    assert {len(tokens) for tokens in done.passes[first_plain:]} == {1}
    rows = sum(len(tokens) for tokens in done.passes[:first_plain]) + len(prompt.token_ids) - 1
    assert rows + WIDE.num_nodes >= 50


def test_tree_larger_than_max_seq_len_decodes_plainly_from_the_start(
    pairs: Callable[[str], Pair],
) -> None:
    pair = pairs("3d")
    prompt = make_prompt(pair, TEXT, seed=1)
    done = run(pair, prompt, WIDE, num_tokens=1000, max_seq_len=20)
    assert not done.recorder.proposals
    assert done.tokens == run(pair, prompt, None, num_tokens=11).tokens


@pytest.mark.parametrize("passes", [0, 1, 2, 5])
@pytest.mark.parametrize("tree", [None, BUSHY], ids=["plain", "bushy"])
def test_closing_a_run_early_returns_all_its_pages(
    pairs: Callable[[str], Pair], tree: Tree | None, passes: int
) -> None:
    pair, pool = pairs("3d"), shuffled_pool()
    recorder = Recorder()
    decoder = pair.decoder(recorder, 70, pair.drafter(recorder) if tree else None)
    generator = decoder.run(
        pair.sequence(make_prompt(pair, IMAGES), pool, drafting=bool(tree)), tree
    )
    for _ in range(passes):
        next(generator)
    assert (pool.num_free < NUM_PAGES - 1) == (passes > 0)
    generator.close()
    assert sorted(pool.take(pool.num_free)) == list(range(1, NUM_PAGES))


def test_run_that_fails_returns_all_its_pages(pairs: Callable[[str], Pair]) -> None:
    pair, pool = pairs("3d"), shuffled_pool()
    held = pool.take(pool.num_free - 5)  # 5 pages left: 20 rows
    generator = pair.decoder(Recorder(), 70).run(pair.sequence(make_prompt(pair, IMAGES), pool))
    with pytest.raises(ValueError, match="KV cache: 1 more pages of 4 tokens wanted"):
        list(generator)
    assert pool.num_free == 5
    assert PAGE_SIZE * 5 + len(held) * PAGE_SIZE == (NUM_PAGES - 1) * PAGE_SIZE


def test_prompt_of_the_whole_length_gives_one_token(pairs: Callable[[str], Pair]) -> None:
    pair = pairs("3d")
    prompt: Prompt = make_prompt(pair, TEXT)
    done = run(pair, prompt, CHAIN, num_tokens=1000, max_seq_len=10)
    assert [len(tokens) for tokens in done.passes] == [1]
