"""Score an interpretation of a draft: how well it predicts the target's answers.

Shapes: P prompt tokens, A answer tokens, n = P + A, S = A - 1 scored rows, R rows that draft (S, or
fewer of a block draft), K draft steps, H target hidden, Hd draft hidden, Vd draft vocab, N scored
answer tokens of all prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trt_eagle3.checkpoint.manifest import (
    AutoregressiveManifest,
    DraftManifest,
)
from trt_eagle3.checkpoint.tensor_index import read_tensor
from trt_eagle3.decode.forward.runner import AttentionMetadata, DraftRunner, causal_mask
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.decode.memory.kv_cache import PagePool, PageTable
from trt_eagle3.decode.memory.state import LayerStates, layer_states
from trt_eagle3.decode.speculation.eagle import (
    draft_decode_position,
    draft_positions,
    put_draft_visual,
)
from trt_eagle3.drafts.registry import kind_of
from trt_eagle3.engine.bundle.record import REFERENCE_ROOT, reference_location
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.engine.runtime.session import Session, open_session
from trt_eagle3.errors import UserError
from trt_eagle3.probe.block_scoring import BlockScoring
from trt_eagle3.probe.record import ProbeRecording

__all__ = ["Baseline", "Score", "Scorer", "draft_ids"]


@dataclass(frozen=True)
class Baseline:
    """How well the answers' own token frequencies predict the answers.

    Attributes:
        num_tokens: answer tokens. top_share: share of the most frequent one, which a constant guess
            gets right.
        entropy: nats per token of the frequencies.
    """

    num_tokens: int
    top_share: float
    entropy: float

    @classmethod
    def of(cls, token_ids: Tensor) -> Baseline:
        """Count ``token_ids``."""
        shares = token_ids.unique(return_counts=True)[1].double() / len(token_ids)
        entropy = float(torch.special.entr(shares).sum())
        return cls(len(token_ids), float(shares.max()), entropy)

    def is_chance(self, share: float) -> bool:
        """Return whether ``share`` right tokens are no more than a constant guess gets right."""
        top = self.top_share
        return bool(share <= top + 3 * (top * (1 - top) / self.num_tokens) ** 0.5)


@dataclass(frozen=True)
class Score:
    """The score of one interpretation.

    Attributes:
        token_ce: float64 [N]: cross-entropy in nats of the draft against the target at every answer
            token, a mean over the depths that predict it. Tokens outside the draft's vocabulary
            are excluded.
        target_entropy: lower bound for any draft: mean entropy in nats of the target's own
            distribution at those tokens.
        position_0: the share of rows whose first proposal is the target's token.
        acceptance_length: 1 + the sum over depths of the share of rows whose proposals are right up
            to that depth.
    """

    token_ce: Tensor
    target_entropy: float
    position_0: float
    acceptance_length: float

    @property
    def cross_entropy(self) -> float:
        """Mean nats per answer token."""
        return float(self.token_ce.mean())

    @property
    def divergence(self) -> float:
        """The draft's part of the cross-entropy: mean nats per answer token."""
        return self.cross_entropy - self.target_entropy


@dataclass(frozen=True)
class _Cells:
    """One prompt, row by depth [R, K]: float32 ``ce`` and ``entropy``, bool ``hit``.

    ``token``: the number of the predicted answer token, from 0 to S - 1. ``inside``: the answer has
    it. ``known``: the draft's vocabulary has it too.
    """

    token: Tensor
    ce: Tensor
    entropy: Tensor
    hit: Tensor
    inside: Tensor
    known: Tensor


def draft_ids(manifest: DraftManifest) -> Tensor:
    """int64 [Vd]: the target ids of the draft's vocabulary."""
    ids = torch.arange(manifest.draft_vocab_size)
    return ids + read_tensor(manifest.tensors["d2t"]).long() if "d2t" in manifest.tensors else ids


