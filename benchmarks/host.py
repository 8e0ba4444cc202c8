"""Host time of a step: ``python -m benchmarks.host BUNDLE``.

Runs the real scheduler, engine, answers and readers on a device that computes nothing and takes a
fixed time per step (``stand_in``), so that any machine can run it. Prints CPU time per step by
thread, which other jobs on the machine hardly affect, and wall time per step, which they do.

Forms: ``scheduler``: steps without engine and readers; the other forms add to it. ``tasks``:
readers in one event loop. ``threads``: one thread per reader. ``http``: ``serve``, with clients in
another process.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.host_crowd import Cost, Crowd, Stretch, open_on_stand_in
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.request.answer import Answer
from trt_eagle3.decode.schedule.scheduler import Scheduler
from trt_eagle3.io.run_command import run_command

__all__ = ["FORMS", "main", "measure"]


@click.command()
@click.argument("path", metavar="BUNDLE", type=click.Path(path_type=Path))
@click.option(
    "--batch", "batches", multiple=True, type=int, default=(1, 8, 32, 64, 128), show_default=True
)
@click.option("--chain", "chains", multiple=True, type=int, default=(0, 3), show_default=True)
@click.option("--form", "forms", multiple=True, help="[default: all]")
@click.option("--length", default=2.0, show_default=True, help="Acceptance length of a chain.")
@click.option("--steps", default=100, show_default=True, help="Steps with all sequences decoding.")
@click.option("--step-ms", default=5.0, show_default=True, help="Device time of a step.")
def main(
    path: Path,
    batches: Sequence[int],
    chains: Sequence[int],
    forms: Sequence[str],
    length: float,
    steps: int,
    step_ms: float,
) -> None:
    """Print the host's time in a step of BUNDLE, by form and number of sequences."""
    table = Table("decoding", "form", *(f"B {batch}" for batch in batches))
    console = Console(width=120, highlight=False)
    for chain in chains:
        name = f"chain of {chain}" if chain else "plain"
        for form in forms or FORMS:
            row = []
            for batch in batches:
                cost = measure(path, form, Crowd(batch, chain, length, steps, step_ms))
                parts = ", ".join(f"{part} {ms:.2f}" for part, ms in cost.cpu.items() if ms > 0.005)
                console.print(f"{name}, {form}, B {batch}: wall {cost.wall:.2f}; CPU {parts}")
                row.append(f"{cost.total:.2f}")
            table.add_row(name, form, *row)
    console.print(table, "ms of CPU time a step, sum of all threads")


def measure(path: Path, form: str, crowd: Crowd) -> Cost:
    """Measure the cost of a step of ``crowd`` in ``form``, one of ``FORMS``."""
    stretch = Stretch(crowd)
    device = crowd.device(stretch.step)
    with ExitStack() as stack:
        FORMS[form](crowd.open(path, device, stack), stretch, crowd)
    assert stretch.cost is not None
    return stretch.cost


def _scheduler(bundle: LoadedBundle, stretch: Stretch, crowd: Crowd) -> None:
    scheduler = Scheduler(bundle.decoder, max_batch_size=crowd.batch, policy=bundle.policy)
    pool, prepare = bundle.page_pool(), bundle.preprocessor()
    request = crowd.request()
    with torch.inference_mode():
        for _ in range(crowd.batch):
            prompt = prepare.prompt(prepare.model_inputs(request))
            vocab_size, drafting = bundle.spec.vocab_size, request.speculation
            sequence = SequenceState(prompt, pool, vocab_size, request.sampling, drafting)
            scheduler.add(sequence)
        while not stretch.over:
            scheduler.step()


def _tasks(bundle: LoadedBundle, stretch: Stretch, crowd: Crowd) -> None:
    async def read(answer: Answer) -> None:
        async for _ in answer:
            pass

    async def run(engine: LLM) -> None:
        readers = [read(engine.submit(crowd.request())) for _ in range(crowd.batch)]
        await asyncio.gather(*readers)

    with LLM(bundle, prefix_cache=False) as engine:
        loop = threading.Thread(target=lambda: asyncio.run(run(engine)), name="readers")
        loop.start()
        stretch.wait()
        engine.close()
        loop.join()


def _threads(bundle: LoadedBundle, stretch: Stretch, crowd: Crowd) -> None:
    def read(answer: Answer) -> None:
        for _ in answer:
            pass

    with LLM(bundle, prefix_cache=False) as engine:
        answers = [engine.submit(crowd.request()) for _ in range(crowd.batch)]
        threads = [threading.Thread(target=read, args=(a,), name="readers") for a in answers]
        for thread in threads:
            thread.start()
        stretch.wait()
        engine.close()
        for thread in threads:
            thread.join()


def _http(bundle: LoadedBundle, stretch: Stretch, crowd: Crowd) -> None:
    from trt_eagle3.serving.config import ServingConfig
    from trt_eagle3.serving.engine_process import EngineJob
    from trt_eagle3.serving.remote_engine import RemoteEngine
    from trt_eagle3.serving.server import Server

    with ExitStack() as stack:
        report = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "cost.json"
        job = EngineJob(partial(open_on_stand_in, bundle.path, crowd, report))
        engine = stack.enter_context(RemoteEngine(job))
        engine.attach(bundle.path)
        engine.wait_until_ready()
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(crowd.batch)
        server = Server(engine, ServingConfig())
        thread = threading.Thread(target=server.run, args=([listener],), name="http")
        thread.start()
        report.with_suffix(".armed").touch()
        words = _clients(listener.getsockname()[1], crowd)
        with subprocess.Popen(words, stderr=subprocess.PIPE) as clients:
            stretch.follow(report)
            engine.close()  # ends all answers, and so the clients
            clients.communicate()
        server.should_exit = True
        thread.join()


def _clients(port: int, crowd: Crowd) -> list[str]:
    """Return the command line of the clients."""
    options = ["--clients", str(crowd.batch), "--max-tokens", str(crowd.num_tokens)]
    options += ["--speculation"] if crowd.chain else []
    url = f"http://127.0.0.1:{port}"
    return [sys.executable, "-m", "benchmarks.host_clients", url, *options]


FORMS: Mapping[str, Callable[[LoadedBundle, Stretch, Crowd], None]] = {
    "scheduler": _scheduler,
    "tasks": _tasks,
    "threads": _threads,
    "http": _http,
}

if __name__ == "__main__":
    run_command(main)
