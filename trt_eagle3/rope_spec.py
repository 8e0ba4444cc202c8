"""What a rotary embedding is, as frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trt_eagle3.errors import UserError, quote

__all__ = ["RopeLayout", "RopeSpec"]

RopeLayout = Literal["1d", "chunked", "interleaved"]


@dataclass(frozen=True)
class RopeSpec:
    """Which angle each pair of a head's channels turns by.

    Attributes:
        layout: how the pairs are dealt to the temporal, height and width axes. ``chunked`` is
            Qwen2-VL's (first the temporal pairs, then height, then width); ``interleaved`` is
            Qwen3-VL's (T H W T H W ..., the rest T).
        sections: pairs per axis (T, H, W); sums to the number of pairs. Empty for ``1d``.
        inv_freq: float32 radians per position, one per pair: head_dim / 2, or fewer where
            only the first channels turn.
        attention_scaling: factor on cos and sin (1 except for yarn).
        kind: the name of the frequency schedule it was made from (``default``, ``linear``,
            ``dynamic``, ``llama3``, ``yarn``).
        base: the schedule's theta.
        parameters: the schedule's other numbers, as a config spells them (``factor``,
            ``beta_fast``, ...).
    """

    layout: RopeLayout
    sections: tuple[int, ...]
    inv_freq: tuple[float, ...]
    attention_scaling: float = 1.0
    kind: str = "default"
    base: float = 10000.0
    parameters: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.layout == "1d":
            if self.sections:
                raise UserError(
                    f"rope: a 1d layout has no sections, got {quote(list(self.sections))}"
                )
        elif len(self.sections) != 3 or sum(self.sections) != len(self.inv_freq):
            raise UserError(
                f"rope: mrope_section {quote(list(self.sections))}: expected 3 counts that sum to "
                f"half of the channels that turn, {len(self.inv_freq)}"
            )

    @classmethod
    def plain(
        cls, head_dim: int, base: float, layout: RopeLayout = "1d", sections: tuple[int, ...] = ()
    ) -> RopeSpec:
        """The unscaled schedule ``base ** (-2 i / head_dim)``."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        inv_freq = np.float32(1.0) / np.float32(base) ** exponents
        return cls(layout, sections, tuple(float(f) for f in inv_freq), base=base)

    @property
    def axis_of_pair(self) -> NDArray[np.int64]:
        """int64, one per pair: 0, 1, 2 = the temporal, height or width position that turns the
        pair.

        Interleaved: pair i takes H if ``i % 3 == 1 and i < 3 * sections[1]``, W if ``i % 3 == 2 and
        i < 3 * sections[2]``, else T (transformers,
        ``Qwen3VLTextRotaryEmbedding.apply_interleaved_mrope``).
        """
        pairs = len(self.inv_freq)
        axis = np.zeros(pairs, dtype=np.int64)
        if self.layout == "chunked":
            axis = np.repeat(np.arange(3), self.sections)
        elif self.layout == "interleaved":
            for a in (1, 2):
                axis[a : 3 * self.sections[a] : 3] = a
        return axis