class Scorer:
    """Scores manifests that differ only in their interpretation, on the same recordings.

    Scores are cached.
    """

    def __init__(
        self, bundle: LoadedBundle, recordings: Sequence[ProbeRecording], folder: Path
    ) -> None:
        """Prepare for the recordings.

        Args:
            folder: where draft graphs may be written.
        Raises:
            UserError: the bundle has no draft.
        """
        if bundle.manifest is None:
            raise UserError(f"{bundle.path}: a bundle without a draft: there is nothing to probe")
        config, manifest = bundle.record.config, bundle.manifest
        self.num_steps = config.speculation.steps
        self._bundle, self._recordings, self._folder = bundle, recordings, folder
        self._ids = draft_ids(manifest)
        size = config.engine.page_size
        rows = max(_num_slots(r, self.num_steps) for r in recordings)
        pool = PagePool(-(-rows // size) + 1, size)
        self._pages = PageTable(pool)
        self._pages.reserve(rows)
        self._num_slots = pool.num_pages * size
        self._states: LayerStates | None = None  # the same for every interpretation
        self._sessions: dict[str, tuple[bytes, Session]] = {}
        self._blocks: BlockScoring | None = None
        self._open: DraftRunner | None = None
        self._open_key: str | None = None
        self._known: dict[str, Score] = {}

    def score(self, manifest: DraftManifest) -> Score:
        """Return the score of one interpretation of the bundle's draft."""
        key = _key(manifest)
        if key not in self._known:
            self._known[key] = _score([self._cells(manifest, r) for r in self._recordings])
        return self._known[key]

    def _runner(self, manifest: DraftManifest) -> DraftRunner:
        """Return the draft of this interpretation; kept until another graph is needed."""
        key = _key(manifest)
        if self._open is not None and self._open_key == key:  # next prompt, same interpretation
            return self._open
        config = self._bundle.record.config.engine
        graphs = kind_of(manifest).graphs(
            manifest, config.dtype, config.page_size, reference_location
        )
        models = {name: graph.SerializeToString() for name, graph in graphs.items()}
        if self._open is None or any(self._opened(name) != m for name, m in models.items()):
            self._open = None  # release the old session first: two drafts may not fit
            fuse, draft = (self._session(name, models[name]) for name in ("fuse", "draft"))
            if self._states is None:
                self._states = layer_states(draft.states, self._num_slots, config.device)
            self._open = DraftRunner(fuse, draft, self._states, self._bundle.draft_embedding, None)
        self._open_key = key
        return self._open

    def _table(self, manifest: DraftManifest) -> EmbeddingTable:
        """Return the table with this interpretation's token embeddings."""
        bundle = self._bundle
        return bundle.embedding if manifest.embedding == "target" else bundle.draft_embedding

    def _opened(self, name: str) -> bytes | None:
        """Return the graph whose session is open under ``name``."""
        return self._sessions[name][0] if name in self._sessions else None

    def _session(self, name: str, model: bytes) -> Session:
        if self._opened(name) != model:
            self._sessions.pop(name, None)
            config, file = self._bundle.record.config.engine, self._folder / f"{name}.onnx"
            file.write_bytes(model)
            session = open_session(config.backend, file, REFERENCE_ROOT, device=config.device)
            self._sessions[name] = model, session
        return self._sessions[name][1]

    @property
    def baseline(self) -> Baseline:
        """The token frequencies of the answers, each first token aside."""
        return Baseline.of(
            torch.cat([r.token_ids[-len(r.target_probs) :] for r in self._recordings])
        )

    def _cells(self, manifest: DraftManifest, recording: ProbeRecording) -> _Cells:
        num_rows = len(recording.target_probs)
        if isinstance(manifest, AutoregressiveManifest):
            rows, logits = torch.arange(num_rows), self.chain(manifest, recording)
        else:
            rows, logits = self.blocks(manifest, recording)
        # row s at depth i predicts answer token 1 + s + i
        token = rows[:, None] + torch.arange(logits.shape[1])
        inside = token < num_rows
        token = token.clip(max=num_rows - 1)
        wanted = recording.token_ids[-num_rows:][token]
        probs = recording.target_probs[token]
        ce, entropy = (
            -(probs * logits.log_softmax(dim=-1)).sum(dim=-1),
            torch.special.entr(probs).sum(dim=-1),
        )
        hit = inside & (self._ids[logits.argmax(dim=-1)] == wanted)
        known = inside & torch.isin(wanted, self._ids)
        return _Cells(token, ce, entropy, hit, inside, known)

    def blocks(self, manifest: DraftManifest, recording: ProbeRecording) -> tuple[Tensor, Tensor]:
        """Return the rows [R] that anchor a block, and the logits [R, K, Vd] of their drafts.

        Every answer token is predicted by one block or more.
        """
        if self._blocks is None:
            self._blocks = BlockScoring.load(manifest, self._bundle.record.config.engine.device)
        aux = recording.aux(manifest, self._bundle.spec.num_visual_levels)
        num_rows = len(recording.target_probs)
        rows = torch.arange(0, num_rows, max(1, self.num_steps // 2))
        first = len(recording.prompt.token_ids)
        table = self._table(manifest)
        found = self._blocks.logits(
            manifest, table, aux, recording.token_ids, (rows + first).tolist(), self.num_steps
        )
        return rows, found

    def chain(self, manifest: AutoregressiveManifest, recording: ProbeRecording) -> Tensor:
        """Return logits [S, K, Vd] of rows P - 1 to n - 3.

        All rows draft at once, each from its own true features. A chain uses the draft's own
        features and the target's tokens. As long as its proposals are right, these are the same;
        after a wrong proposal nothing more is accepted.
        """
        runner = self._runner(manifest)
        prompt_len, ids = len(recording.prompt.token_ids), recording.token_ids
        num_rows = len(recording.target_probs)
        logits, features = self._true_rows(manifest, runner, recording)
        found = [logits]
        rows = torch.arange(num_rows) + prompt_len - 1
        # rows P .. t; rows up to P - 1 are past rows
        before = torch.ones(num_rows, num_rows, dtype=torch.bool).tril(-1)
        own = torch.eye(num_rows, dtype=torch.bool)
        for depth in range(1, self.num_steps):
            mask = torch.cat([before, *[own] * depth], dim=1)
            first = draft_decode_position(manifest, depth, depth + recording.prompt.rope_delta)
            metadata = AttentionMetadata.single(
                past=prompt_len,
                pages=self._pages.pages(prompt_len + mask.shape[1]),
                mask=mask,
                positions=(rows + first).int().expand(3, -1),
            )
            embeds = self._table(manifest).lookup(ids[(rows + 1 + depth).clip(max=len(ids) - 1)])
            rows_wanted = torch.arange(num_rows)[None]
            (logits,), (features,) = runner.forward(
                embeds[None], features[None], metadata, rows_wanted
            )
            found.append(logits.cpu())
        return torch.stack(found, dim=1)

    def _true_rows(
        self, manifest: AutoregressiveManifest, runner: DraftRunner, recording: ProbeRecording
    ) -> tuple[Tensor, Tensor]:
        """Commit all rows with true features.

        Returns logits [S, Vd] and features [S, Hd] of rows P - 1 to n - 3.
        """
        prompt, num_rows = recording.prompt, recording.num_rows
        prompt_len = len(prompt.token_ids)
        embeds = self._table(manifest).lookup(recording.token_ids[1:])
        put_draft_visual(manifest, prompt, embeds[:prompt_len], 0)
        text = torch.arange(prompt_len, num_rows + 1, dtype=torch.int32) + prompt.rope_delta
        targets = torch.cat([prompt.position_ids, text.expand(3, -1)], dim=1)
        positions = draft_positions(manifest, torch.tensor([0]), targets[:, None])[:, 0]
        features = runner.fuse(
            recording.aux(manifest, self._bundle.spec.num_visual_levels).to(embeds)
        )
        logits, outs = [], []
        chunk = self._bundle.record.config.engine.prefill_chunk
        for start in range(0, num_rows, chunk):
            stop = min(start + chunk, num_rows)
            metadata = AttentionMetadata.single(
                start, self._pages.pages(stop), causal_mask(stop - start), positions[:, start:stop]
            )
            inside = torch.arange(start, stop)
            wanted = inside[(inside >= prompt_len - 1) & (inside < num_rows - 1)] - start
            some = wanted if len(wanted) else torch.tensor([0])
            part = slice(start, stop)
            (rows,), (out,) = runner.forward(
                embeds[None, part], features[None, part], metadata, some[None]
            )
            logits.append(rows[: len(wanted)].cpu())
            outs.append(out[wanted])
        return torch.cat(logits), torch.cat(outs)


def _num_slots(recording: ProbeRecording, num_steps: int) -> int:
    return recording.num_rows + (num_steps - 1) * len(recording.target_probs)


_NOT_READ = frozenset({"path", "tensors", "sources", "warnings", "rope", "image_rows_rotated"})


def _key(manifest: DraftManifest) -> str:
    """Return a key of all that interpretations differ in."""
    rope = manifest.rope
    turns = (rope.layout, rope.sections, rope.inv_freq, rope.attention_scaling)
    rotated = (
        isinstance(manifest, AutoregressiveManifest)
        and manifest.image_rows == "vision"
        and manifest.image_rows_rotated
    )
    rest = {name: value for name, value in vars(manifest).items() if name not in _NOT_READ}
    return repr((turns, rotated, rest))


def _score(prompts: Sequence[_Cells]) -> Score:
    hit, inside = (torch.cat([getattr(c, name) for c in prompts]) for name in ("hit", "inside"))
    accepted = hit.cumprod(dim=1).double().sum(dim=0) / inside.sum(dim=0).clip(min=1)
    return Score(
        token_ce=torch.cat([_by_token(c, c.ce) for c in prompts]),
        target_entropy=float(torch.cat([_by_token(c, c.entropy) for c in prompts]).mean()),
        position_0=float(accepted[0]),
        acceptance_length=1 + float(accepted.sum()),
    )


def _by_token(cells: _Cells, values: Tensor) -> Tensor:
    """float64 [N]: the mean of ``values [R, K]`` over the known depths that predict each token."""
    token = cells.token[cells.known]
    total, count = (torch.zeros(int(cells.token.max()) + 1, dtype=torch.float64) for _ in range(2))
    total.index_add_(0, token, values[cells.known].double())
    count.index_add_(0, token, torch.ones(len(token), dtype=torch.float64))
    return total[count > 0] / count[count > 0]
