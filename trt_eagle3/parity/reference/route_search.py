"""Route search: which experts an engine took that does not tell them.

Of two experts whose router logits all but tie rounding chooses one. Engines that cannot be looked
into, and forwards that are not run again, tell their choice only by what comes of it: aux hidden
states, logits, log-probabilities. So rows that are out of tolerance are computed again under each
choice that the reference's own router logits leave open, and wherever the engine tells something
the choices are taken that explain it best. Then the reference runs once more along them, as it
does along experts that an engine names (``routing``), and the answer is compared as ever.

A row is searched by its own choices alone. Later rows attend to it and move with it: of the trained
mixture by 0.1 % where the row itself moves by 2 % (medians; at most 7 % where it moves by 79 %).
That is in the last run. It is not where other forwards turned the choice of a row of the prompt and
tell nothing of it: those rows may leave the tolerance of log-probabilities, and count as off.

Shapes: n rows of a sequence, m rows of them that are told of, H hidden, v values in question, k
experts of a row, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.parity.metrics import row_errors
from trt_eagle3.parity.reference.expected import ExpectedAnswer, input_embeds
from trt_eagle3.parity.reference.routing import RouterChoice, Routes
from trt_eagle3.parity.reference.target import TargetLayer, TargetReference, add_visual_level
from trt_eagle3.parity.reference.target_rows import RouterSlack, run_layers

__all__ = ["RouteSearch", "Told", "tell_aux", "tell_logits"]

MOST_OFF = 0.25
"""The share of an answer's rows that may be out of tolerance and still be searched.

