"""Read the experts of a layer, in every layout on disk, as one weight: ``ExpertsRef``.

Layouts of a projection [E, out, in], by canonical name after ``layers.N.mlp.experts.``:
- ``gate_up_proj``, ``down_proj``: stacked, [E, out, in] as in transformers 5's memory, or
  [E, in, out] as Qwen3-VL-MoE was published; gate comes first. FP8 stacks have
  ``gate_up_proj_scale_inv``, one scale per block, in the same order.
- ``7.gate_proj.weight``, ``7.up_proj.weight``, ``7.down_proj.weight``: one by one, dense or
  quantised, as Qwen3-MoE was published.

Shapes: E experts, I inner width, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trt_eagle3.checkpoint.quantised.scales import check_scale
from trt_eagle3.checkpoint.quantised.weight import QuantisedRef, quantised_ref
from trt_eagle3.checkpoint.tensor_index import FLOAT_DTYPES, TensorRef
from trt_eagle3.errors import UserError, clip
from trt_eagle3.spec import LayerSpec, SparseMoe

__all__ = ["ExpertsRef", "gather_experts", "matrices"]

_EXPERTS = "mlp.experts."
_STACKED = ("gate_up_proj", "down_proj")
_SCALE = "_scale_inv"
_FP8 = "F8_E4M3"
Block = tuple[int, int]


@dataclass(frozen=True)
class ExpertsRef(TensorRef):
    """A projection [E, out, in] of all experts of a layer.

    The fields of ``TensorRef`` describe its first part, except ``num_bytes``, which counts all
    parts, and ``shape``.

    Attributes:
        parts: matrices whose concatenated rows are those of all experts.
        transposed: whether each part is one expert, stored as [in, out].
    """

    parts: tuple[TensorRef, ...]
    transposed: bool = False

    @classmethod
    def of(
        cls, shape: tuple[int, ...], parts: Sequence[TensorRef], *, transposed: bool = False
    ) -> ExpertsRef:
        """Create the projection of ``shape`` from ``parts``."""
        first, size = parts[0], sum(part.num_bytes for part in parts)
        place = (first.name, first.file, first.offset, size, first.dtype)
        return cls(*place, shape, tuple(parts), transposed)

    @property
    def stored(self) -> tuple[TensorRef, ...]:
        """Every tensor on disk that the projection is read from."""
        return tuple(stored for part in self.parts for stored in part.stored)


def matrices(refs: Iterable[TensorRef]) -> list[TensorRef]:
    """Replace the experts among ``refs`` by their parts."""
    found: list[TensorRef] = []
    for ref in refs:
        found += ref.parts if isinstance(ref, ExpertsRef) else [ref]
    return found


def gather_experts(
    tensors: Mapping[str, TensorRef],
    layers: Sequence[LayerSpec],
    hidden: int,
    directory: Path,
    block: Block | None = None,
) -> dict[str, TensorRef]:
    """Return ``tensors`` (by canonical name) with each sparse layer's experts as two weights.

    Args:
        hidden: H.
        block: rows and columns of [out, in] that share a scale of stacked FP8 experts.
    Raises:
        UserError: experts have two layouts, a stack's shape matches neither layout or both, an
            expert is missing, or scales do not fit.
    """
    made = dict(tensors)
    for i, layer in enumerate(layers):
        if isinstance(layer.mlp, SparseMoe):
            found = _Experts(f"layers.{i}.{_EXPERTS}", made, layer.mlp, hidden, directory, block)
            made = {**found.others, **found.weights()}
    return made


@dataclass(frozen=True)
class _Experts:
    """The experts of one layer."""

    prefix: str
    tensors: Mapping[str, TensorRef]
    moe: SparseMoe
    hidden: int
    directory: Path
    block: Block | None

    @property
    def own(self) -> dict[str, TensorRef]:
        """The tensors of this layer's experts, without the prefix."""
        start = self.prefix
        return {n.removeprefix(start): r for n, r in self.tensors.items() if n.startswith(start)}

    @property
    def others(self) -> dict[str, TensorRef]:
        """All tensors that are not of this layer's experts."""
        used = {f"{self.prefix}{name}" for name in self._used}
        return {name: ref for name, ref in self.tensors.items() if name not in used}

    @property
    def _used(self) -> list[str]:
        """Names of the layer's tensors in its layout. Any other name is surplus."""
        if self._is_stacked:
            return [*_STACKED, *(f"{name}{_SCALE}" for name in _STACKED)]
        kinds = ("gate", "up", "down")
        return [f"{e}.{kind}_proj.weight" for e in range(self.moe.num_experts) for kind in kinds]

    @property
    def _is_stacked(self) -> bool:
        return any(name in self.own for name in _STACKED)

    def weights(self) -> dict[str, TensorRef]:
        """Return ``gate_up_proj`` [E, 2 I, H] and ``down_proj`` [E, H, I], by canonical name."""
        own = self.own
        single = next((n for n in own if n[:1].isdigit()), None)
        if self._is_stacked and single is not None:
            raise UserError(
                f"{self.directory}: {clip(self.prefix)}: experts are stored in two layouts at "
                f"once, stacked and one by one ({clip(single)}). Use the checkpoint's own files "
                "alone."
            )
        made = self._stacked(own) if self._is_stacked else self._single(own)
        return {f"{self.prefix}{name}": ref for name, ref in made.items()}

    def _single(self, own: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
        inner, experts = self.moe.expert_width, range(self.moe.num_experts)
        shapes = {"gate": (inner, self.hidden), "up": (inner, self.hidden)}
        shapes["down"] = (self.hidden, inner)
        for expert in experts:
            for kind, shape in shapes.items():
                self._check(own, f"{expert}.{kind}_proj.weight", [shape], FLOAT_DTYPES)
        gate_up = [own[f"{e}.{kind}_proj.weight"] for e in experts for kind in ("gate", "up")]
        down = [own[f"{e}.down_proj.weight"] for e in experts]
        return {
            "gate_up_proj": ExpertsRef.of(self._shapes["gate_up_proj"], gate_up),
            "down_proj": ExpertsRef.of(self._shapes["down_proj"], down),
        }

    @property
    def _shapes(self) -> dict[str, tuple[int, int, int]]:
        count, inner = self.moe.num_experts, self.moe.expert_width
        return {
            "gate_up_proj": (count, 2 * inner, self.hidden),
            "down_proj": (count, self.hidden, inner),
        }

    def _stacked(self, own: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
        layouts = {}
        for name, (count, rows, columns) in self._shapes.items():
            both = [(count, rows, columns), (count, columns, rows)]
            self._check(own, name, both)
            if rows == columns:
                raise UserError(
                    f"{self.directory}: {clip(own[name].name)}: {list(both[0])} is the shape of "
                    "both [experts, out, in] and [experts, in, out], so it is ambiguous. Save "
                    "one tensor for each expert."
                )
            layouts[name] = own[name].shape == both[1]
        if len(set(layouts.values())) > 1:
            shapes = " and ".join(f"{n} {list(own[n].shape)}" for n in layouts)
            raise UserError(
                f"{self.directory}: {clip(self.prefix)}: {shapes}: one is [experts, out, in], "
                "the other [experts, in, out]. Use the checkpoint's own files alone."
            )
        return {n: self._stack(n, own, transposed=layout) for n, layout in layouts.items()}

    def _stack(self, name: str, own: Mapping[str, TensorRef], *, transposed: bool) -> ExpertsRef:
        ref, shape = own[name], self._shapes[name]
        if ref.dtype == _FP8:
            parts = self._fp8(name, own, transposed=transposed)
        elif transposed:
            parts = _slices(ref)
        else:
            parts = [replace(ref, shape=(shape[0] * shape[1], shape[2]))]
        return ExpertsRef.of(shape, parts, transposed=transposed)

    def _fp8(self, name: str, own: Mapping[str, TensorRef], *, transposed: bool) -> list[TensorRef]:
        """Return a quantised matrix of each expert, as stored."""
        count, *sizes = own[name].shape
        shape = (sizes[0], sizes[1])
        block = self.block or self._shapes[name][1:]
        block = (block[1], block[0]) if transposed else (block[0], block[1])
        grid = [-(-n // b) for n, b in zip(shape, block, strict=True)]
        self._check(own, f"{name}{_SCALE}", [(count, *grid)])
        scale = own[f"{name}{_SCALE}"]
        check_scale(scale, self.directory)
        codes, scales = _slices(own[name]), _slices(scale)
        return [
            quantised_ref(
                "fp8", shape, block, {"codes": c, "scale": s}, self.directory, fp8_activations=True
            )
            for c, s in zip(codes, scales, strict=True)
        ]

    def _check(
        self,
        own: Mapping[str, TensorRef],
        name: str,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[str] = (*FLOAT_DTYPES, _FP8),
    ) -> None:
        full = f"{clip(self.prefix)}{name}"
        if name not in own:
            raise UserError(
                f"{self.directory}: {full} missing; its config has {self.moe.num_experts} "
                "experts. Use the whole checkpoint."
            )
        ref = own[name]
        if ref.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise UserError(
                f"{self.directory}: {full}: expected shape {wanted} by config.json, got "
                f"{list(ref.shape)} in {ref.file.name}"
            )
        if ref.dtype not in dtypes and not isinstance(ref, QuantisedRef):
            raise UserError(
                f"{self.directory}: {full}: expected one of {', '.join(dtypes)}, got "
                f"{ref.dtype}: not supported. Use the 16-bit checkpoint."
            )


def _slices(ref: TensorRef) -> list[TensorRef]:
    """Split a stacked tensor [E, ...] into its matrices."""
    count, *shape = ref.shape
    size = ref.num_bytes // count
    return [
        replace(
            ref,
            name=f"{ref.name}[{e}]",
            offset=ref.offset + e * size,
            num_bytes=size,
            shape=tuple(shape),
        )
        for e in range(count)
    ]
