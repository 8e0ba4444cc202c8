"""One launch of each form of the kernels for packed weights, bytes, FP8 caches, experts and images,
for compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        python -m tests.plugins.sanitized

and with racecheck, synccheck and initcheck. Names of ``GROUPS`` after it: only these. Sizes are
small, most of them drawn on the CPU, so that hardly any kernel but ours runs; every allocation is
one of its own, so that its ends are known.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.graph.ops.gated_delta_case import chain, make_case
from tests.plugins import moe_case, vision_case
from tests.plugins.packed_case import KINDS, draw_weight
from tests.plugins.test_tree_attention_fp8 import draw_scales, narrowed
from tests.plugins.tree_case import Case, draw, run
from trt_eagle3.engine import capi
from trt_eagle3.engine.capi import AttentionPath, RowCodes
from trt_eagle3.engine.torch.moe import fused_moe
from trt_eagle3.engine.torch.packing import pack_fp8, pack_int8

CUDA = torch.device("cuda")
WEIGHT = (336, 768)  # N, K: no multiple of the tiles' 64, 128 and 192 rows
ROWS = (1, 9, 17, 33, 65)  # one of each form of the products
BYTE_ROWS = (7, 65, 129)
EXPERTS = (8, 256, 128)  # E, H, I
EXPERT_ROWS = (1, 6, 9, 40)  # a single row's lists, resident rows, streamed ones, two tiles of them
CASES = {
    "few": Case(lengths=((37, 1), (0, 1)), num_new=1, tail=1, heads=(8, 2)),
    "tree": Case(lengths=((300, 7), (5, 4)), num_new=7, tail=9, heads=(8, 2)),
    "window": Case(lengths=((300, 7), (5, 4)), num_new=7, tail=9, heads=(8, 2), window=70),
    "wide": Case(lengths=((150, 20),), num_new=20, tail=20, heads=(8, 2)),
    "prompt": Case(lengths=((16, 130),), num_new=130, tail=130, heads=(8, 2), chunk=True),
}

Check = tuple[str, Callable[[], Tensor]]


def packed_products() -> Iterator[Check]:
    """Each format, each form; and its unpacking."""
    for kind in KINDS:
        case = draw_weight(kind, *WEIGHT, CUDA)
        for rows in ROWS:
            x = torch.randn(rows, WEIGHT[1]).bfloat16().to(CUDA)
            out = torch.empty(rows, WEIGHT[0], dtype=x.dtype, device=CUDA)
            yield f"{kind}, {rows} rows", partial(case.linear, x, out, True)
        unpacked = torch.empty(WEIGHT, dtype=torch.bfloat16, device=CUDA)
        yield f"{kind}, unpacked", partial(case.unpack, unpacked)


def byte_products() -> Iterator[Check]:
    """Rows of bytes, of a tensor, of SiluMul and of AddRmsNorm; and their products."""
    n, k = WEIGHT
    scale = (torch.rand(n, 1) + 0.1).to(CUDA)
    weights = {
        False: pack_fp8(torch.randn(n, k).to(torch.float8_e4m3fn)).to(CUDA),
        True: pack_int8(torch.randint(0, 256, (n, k), dtype=torch.uint8)).to(CUDA),
    }
    for integers, weight in weights.items():
        for rows in BYTE_ROWS:
            x, gate_up = (torch.randn(rows, w).bfloat16().to(CUDA) for w in (k, 2 * k))
            made = {
                "rows": partial(capi.quantise_rows, x, integers=integers),
                "silu": partial(capi.quantise_silu_mul, gate_up, integers=integers),
                "norm": partial(_normed, x, integers=integers),
            }
            for name, make in made.items():
                what = f"{'int8' if integers else 'fp8'} bytes, {rows} rows, {name}"
                yield what, partial(_product, make, weight, scale)
    x = torch.randn(5, k).bfloat16().to(CUDA)
    yield "rounded", partial(capi.round_rows, x)
    yield "rounded by blocks", partial(capi.round_rows, x, blocks=True)


def _normed(x: Tensor, *, integers: bool) -> RowCodes:
    codes, _ = capi.quantise_add_rms_norm(x, x[0], x, epsilon=1e-6, integers=integers)
    return codes


def _product(make: Callable[[], RowCodes], weight: Tensor, scale: Tensor) -> Tensor:
    return capi.linear_w8a8(*make(), weight, scale, torch.bfloat16)


def fp8_attention() -> Iterator[Check]:
    """Each form of TreeAttention over FP8 caches."""
    for name, case in CASES.items():
        scales = draw_scales(case, CUDA)
        x = narrowed(draw(case, seed=1, device=CUDA), case, scales)
        out = torch.empty_like(x.q)
        yield f"attention, {name}", partial(run, case, x, out, kv_scales=scales)


def experts() -> Iterator[Check]:
    """FusedMoe of each format and form, and what prompts need beside stock products."""
    cpu = torch.device("cpu")
    for kind in moe_case.KINDS:
        case = moe_case.draw_experts(kind, *EXPERTS, torch.bfloat16, CUDA)
        for rows in EXPERT_ROWS:
            x = torch.randn(rows, EXPERTS[1]).bfloat16().to(CUDA)
            logits = moe_case.draw_logits("random", rows, EXPERTS[0], x.dtype, cpu).to(CUDA)
            yield (
                f"experts {kind}, {rows} rows",
                partial(case.gate_up.mixture, case.down, x, logits, 3, 1),
            )
        for rows, top_k in ((70, 2), (130, 3)):  # of few rows an expert, and of many
            x = torch.randn(rows, EXPERTS[1]).bfloat16().to(CUDA)
            logits = moe_case.draw_logits("random", rows, EXPERTS[0], x.dtype, cpu).to(CUDA)
            call = partial(fused_moe, top_k=top_k, renormalise=1)
            yield f"experts {kind}, {rows} rows", partial(call, x, logits, case.gate_up, case.down)


def images() -> Iterator[Check]:
    """VisionAttention by wgmma, by mma, and of a head_dim that neither takes."""
    forms = ((72, AttentionPath.AUTO), (72, AttentionPath.MMA), (60, AttentionPath.AUTO))
    for head_dim, path in forms:
        case = vision_case.Case(frames=(150, 64, 9), head_dim=head_dim)
        x = vision_case.draw(case, 1, CUDA)
        scale = head_dim**-0.5
        yield (
            f"images, head_dim {head_dim}, {path.name}",
            partial(
                capi.vision_attention, *x.tensors(), num_heads=case.heads, scale=scale, path=path
            ),
        )


def recurrent_layers() -> Iterator[Check]:
    """GatedDelta over trees and chains, by clusters of 2 and 4 and, in 16 bits, by tensor cores;
    commits of what it keeps.
    """
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows in (1, 6, 64, 70, 150):
            case = make_case([chain(rows)] * 2, [rows, 65 % rows], (1, 2), 4, 0, (128, 68), dtype)
            inputs, attributes = [x.to(CUDA) for x in case.inputs.values()], case.attributes
            for blocks in (0, 2, 4):
                name = f"gated delta, {rows} rows, {blocks} blocks"
                yield name, partial(_delta_rule, inputs, attributes, blocks)
            yield f"commits of {rows} rows", partial(_committed, inputs, attributes)


def _delta_rule(inputs: list[Tensor], attributes: dict[str, Any], blocks: int) -> Tensor:
    return capi.gated_delta(*inputs, **attributes, blocks_per_head=blocks)[0]


def _committed(inputs: list[Tensor], attributes: dict[str, Any]) -> Tensor:
    _, window, state, conv_rows, delta_rows = capi.gated_delta(*inputs, **attributes)
    path = torch.full((2, 5), -1, dtype=torch.int32)
    path[0, : min(3, conv_rows.shape[1] - 1)] = 0
    places = (inputs[9], path.to(CUDA))
    capi.commit_window(window[None], conv_rows[None], *places)
    capi.commit_delta(state[None], delta_rows[None], *places)
    return state


GROUPS = {
    "packed": packed_products,
    "bytes": byte_products,
    "attention": fp8_attention,
    "experts": experts,
    "images": images,
    "recurrent": recurrent_layers,
}


def main() -> None:
    torch.manual_seed(0)
    count = 0
    for group in sys.argv[1:] or GROUPS:
        for name, launch in GROUPS[group]():
            try:
                found = launch()
            except NotImplementedError:
                print(f"{name}: not on this chip")
                continue
            torch.cuda.synchronize()
            assert bool(found.cpu().isfinite().all()), name
            count += 1
    print(f"{count} launches, all finite")


if __name__ == "__main__":
    main()