Rounding turns few: 1 % of the trained mixture's rows where router logits err by 0.003 of their
size, as float16's do. A fault of the router, of an expert or of what is told puts most rows off.
"""
_MOST_BRANCHES = 32
"""Choices of a row at once; those that turn one layer come first."""


@dataclass(frozen=True)
class Told:
    """What an engine tells of some rows behind a layer.

    Attributes:
        layer: behind which. rows: int64 [m]. aux: which of ``ExpectedAnswer.aux``; None: logits.
        excess: from rows int64 [v] and what is expected of them [v, ...] to float64 [v]: how far
            the engine is from that, over the tolerance.
    """

    layer: int
    rows: Tensor
    aux: int | None
    excess: Callable[[Tensor, Tensor], Tensor]

    def off(self, e: ExpectedAnswer) -> Tensor:
        """bool [m]: rows out of tolerance."""
        first = e.answer.prompt_len - 1
        outputs = e.logits[self.rows - first] if self.aux is None else e.aux[self.aux][self.rows]
        return self.excess(self.rows, outputs) > 1


def tell_aux(
    manifest: DraftManifest, num_layers: int, values: Tensor, tolerance: float
) -> list[Told]:
    """Of aux hidden states [m, k * H] of the first m rows."""
    parts = values.chunk(len(manifest.aux_layers), dim=-1)
    rows = torch.arange(len(values))
    return [
        Told(min(k, num_layers - 1), rows, k, _row_excess(part, rows, tolerance))
        for k, part in zip(manifest.aux_layers, parts, strict=True)
    ]


def tell_logits(
    num_layers: int,
    rows: Tensor,
    values: Tensor,
    tolerance: float,
    columns: Tensor | None = None,
) -> Told:
    """Of logits [m, V] of ``rows``, ascending; ``columns``: those that were kept of them."""
    return Told(num_layers - 1, rows, None, _row_excess(values, rows, tolerance, columns))


def _row_excess(
    values: Tensor, rows: Tensor, tolerance: float, columns: Tensor | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
    def excess(wanted: Tensor, outputs: Tensor) -> Tensor:
        kept = outputs.cpu() if columns is None else outputs.cpu()[:, columns]
        return row_errors(values[torch.searchsorted(rows, wanted)], kept) / tolerance

    return excess


class RouteSearch:
    """Follows engines through ``reference``.

    ``slack.output`` says which choices are open, as of ``Routes``: a router logit is a product of
    the row, so two of them are off by as much of their size as the row is, and end to end that may
    be the tolerance ``layer_output``.
    """

    def __init__(
        self, reference: TargetReference, manifest: DraftManifest | None, slack: RouterSlack
    ) -> None:
        self.reference, self._manifest, self._slack = reference, manifest, slack

    @property
    def num_layers(self) -> int:
        """Of the target."""
        return self.reference.num_layers

    def follow(
        self, expected: Sequence[ExpectedAnswer], told: Sequence[Sequence[Told]]
    ) -> list[ExpectedAnswer]:
        """Each answer as it is expected along the experts that explain what was ``told`` of it;
        the answer itself where nothing is out of tolerance, or too much.
        """
        pairs = list(zip(expected, told, strict=True))
        searches = {i: self._search(e, some) for i, (e, some) in enumerate(pairs) if _few(e, some)}
        if not searches:
            return list(expected)
        with torch.no_grad():
            for layer in self.reference.layers():
                for search in searches.values():
                    search.run(layer)
        followed = {i: search.followed() for i, search in searches.items()}
        rows = [*followed.values()]
        run_layers(self.reference, rows, self._manifest, lambda: None, self._slack)
        return [followed.get(i, e) for i, e in enumerate(expected)]

    def _search(self, e: ExpectedAnswer, told: Sequence[Told]) -> _Search:
        return _Search(self.reference, self._manifest, self._slack.output, e, told)


def _few(e: ExpectedAnswer, told: Sequence[Told]) -> bool:
    """Whether some rows are out of tolerance, and not too many of those that are told of."""
    rows = {row for some in told for row in some.rows.tolist()}
    off = {row for some in told for row in some.rows[some.off(e)].tolist()}
    return 0 < len(off) <= MOST_OFF * len(rows)


@dataclass(frozen=True)
class _Branch:
    """A row under another choice.

    Attributes:
        hidden: [H], after the layers that have run. experts: int64 [k] by layer, where it chose
            otherwise.
    """

    hidden: Tensor
    experts: Mapping[int, Tensor]


@dataclass
class _Search:
    """One answer on its way through the layers.

    Attributes:
        hidden: [n, H], after the layers that have run, along the ``experts`` found.
        branches: by row that is off, since the last layer behind which the engine tells of it.
    """

    reference: TargetReference
    manifest: DraftManifest | None
    slack: float
    expected: ExpectedAnswer
    told: Sequence[Told]
    hidden: Tensor = field(init=False)
    experts: dict[int, Tensor] = field(default_factory=dict)
    branches: dict[int, list[_Branch]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        e = self.expected
        self.hidden = input_embeds(self.reference, e, e.vision)
        self._rope = self.reference.rope(e.positions[:-1].T)
        self._off = {
            layer: {row for t in self._told_behind(layer) for row in t.rows[t.off(e)].tolist()}
            for layer in {t.layer for t in self.told}
        }

    def run(self, layer: TargetLayer) -> None:
        """Go on by one layer."""
        before, choice = self._run(layer, self.hidden, self.expected.taken.get(layer.index))
        if choice is not None:
            self.experts[layer.index] = choice.taken.clone()
        for row in self._rows_off_behind(layer.index):
            self.branches[row] = self._grow(layer, row, choice)
        e = self.expected
        self.hidden = add_visual_level(before, e.levels, layer.index, e.answer.visual_rows)
        self._add_levels(self.hidden - before)
        if self._told_behind(layer.index):
            self._choose(layer.index, before)

    def followed(self) -> ExpectedAnswer:
        """The answer, to be computed along the experts that were found."""
        return replace(
            self.expected,
            intermediates={},
            experts=self.experts,
            taken={},
            aux={},
            layer_errors=[],
            step_errors=[],
        )

    def _told_behind(self, layer: int) -> list[Told]:
        return [t for t in self.told if t.layer == layer]

    def _rows_off_behind(self, layer: int) -> list[int]:
        """Those that are out of tolerance wherever the engine tells of them from here on."""
        later = [rows for k, rows in self._off.items() if k >= layer]
        return sorted(set[int]().union(*later))

    def _run(
        self, layer: TargetLayer, hidden: Tensor, experts: Tensor | None
    ) -> tuple[Tensor, RouterChoice | None]:
        """The layer's output of the first rows, along ``experts`` where those are open."""
        cos, sin = self._rope
        rope = cos[:, : len(hidden)], sin[:, : len(hidden)]
        routes = None if experts is None else Routes(experts[: len(hidden)], self.slack)
        with layer.routed(routes) as choices:
            found = layer(hidden, rope)
        return found, next(iter(choices), None)

    def _grow(self, layer: TargetLayer, row: int, choice: RouterChoice | None) -> list[_Branch]:
        """The branches of a row, one layer on: those that it had, then new ones."""
        main = _Branch(self.hidden[row], {})
        had, new = [], [*self._branch_off(layer, row, main, choice)]
        for branch in self.branches.get(row, []):
            taken = self.expected.taken.get(layer.index)
            found, theirs = self._run(layer, self._given(row, branch), taken)
            had.append(replace(branch, hidden=found[-1]))
            new += self._branch_off(layer, row, branch, theirs)
        return [*had, *new][:_MOST_BRANCHES]

    def _branch_off(
        self, layer: TargetLayer, row: int, branch: _Branch, choice: RouterChoice | None
    ) -> Iterator[_Branch]:
        """The branch through what it might have chosen in the place of its ``choice``."""
        if choice is None:
            return
        for experts in choice.alternatives(row, self.slack):
            given = self._given(row, branch)
            taken = choice.taken[: len(given)].clone()
            taken[-1] = experts
            found, _ = self._run(layer, given, taken)
            yield _Branch(found[-1], {**branch.experts, layer.index: experts})

    def _given(self, row: int, branch: _Branch) -> Tensor:
        """[row + 1, H]: the rows before, and the branch for the row itself."""
        return torch.cat([self.hidden[:row], branch.hidden[None]])

    def _add_levels(self, added: Tensor) -> None:
        """Of the visual level what a row gets, its branches get."""
        for row, branches in self.branches.items():
            self.branches[row] = [replace(b, hidden=b.hidden + added[row]) for b in branches]

    def _choose(self, layer: int, before: Tensor) -> None:
        """Of each row that is told of behind ``layer`` the branch that explains it best."""
        added, self.hidden = self.hidden - before, self.hidden.clone()
        rows = {row for told in self._told_behind(layer) for row in told.rows.tolist()}
        for row in rows & self.branches.keys():
            branches = self.branches.pop(row)
            hidden = torch.stack([self.hidden[row], *(b.hidden for b in branches)])
            excess = self._excess(layer, row, hidden - added[row], hidden)
            best = int(excess.argmin())
            if best:
                self.hidden[row] = hidden[best]
                for k, experts in branches[best - 1].experts.items():
                    self.experts[k][row] = experts

    def _excess(self, layer: int, row: int, before: Tensor, after: Tensor) -> Tensor:
        """float64 [v]: of all that is told of the row, the worst; ``before``: any visual level."""
        found = torch.zeros(len(after), dtype=torch.float64)
        rows = torch.full((len(after),), row)
        for told in self._told_behind(layer):
            if row in told.rows:
                outputs = self._outputs(told, before, after)
                found = torch.maximum(found, told.excess(rows, outputs))
        return found

    def _outputs(self, told: Told, before: Tensor, after: Tensor) -> Tensor:
        """What is told of, as it is expected of rows with these outputs of the layer."""
        if told.aux is None:
            return self.reference.head(self.reference.norm(after)).float()
        if self.manifest is not None and self.manifest.takes_normed:
            return self.reference.norm(after)
        pre = self.manifest is not None and self.manifest.aux_pre_deepstack
        return before if pre else after
