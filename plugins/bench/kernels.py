"""Times the kernels on this machine's GPU beside their floor and what stock torch takes.

    python plugins/bench/kernels.py [--tune]

Every figure is the median over replays of one CUDA graph that holds a launch per layer, each layer
with its own tensors (together several times the L2 cache), divided by the layers: what a launch
costs inside a decode step. The floor is the bytes that must move over the copy bandwidth of this
run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.timing import copy_bandwidth
from trt_eagle3.engine import capi
from trt_eagle3.io.run_command import run_command

HQ, HKV, D, PAGE = 32, 8, 128, 64
HIDDEN, INTERMEDIATE = 4096, 12288
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
BYTES = 2
BUDGET_BYTES = 3e9  # of caches per measurement

HEAD = (151936, 4096)
# [N, K]: qkv, o, gate and up, down, head
LINEARS = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), HEAD]
CHOICES = [
    (1, 151936, 1),
    (16, 151936, 1),
    (64, 151936, 1),
    (1, 32000, 1),
    (1, 32000, 10),
    (10, 32000, 10),
]

Launch = Callable[[], object]


@dataclass(frozen=True)
class Row:
    name: str
    floor_us: float
    stock: str
    stock_us: float
    ours_us: float
    note: str = ""

    def text(self) -> str:
        ratios = f"{self.ours_us / self.floor_us:5.2f} | {self.stock_us / self.ours_us:5.1f}"
        times = f"{self.floor_us:8.2f} | {self.stock_us:9.2f} | {self.ours_us:8.2f}"
        return (
            f"| {self.name:<42} | {times} | {ratios} | "
            f"{self.stock}{'; ' + self.note if self.note else ''} |"
        )


def time_us(launches: Sequence[Launch], replays: int = 25) -> float:
    """Median microseconds of one launch."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times)


def best_us(*alternatives: Callable[[], Sequence[Launch]]) -> float:
    """The fastest of several stock ways; a way that this torch refuses does not count."""
    times = []
    for alternative in alternatives:
        try:
            times.append(time_us(alternative(), replays=5))
        except RuntimeError:
            torch.cuda.synchronize()
    return min(times)


