"""`make bench-gpu`: the operators on this machine's GPU beside their goals and peers, in one run.

Prints the tables of docs/performance.md and writes JSON lines. Every row is checked against the
plain composition in float64 before anything is timed; of a row that fails nothing is printed but
the mismatch.

  gpu.py [--rows 4096] [--profile] [--no-peers] [--no-compile] [--quick] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Callable, TextIO

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "bench")]

import gpu_timing  # noqa: E402
import peers  # noqa: E402
from gpu_rows import D, H, ITERATIONS, ROWS, TEMPERATURE, TOKENS, Problem, Row  # noqa: E402
from timing import Times  # noqa: E402

BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
CROSSOVER = (128, 256, 512, 1024, 2048, 4096)


def show(times: Times | None) -> str:
    return "" if times is None else f"{times.median:.3f} ({times.low:.3f}-{times.high:.3f})"


def verdict(figure: float, goal: float | None) -> str:
    return "" if goal is None else f"{goal:g}: {'met' if figure <= goal else 'MISSED'}"


class Report:
    """The sink of figures, and the count of rows that failed their check."""

    def __init__(self, sink: TextIO, quick: bool):
        self.sink, self.budget, self.failed = sink, 0.08 if quick else 0.25, 0

    def emit(self, **row: object) -> None:
        self.sink.write(json.dumps(row) + "\n")
        self.sink.flush()

    def time(self, run: Callable[[], object], budget: float | None = None) -> Times:
        return gpu_timing.measure(run, budget or self.budget)


def checked(row: Row, report: Report) -> Problem | None:
    problem = Problem(row)
    try:
        faults = problem.faults()
    except (RuntimeError, NotImplementedError) as error:
        faults = [str(error).splitlines()[0]]
    torch.cuda.empty_cache()
    if faults:
        print(f"| {row} | MISMATCH, no figures: {'; '.join(faults)} |", flush=True)
        report.emit(bench="mismatch", row=str(row), faults=faults)
        report.failed += 1
        return None
    return problem


def ours(rows: list[Row], report: Report, profile: bool) -> None:
    print("\n| balance + sort + attention | forward, ms (10-90%) | goal | forward + backward, ms "
          "| goal | extra MiB | goal |\n|---|---|---|---|---|---|---|")
    for row in rows:
        problem = checked(row, report)
        if problem is None:
            continue
        memory = gpu_timing.extra_memory(problem.step) / 2**20
        forward, both = report.time(problem.forward), report.time(problem.step)
        allowed = row.memory_goal()
        print(f"| {row} | {show(forward)} | {verdict(forward.median, row.forward_goal)} "
              f"| {show(both)} | {verdict(both.median, row.goal)} | {memory:.0f} | "
              + (f"{allowed:.0f}: {'met' if memory <= allowed else 'MISSED'} |"
                 if allowed < float("inf") else "|"), flush=True)
        report.emit(bench="ours", row=str(row), length=row.length, block=row.block, kind=row.kind,
                    columns=row.columns, forward_ms=forward.median, ms=both.median,
                    forward_spread=[forward.low, forward.high], spread=[both.low, both.high],
                    forward_goal=row.forward_goal, goal=row.goal, extra_mib=memory)
        if profile:
            split(problem, report, both)
        del problem
        torch.cuda.empty_cache()


def split(problem: Problem, report: Report, both: Times) -> None:
    kernels = gpu_timing.by_kernel(problem.step)
    print(f"  kernels {sum(us for _, _, us in kernels):.0f} us of {1e3 * both.median:.0f}")
    for name, calls, us in kernels:
        if us >= 0.5:
            print(f"  {us:9.1f} us  {calls:4.0f} x  {name[:110]}")
    report.emit(bench="kernels", row=str(problem.row), kernels=kernels)
    sys.stdout.flush()


# Peers -------------------------------------------------------------------------------------------


def sdpa_steps(row: Row, backend: SDPBackend, causal: bool, block: int | None) -> Iterator[object]:
    """Forward, and forward + backward, of SDPA with one backend; with a block, within blocks."""
    problem = Problem(row)
    leaves = [problem.query, problem.key, problem.value]

    def forward() -> torch.Tensor:
        with sdpa_kernel(backend):
            if block is not None:
                return peers.block_local_sdpa(*leaves, block)
            return peers.full_sdpa(*leaves, causal)

    def without_gradients() -> torch.Tensor:
        with torch.no_grad():
            return forward()

    def step() -> object:
        out = forward()
        with sdpa_kernel(backend):
            return out, *torch.autograd.grad(out, leaves, problem.grad)

    yield without_gradients
    yield step


def peer_line(name: str, row: Row, calls: Iterator[object], report: Report) -> float | None:
    """Prints and records one peer; its forward + backward in ms, None if it does not run here."""
    try:
        forward, step = calls
        budget = 0.5 if row.length > 4096 and "block" not in name else None
        times = report.time(forward, budget), report.time(step, budget)
        memory = gpu_timing.extra_memory(step) / 2**20
    except (RuntimeError, TypeError) as error:  # the latter from a compiler that fails inside
        print(f"| {name}, L = {row.length} | does not run: {str(error).splitlines()[0][:60]} |")
        return None
    print(f"| {name}, L = {row.length} | {show(times[0])} | {show(times[1])} | {memory:.0f} |",
          flush=True)
    report.emit(bench="peer", peer=name, length=row.length, forward_ms=times[0].median,
                ms=times[1].median, forward_spread=[times[0].low, times[0].high],
                spread=[times[1].low, times[1].high], extra_mib=memory)
    torch.cuda.empty_cache()
    return times[1].median


def compiled_steps(row: Row) -> Iterator[object]:
    problem = Problem(row)
    leaves = [problem.query, problem.key, problem.value, problem.logits]
    compiled = torch.compile(peers.eager_sinkhorn, dynamic=False)

    def forward() -> torch.Tensor:
        return compiled(*leaves, row.block, ITERATIONS, TEMPERATURE, row.columns)

    def without_gradients() -> torch.Tensor:
        with torch.no_grad():
            return forward()

    def step() -> object:
        out = forward()
        return out, *torch.autograd.grad(out, leaves, problem.grad)

    yield without_gradients
    yield step


def all_peers(report: Report, lengths: tuple[int, ...], with_compile: bool) -> None:
    print("\n| peer | forward, ms (10-90%) | forward + backward, ms | extra MiB |"
          "\n|---|---|---|---|")
    for length in lengths:
        for name, backend in BACKENDS.items():
            for causal in (False, True):
                row = Row(length, 64)
                peer_line(f"SDPA {name}{', causal' if causal else ''}", row,
                          sdpa_steps(row, backend, causal, None), report)
    for length, block in ((4096, 64), (4096, 128), (65536, 64)):
        for name, backend in BACKENDS.items():
            row = Row(length, block)
            peer_line(f"block-local SDPA {name}, b = {block}, half the keys, no sort", row,
                      sdpa_steps(row, backend, False, block), report)
    if not with_compile:
        return
    for row in (Row(4096, 64), Row(65536, 64), Row(65536, 64, columns="prefix")):
        if row.length in lengths:
            peer_line(f"plain Sinkhorn compiled, b = {row.block}, {row.columns}", row,
                      compiled_steps(row), report)


def crossover(report: Report) -> None:
    """The shortest length from which ours, b = 64, beats full SDPA with its faster backend."""
    print("\n| forward + backward, ms, b = 64 | ours | SDPA | ours, strict prefix | SDPA causal |"
          "\n|---|---|---|---|---|")
    first: dict[str, int] = {}
    for length in CROSSOVER:
        cells = []
        for columns in ("full", "prefix"):
            row = Row(length, 64, columns=columns)
            problem = checked(row, report)
            if problem is None:
                return
            mine = report.time(problem.step, 0.08).median
            others = []
            for backend in BACKENDS.values():
                try:
                    _, step = sdpa_steps(row, backend, columns != "full", None)
                    others.append(report.time(step, 0.08).median)
                except RuntimeError:
                    continue
            best = min(others, default=float("inf"))
            if mine < best:
                first.setdefault(columns, length)
            else:
                first.pop(columns, None)
            cells += [f"{mine:.3f}", f"{best:.3f}"]
            report.emit(bench="crossover", length=length, columns=columns, ms=mine, sdpa_ms=best)
        print(f"| L = {length} | " + " | ".join(cells) + " |", flush=True)
    print(f"\nOurs is the faster one from L = {first.get('full', 'none of these')} on, causal from "
          f"L = {first.get('prefix', 'none of these')} on.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--profile", action="store_true", help="each row's time by kernel")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled peer out")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, short peers only")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench_gpu.jsonl")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench-gpu: needs a CUDA device, and PyTorch finds none here")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with open(options.out, "w") as sink:
        report = Report(sink, options.quick)
        facts = gpu_timing.facts()
        report.emit(bench="facts", **facts)
        print(", ".join(f"{key} {value}" for key, value in facts.items()))
        print(f"bf16 (logits float32), H = {H}, D = {D}, {TOKENS} tokens in all, {ITERATIONS} "
              f"iterations, temperature {TEMPERATURE}; CUDA graphs replayed, median (10-90%)")
        print("extra MiB: the peak of forward + backward beyond inputs and incoming gradient; "
              "output and gradients count")
        ours([row for row in ROWS if options.rows in str(row)], report, options.profile)
        if not options.no_peers:
            lengths = (1024, 4096) if options.quick else (1024, 4096, 65536)
            all_peers(report, lengths, not options.no_compile)
            crossover(report)
    sys.exit(1 if report.failed else 0)


if __name__ == "__main__":
    main()
