"""A vision tower of transformers with streamed weights and recorded tensors.

Parts are loaded and released one by one. Tensors are named as in the vision graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

__all__ = ["Place", "keep_tensors", "split_grids", "stream_parts"]

Place = tuple[str, bool]
"""A module below a block of the tower, and whether its input is kept instead of its output."""


def stream_parts(
    parts: Iterable[tuple[nn.Module, str]], fill: Callable[[nn.Module, str], None]
) -> None:
    """Load each module when it is called, and release its weights afterwards.

    Args:
        parts: modules on the meta device, and the prefix of their tensors.
        fill: loads a module's weights (``TargetReference.fill``).
    """
    for module, prefix in parts:
        _stream(module, prefix, fill)


def _stream(module: nn.Module, prefix: str, fill: Callable[[nn.Module, str], None]) -> None:
    def load(*_: Any) -> None:
        fill(module, prefix)

    def drop(*_: Any) -> None:
        module.to_empty(device="meta")

    module.register_forward_pre_hook(load)
    module.register_forward_hook(drop)


def keep_tensors(
    tower: nn.Module, names: Sequence[str], places: Mapping[str, Place], blocks: str = "blocks"
) -> dict[str, Tensor]:
    """Return a dict that a run of ``tower`` fills with tensors [n, ...].

    Args:
        names: names in the vision graph (``blocks.3.attn.qkv``).
        places: the last parts of a name (``attn.qkv``) or all of it (``embeddings``) -> its module.
        blocks: name of the tower's list of blocks.
    """
    found: dict[str, Tensor] = {}
    for name in names:
        owner, last = tower, name
        if name.startswith("blocks."):
            _, index, last = name.split(".", 2)
            owner = tower.get_submodule(f"{blocks}.{index}")
        place, of_input = places[last]
        module = owner.get_submodule(place) if place else owner
        module.register_forward_hook(_keeper(name, found, of_input=of_input))
    return found


def _keeper(name: str, found: dict[str, Tensor], *, of_input: bool) -> Callable[..., None]:
    def keep(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        kept = inputs[0] if of_input else output
        found[name] = (kept if kept.ndim == 2 else kept.flatten(0, -2)).cpu()

    return keep


def split_grids(kinds: Tensor, grid_thw: Tensor, merge: int) -> tuple[list[int], list[int]]:
    """Return the indices of image grids and of video grids; the runs of pad tokens decide.

    Args:
        kinds: int [S]: 0 text, 1 image, 2 video, of each token of the prompt.
        grid_thw: grids in prompt order.
    """
    visual = kinds[kinds > 0].tolist()
    images: list[int] = []
    videos: list[int] = []
    for number, (t, h, w) in enumerate(grid_thw.tolist()):
        (images if visual[0] == 1 else videos).append(number)
        visual = visual[t * h * w // merge**2 :]
    return images, videos
