"""Resolve what a block draft has beside its rows: convolutions, selector, sequential heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trt_eagle3.checkpoint.config_value import Kind
from trt_eagle3.checkpoint.resolved_fields import ResolvedFields
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.drafts.block.manifest import ConfidenceHead, MarkovHead
from trt_eagle3.drafts.block.names import SECTIONS, Method
from trt_eagle3.errors import clip

__all__ = ["places", "resolve_heads", "resolve_method"]

_CONV = "layers.0.attention_conv."
_SELECTOR = "candidate_selector."
_MARKOV = "markov_head."
_CONFIDENCE = "confidence_head.proj.weight"
_OF_DFLASH2 = (_CONV, "layers.0.mlp_conv.", _SELECTOR)
_OF_DSPARK = (_MARKOV, "confidence_head.")


def places(fields: ResolvedFields, key: str, kind: Kind) -> dict[str, Any]:
    """Return the values of a method's key by the places where it may stand."""
    dotted = [f"{section}.{key}" if section else key for section in SECTIONS]
    return {place: fields.files.find(place, kind) for place in dotted}


def resolve_method(fields: ResolvedFields, named: Method, place: str) -> None:
    """Put ``method``, which the tensors determine.

    Args:
        named: the method that the config names, at ``place``.
    Raises:
        UserError: the tensors are those of another method.
    """
    of_dflash2, of_dspark = (_first(fields, p) for p in (_OF_DFLASH2, _OF_DSPARK))
    for other, ref in (("dflash2", of_dflash2), ("dspark", of_dspark)):
        if ref is not None and other != named:
            raise fields.error(
                f"{clip(ref.name)} is a tensor of {other}, but config.json names {named} "
                f"({place}). Read so, the draft would be accepted less. Correct config.json."
            )
    if named == "dflash2" and of_dflash2 is None:
        raise fields.error(
            f"{_SELECTOR}hidden_projection.weight and {_CONV}base_kernel are missing, but "
            f"config.json names dflash2 ({place}). Use the whole checkpoint."
        )
    if named == "dspark" and of_dspark is None:
        fields.put("method", "dflash", "tensor", f"{place}, but no markov or confidence head")
    fields.put("method", named, "config", place)


def _first(fields: ResolvedFields, prefixes: tuple[str, ...]) -> TensorRef | None:
    return next((r for n, r in fields.files.tensors.items() if n.startswith(prefixes)), None)


def resolve_heads(fields: ResolvedFields) -> None:
    """Put the fields of convolutions, selector, markov and confidence head.

    Raises:
        UserError: the config contradicts the tensors, or a value is missing.
    """
    _convolutions(fields)
    _selector(fields)
    for field, read, name in (
        ("markov", _markov, f"{_MARKOV}markov_w1.weight"),
        ("confidence", _confidence, _CONFIDENCE),
    ):
        there = "there" if name in fields.files.tensors else "absent"
        fields.put(field, read(fields), "tensor", f"{name} is {there}")


def _matrix(fields: ResolvedFields, name: str, dimensions: int = 2) -> TensorRef:
    """Return a tensor of the draft after checking that it has so many dimensions."""
    ref = fields.files.tensors.get(name)
    if ref is None:
        raise fields.error(f"{name} is missing. Use the whole checkpoint.")
    if len(ref.shape) != dimensions or 0 in ref.shape:
        raise fields.error(
            f"{clip(ref.name)}: expected {dimensions} dimensions, got shape {list(ref.shape)}. "
            "Use the whole checkpoint."
        )
    return ref


def _agree(fields: ResolvedFields, field: str, key: str, found: Mapping[str, int]) -> None:
    """Put a size that tensors determine after checking that no place contradicts them."""
    told = {f"config.json {place}": n for place, n in places(fields, key, "whole").items()}
    value = fields.agree(field, {**found, **told})
    assert value is not None
    fields.put(field, value[0], "tensor", value[1])


