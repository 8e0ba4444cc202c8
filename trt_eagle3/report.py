"""What the commands print: plain values for JSON, lines and tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from trt_eagle3.checkpoint.manifest import DraftManifest, manifest_to_dict
from trt_eagle3.checkpoint.target import TargetSpec, target_to_dict

if TYPE_CHECKING:  # they import torch, which `--help` should not wait for
    from trt_eagle3.decode.engine import Generation
    from trt_eagle3.pipeline import BuildReport

__all__ = ["build", "build_lines", "generation_line", "inspection", "inspection_tables"]


def inspection(spec: TargetSpec, manifest: DraftManifest | None) -> dict[str, Any]:
    """What ``inspect --json`` prints."""
    return {
        "target": {"path": str(spec.path), **target_to_dict(spec)},
        "draft": None if manifest is None else {"path": str(manifest.path), **manifest_to_dict(manifest)},
    }


def inspection_tables(spec: TargetSpec, manifest: DraftManifest | None) -> list[Table]:
    """One table per checkpoint: its facts by name."""
    tables = [_facts(f"target {spec.path}", target_to_dict(spec))]
    if manifest:
        tables.append(_facts(f"draft {manifest.path}", manifest_to_dict(manifest)))
    return tables


def _facts(title: str, facts: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    for name, value in _flat(facts):
        table.add_row(name, value)
    return table


def _flat(facts: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for name, value in facts.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple) and len(value) > 8:
            rows.append((prefix + name, f"{len(value)} values, {value[0]:g} ... {value[-1]:g}"))
        else:
            rows.append((prefix + name, str(value)))
    return rows


def build(result: BuildReport) -> dict[str, Any]:
    """What ``build --json`` prints."""
    return {
        "bundle": str(result.path),
        "num_bytes": result.num_bytes,
        "seconds": dict(result.seconds),
        "weights": list(result.placed),
    }


def build_lines(result: BuildReport) -> list[str]:
    """Where it is, how big, how long, and what to do next."""
    stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in result.seconds.items())
    placed = f" (weights by {' and '.join(result.placed)})" if result.placed else " (weights by reference)"
    return [
        f"built {result.path}: {result.num_bytes / 1e6:.1f} MB{placed}",
        f"  {stages}",
        f'next: trt-eagle3 generate {result.path} "What do you see?" --image FILE --stats',
    ]


def generation_line(generation: Generation) -> str:
    """Speed and acceptance in one line."""
    parts = [f"{len(generation.token_ids)} tokens", f"first after {generation.time_to_first_token_ms:.0f} ms"]
    if generation.tokens_per_second is not None:
        parts.append(f"then {generation.tokens_per_second:.1f} tok/s")
    if generation.acceptance_length is not None:
        parts.append(f"acceptance length {generation.acceptance_length:.2f}")
    return ", ".join(parts)