class Attention:
    """Tensors of TreeAttention for several layers:

    ``past`` cached rows and ``seq`` new ones per sequence.
    """

    def __init__(self, batch: int, past: int, seq: int, causal: bool = False) -> None:
        self.batch, self.past, self.seq, self.causal = batch, past, seq, causal
        self.length = past + seq
        pages = -(-self.length // PAGE)
        slots = (batch * pages + 1) * PAGE
        self.layers = int(max(2, min(36, BUDGET_BYTES // (2 * slots * HKV * D * BYTES))))
        order = torch.randperm(batch * pages, device=DEVICE) + 1
        self.page_table = order.view(batch, pages).to(torch.int32)
        self.past_lengths = torch.full((batch,), past, dtype=torch.int32, device=DEVICE)
        self.query_lengths = torch.full((batch,), seq, dtype=torch.int32, device=DEVICE)
        mask = torch.rand(batch, seq, seq, device=DEVICE) < 0.5
        self.mask = mask | torch.eye(seq, dtype=torch.bool, device=DEVICE)
        n = batch * seq
        self.q = [torch.randn(n, HQ * D, device=DEVICE, dtype=DTYPE) for _ in range(self.layers)]
        self.k = [torch.randn(n, HKV * D, device=DEVICE, dtype=DTYPE) for _ in range(self.layers)]
        self.v = [torch.randn(n, HKV * D, device=DEVICE, dtype=DTYPE) for _ in range(self.layers)]
        self.out = [torch.empty(n, HQ * D, device=DEVICE, dtype=DTYPE) for _ in range(self.layers)]
        self.k_cache = [
            torch.randn(slots, HKV, D, device=DEVICE, dtype=DTYPE) for _ in range(self.layers)
        ]
        self.v_cache = [
            torch.randn(slots, HKV, D, device=DEVICE, dtype=DTYPE) for _ in range(self.layers)
        ]

    @property
    def bytes(self) -> int:
        return self.batch * BYTES * (2 * self.length * HKV * D + 2 * self.seq * (HQ + HKV) * D)

    @property
    def flops(self) -> float:
        seen = self.past + self.seq / 2 if self.causal else self.length
        return 4.0 * self.batch * self.seq * seen * HQ * D

    def ours(self, **options: object) -> list[Launch]:
        def launch(i: int) -> Launch:
            return lambda: capi.tree_attention(
                self.q[i], self.k[i], self.v[i], self.k_cache[i], self.v_cache[i],
                self.past_lengths, self.query_lengths, self.page_table,
                None if self.causal else self.mask, page_size=PAGE, scale=D**-0.5,
                out=self.out[i], **{"prefetch_safe": True, **options},  # type: ignore[arg-type]
            )  # fmt: skip

        return [launch(i) for i in range(self.layers)]

    def sdpa(self, expanded: bool) -> list[Launch]:
        """torch's attention on caches laid out as it likes them: contiguous, and expanded to all
        heads or not.
        """
        heads = HQ if expanded else HKV
        shape = (self.batch, heads, self.length, D)
        layers = max(
            2,
            int(
                min(self.layers, BUDGET_BYTES // (2 * BYTES * self.batch * heads * self.length * D))
            ),
        )
        kv = [torch.randn(2, *shape, device=DEVICE, dtype=DTYPE) for _ in range(layers)]
        q = [
            self.q[i % self.layers].view(self.batch, self.seq, HQ, D).transpose(1, 2)
            for i in range(layers)
        ]
        past = torch.ones(self.batch, self.seq, self.past, dtype=torch.bool, device=DEVICE)
        mask = None if self.causal else torch.cat((past, self.mask), dim=-1)[:, None]

        def launch(i: int) -> Launch:
            return lambda: F.scaled_dot_product_attention(
                q[i], kv[i][0], kv[i][1], mask, is_causal=self.causal, enable_gqa=not expanded
            )

        return [launch(i) for i in range(layers)]

    def flashinfer(self) -> list[Launch]:
        """FlashInfer's paged prefill with the mask; it reads the new rows from the cache, and is
        not given them.
        """
        import flashinfer

        pages, last = divmod(self.length - 1, PAGE)
        pages += 1
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(2**28, dtype=torch.uint8, device=DEVICE), "NHD"
        )
        bounds = torch.arange(self.batch + 1, dtype=torch.int32, device=DEVICE)
        past = torch.ones(self.batch, self.seq, self.past, dtype=torch.bool, device=DEVICE)
        wrapper.plan(
            bounds * self.seq, bounds * pages, self.page_table[:, :pages].flatten(),
            torch.full((self.batch,), last + 1, dtype=torch.int32, device=DEVICE), HQ, HKV, D, PAGE,
            causal=self.causal,
            custom_mask=None if self.causal else torch.cat((past, self.mask), dim=-1).flatten(),
            q_data_type=DTYPE, kv_data_type=DTYPE,
        )  # fmt: skip
        paged = [
            tuple(cache.view(-1, PAGE, HKV, D) for cache in pair)
            for pair in zip(self.k_cache, self.v_cache, strict=True)
        ]

        def launch(i: int) -> Launch:
            return lambda: wrapper.run(self.q[i].view(-1, HQ, D), paged[i])

        return [launch(i) for i in range(self.layers)]

    def row(self, bandwidth: float) -> Row:
        kind = "causal" if self.causal else "tree"
        name = f"TreeAttention {kind}, B {self.batch}, past {self.past}, S {self.seq}"
        stock_us = best_us(lambda: self.sdpa(True), lambda: self.sdpa(False))
        ours_us = time_us(self.ours())
        rates = [f"{self.flops / us * 1e-6:.0f} TFLOP/s" for us in (stock_us, ours_us)]
        notes = (
            [] if self.causal else [f"not settled {time_us(self.ours(prefetch_safe=False)):.2f} us"]
        )
        if self.flops / self.bytes > 50:
            notes.append(f"stock {rates[0]}, ours {rates[1]}")
        if find_spec("flashinfer"):
            notes.append(f"FlashInfer {best_us(self.flashinfer):.2f} us")
        stock = "SDPA is_causal" if self.causal else "SDPA with a mask"
        return Row(name, self.bytes / bandwidth * 1e6, stock, stock_us, ours_us, "; ".join(notes))

    def tune(self) -> None:
        for path in (capi.AttentionPath.MMA, capi.AttentionPath.WGMMA):
            times = []
            for splits in (1, 2, 4, 8, 16, 32):
                us = time_us(self.ours(path=path, num_splits=splits), replays=9)
                times.append(f"{splits}: {us:.2f}")
            print(f"  B {self.batch} past {self.past} S {self.seq} {path.name}: {', '.join(times)}")


def linear_row(bandwidth: float, rows: int, shape: tuple[int, int]) -> Row:
    """x [rows, K] times weight [N, K], settled, as in a decode step."""
    n, k = shape
    layers = max(2, int(BUDGET_BYTES // (n * k * BYTES)))
    weight = [torch.randn(n, k, device=DEVICE, dtype=DTYPE) for _ in range(layers)]
    x = [torch.randn(rows, k, device=DEVICE, dtype=DTYPE) for _ in range(layers)]
    out = [torch.empty(rows, n, device=DEVICE, dtype=DTYPE) for _ in range(layers)]

    def ours(i: int) -> Launch:
        return lambda: capi.linear(x[i], weight[i], prefetch_safe=True, out=out[i])

    def stock(i: int) -> Launch:
        return lambda: F.linear(x[i], weight[i])

    floor = (n * k + rows * (n + k)) * BYTES / bandwidth * 1e6
    stock_us = time_us([stock(i) for i in range(layers)])
    try:
        ours_us, note = time_us([ours(i) for i in range(layers)]), ""
    except NotImplementedError:  # sessions ask cuBLAS then
        ours_us, note = stock_us, "no kernel of ours"
    return Row(f"Linear, N {n}, K {k}, n {rows}", floor, "cuBLAS", stock_us, ours_us, note)


def products_text(rows: dict[tuple[int, int], Row]) -> str:
    """What the products of a step of the 8B geometry take together: 36 layers and the head."""
    times = {shape: (row.floor_us, row.stock_us, row.ours_us) for shape, row in rows.items()}
    sums = [
        sum((1 if shape == HEAD else 36) * t[i] for shape, t in times.items()) * 1e-3
        for i in range(3)
    ]
    return "floor {:.2f} ms, cuBLAS {:.2f} ms, ours where it computes {:.2f} ms".format(*sums)


def choice_us(rows: int, width: int, top: int) -> float:
    """Microseconds of torch's argmax (``top`` 1) or topk over float32 logits, as decoding has
    them.
    """
    logits = [torch.randn(rows, width, device=DEVICE) for _ in range(20)]

    def launch(i: int) -> Launch:
        return (lambda: logits[i].argmax(-1)) if top == 1 else (lambda: logits[i].topk(top, -1))

    return time_us([launch(i) for i in range(len(logits))])


def rms_norm_row(bandwidth: float, rows: int) -> Row:
    layers = 72
    x = [torch.randn(rows, HIDDEN, device=DEVICE, dtype=DTYPE) for _ in range(layers)]
    residual = [torch.randn_like(t) for t in x]
    weight = [torch.randn(HIDDEN, device=DEVICE, dtype=DTYPE) for _ in range(layers)]
    out = [(torch.empty_like(t), torch.empty_like(t)) for t in x]

    def ours(i: int) -> Launch:
        return lambda: capi.add_rms_norm(x[i], weight[i], residual[i], epsilon=1e-6, out=out[i])

    def stock(i: int) -> Launch:
        return lambda: F.rms_norm(x[i] + residual[i], (HIDDEN,), weight[i], 1e-6)

    floor = (4 * rows + 1) * HIDDEN * BYTES / bandwidth * 1e6
    ours_us = time_us([ours(i) for i in range(layers)])
    stock_us = time_us([stock(i) for i in range(layers)])
    return Row(f"AddRmsNorm, H {HIDDEN}, n {rows}", floor, "add, F.rms_norm", stock_us, ours_us)


def rope_row(bandwidth: float, rows: int) -> Row:
    layers, width = 72, (HQ + 2 * HKV) * D
    qkv = [torch.randn(rows, width, device=DEVICE, dtype=DTYPE) for _ in range(layers)]
    positions = torch.randint(0, 40000, (3, 1, rows), dtype=torch.int32, device=DEVICE)
    inv_freq = 5e6 ** (-torch.arange(0, D, 2, device=DEVICE).float() / D)
    axis = torch.arange(D // 2, device=DEVICE, dtype=torch.int32) % 3
    norms = torch.randn(2, D, device=DEVICE, dtype=DTYPE)
    shapes = (HQ * D, HKV * D, HKV * D)
    out = [
        tuple(torch.empty(rows, w, device=DEVICE, dtype=DTYPE) for w in shapes)
        for _ in range(layers)
    ]

    def ours(i: int) -> Launch:
        return lambda: capi.qk_norm_mrope(
            qkv[i], positions, inv_freq, axis, norms[0], norms[1],
            num_heads=HQ, num_kv_heads=HKV, head_dim=D, epsilon=1e-6, out=out[i],
        )  # fmt: skip

    def turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * cosine + torch.cat((-high, low), -1) * sine

    def stock(i: int) -> Launch:
        def launch() -> object:  # cos and sin once per step, as transformers has them: not timed
            q, k, v = qkv[i].split(shapes, -1)
            q = F.rms_norm(q.view(rows, HQ, D), (D,), norms[0], 1e-6)
            k = F.rms_norm(k.view(rows, HKV, D), (D,), norms[1], 1e-6)
            return turn(q, cosine, sine), turn(k, cosine, sine), v.contiguous()

        return launch

    angles = (positions[:, 0].float()[axis.long()].T * inv_freq).repeat(1, 2)[:, None]
    cosine, sine = angles.cos().to(DTYPE), angles.sin().to(DTYPE)
    floor = 2 * rows * width * BYTES / bandwidth * 1e6
    ours_us = time_us([ours(i) for i in range(layers)])
    stock_us = time_us([stock(i) for i in range(layers)])
    return Row(
        f"QKNormMRope, {HQ}/{HKV} heads, n {rows}", floor, "rms_norm, cat, mul", stock_us, ours_us
    )


def silu_row(bandwidth: float, rows: int) -> Row:
    layers = 72
    gate_up = [
        torch.randn(rows, 2 * INTERMEDIATE, device=DEVICE, dtype=DTYPE) for _ in range(layers)
    ]
    out = [torch.empty(rows, INTERMEDIATE, device=DEVICE, dtype=DTYPE) for _ in range(layers)]

    def ours(i: int) -> Launch:
        return lambda: capi.silu_mul(gate_up[i], out[i])

    def stock(i: int) -> Launch:
        gate, up = gate_up[i].chunk(2, -1)
        return lambda: F.silu(gate) * up

    floor = 3 * rows * INTERMEDIATE * BYTES / bandwidth * 1e6
    ours_us = time_us([ours(i) for i in range(layers)])
    stock_us = time_us([stock(i) for i in range(layers)])
    return Row(f"SiluMul, width {INTERMEDIATE}, n {rows}", floor, "silu, mul", stock_us, ours_us)


def move_row(bandwidth: float, moves: int) -> Row:
    planes = 72
    cache = torch.randn(planes, 8192, HKV, D, device=DEVICE, dtype=DTYPE)
    rows = torch.randperm(8192, device=DEVICE)[: 2 * moves].view(2, 1, moves)
    source, destination = rows.to(torch.int32)

    def stock() -> object:
        cache[:, rows[1, 0]] = cache[:, rows[0, 0]]
        return cache

    floor = 2 * planes * moves * HKV * D * BYTES / bandwidth * 1e6
    ours_us = time_us([lambda: capi.kv_move(cache, source, destination)] * 20)
    return Row(
        f"KV move, {planes} planes, {moves} rows",
        floor,
        "index, index_put",
        time_us([stock] * 20),
        ours_us,
    )


@click.command(help=__doc__)
@click.option("--tune", is_flag=True, help="Also time every path and number of splits.")
def main(tune: bool) -> None:
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    shapes = [(1, past, seq, False) for past in (64, 1024, 4096, 16384) for seq in (1, 16, 64)]
    shapes += [
        (8, 4096, 1, False),
        (8, 4096, 16, False),
        (8, 4096, 64, False),
        (1, 0, 2048, True),
        (1, 0, 8192, True),
    ]
    rows = []
    for shape in shapes:
        attention = Attention(*shape)
        if tune:
            attention.tune()
        rows.append(attention.row(bandwidth))
        del attention
    for n in (1, 16, 64, 2048):
        rows += [row(bandwidth, n) for row in (rope_row, rms_norm_row, silu_row)]
    rows += [move_row(bandwidth, moves) for moves in (6, 64)]
    linears = {
        n: {shape: linear_row(bandwidth, n, shape) for shape in LINEARS} for n in (1, 6, 16, 64)
    }
    rows += [row for of_shape in linears.values() for row in of_shape.values()]
    choices = {(n, width, top): choice_us(n, width, top) for n, width, top in CHOICES}
    print(
        f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, copy "
        f"{bandwidth * 1e-12:.2f} TB/s; microseconds"
    )
    print(
        f"| {'':<42} | {'floor':>8} | {'stock':>9} | {'ours':>8} | ours/floor | stock/ours | stock "
        "is |"
    )
    print("|---|---|---|---|---|---|---|")
    print("\n".join(row.text() for row in rows))
    for n, of_shape in linears.items():
        print(f"products of 36 layers and the head, {n} tokens: {products_text(of_shape)}")
    for (n, width, top), us in choices.items():
        print(
            f"torch's {'argmax' if top == 1 else f'topk {top}'} of {n} x {width} float32 logits: "
            f"{us:.2f} us"
        )


if __name__ == "__main__":
    run_command(main)