def _convolutions(fields: ResolvedFields) -> None:
    if _first(fields, (_CONV,)) is None:
        for field in ("conv_kernel", "conv_group"):
            fields.put(field, 0, "tensor", f"{_CONV}base_kernel is absent")
        return
    base = _matrix(fields, f"{_CONV}base_kernel", 3)
    rows = _matrix(fields, f"{_CONV}kernel_projection.weight").shape[0]
    taps, hidden = base.shape[1], fields.values["hidden_size"]
    groups = rows // (2 * taps)
    if rows % (2 * taps) or not groups or hidden % groups:
        raise fields.error(
            f"{_CONV}kernel_projection.weight: {rows} rows are not 2 sides of {taps} taps of equal "
            f"groups of {hidden} channels. Use the whole checkpoint."
        )
    _agree(fields, "conv_kernel", "conv_kernel_size", {base.name: taps})
    detail = f"{_CONV}kernel_projection.weight"
    _agree(fields, "conv_group", "conv_group_size", {detail: hidden // groups})


def _selector(fields: ResolvedFields) -> None:
    if _first(fields, (_SELECTOR,)) is None:
        for field in ("selector_rank", "selector_top_k"):
            fields.put(field, 0, "tensor", f"{_SELECTOR}* is absent")
        return
    books = ("predecessor_codebook", "successor_codebook")
    ranks = {f"{_SELECTOR}{name}": _matrix(fields, f"{_SELECTOR}{name}").shape[1] for name in books}
    projection = _matrix(fields, f"{_SELECTOR}hidden_projection.weight")
    _agree(
        fields, "selector_rank", "selector_rank", {**ranks, projection.name: projection.shape[0]}
    )
    found = fields.agree("selector_top_k", places(fields, "selector_top_k", "whole"))
    if found:
        fields.put("selector_top_k", found[0], "config", found[1])
    top_k, vocab = fields.values.get("selector_top_k"), fields.values["draft_vocab_size"]
    if top_k is None or not 0 < top_k <= vocab:
        raise fields.error(
            f"selector_top_k: expected 1 to {vocab} candidates, got {top_k}. Correct config.json, "
            "or set draft.overrides.selector_top_k."
        )


def _markov(fields: ResolvedFields) -> MarkovHead | None:
    rank = fields.agree("markov", places(fields, "markov_rank", "whole"))
    there = f"{_MARKOV}markov_w1.weight" in fields.files.tensors
    if not there:
        if rank and rank[0]:
            raise fields.error(
                f"{_MARKOV}markov_w1.weight is missing, but {rank[1]} is {rank[0]}. Use the whole "
                "checkpoint."
            )
        return None
    width = _matrix(fields, f"{_MARKOV}markov_w1.weight").shape[1]
    if rank and rank[0] != width:
        raise fields.error(
            f"{rank[1]}: {rank[0]} in config.json, {_MARKOV}markov_w1.weight has {width} columns. "
            "Correct config.json."
        )
    tensors = fields.files.tensors
    gated, rnn = (f"{_MARKOV}{p}_proj.weight" in tensors for p in ("gate", "joint"))
    form: Any = "rnn" if rnn else "gated" if gated else "vanilla"
    told = fields.agree("markov", places(fields, "markov_head_type", "text"))
    if told and told[0].lower() != form:
        raise fields.error(
            f"{told[1]}: {clip(told[0], 80)} in config.json, the tensors are those of a {form} "
            "markov head. Correct config.json, or use the whole checkpoint."
        )
    # in training, the state of an rnn passes row 0 even if its output is not used
    return MarkovHead(form=form, rank=width, state_from_anchor=form == "rnn")


def _confidence(fields: ResolvedFields) -> ConfidenceHead | None:
    keys = ("enable_confidence_head", "use_confidence_head")
    told = {p: on for key in keys for p, on in places(fields, key, "flag").items()}
    enabled = fields.agree("confidence", told)
    there = _CONFIDENCE in fields.files.tensors
    if enabled and enabled[0] != there:
        raise fields.error(
            f"{enabled[1]} is {enabled[0]} in config.json, {_CONFIDENCE} is "
            f"{'there' if there else 'absent'}. Correct config.json, or use the whole checkpoint."
        )
    if not there:
        return None
    width, hidden = _matrix(fields, _CONFIDENCE).shape[1], fields.values["hidden_size"]
    markov = fields.values["markov"]
    with_markov = markov is not None and width == hidden + markov.rank
    if not with_markov and width != hidden:
        rank = f" or {hidden + markov.rank}" if markov else ""
        raise fields.error(
            f"{_CONFIDENCE}: expected {hidden}{rank} columns, got {width}. Use the whole "
            "checkpoint."
        )
    joined = fields.agree("confidence", places(fields, "confidence_head_with_markov", "flag"))
    if joined and joined[0] != with_markov:
        raise fields.error(
            f"{joined[1]} is {joined[0]} in config.json, {_CONFIDENCE} has {width} columns for a "
            f"hidden size of {hidden}. Correct config.json."
        )
    return ConfidenceHead(with_markov=with_markov, temperatures=())
