"""`make bench`: the operators on this machine's CPU beside their peers, all in one run.

Prints tables for docs/performance.md and writes JSON lines to build/bench.jsonl. A result is checked
against the eager peer before anything is timed; on a mismatch nothing is printed but the mismatch.

  run.py [--quick] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "bench")]

import peers  # noqa: E402
import sinkhorn  # noqa: E402
import timing  # noqa: E402

H, D, ITERATIONS, TEMPERATURE = 8, 64, 5, 0.75


class Problem:
    def __init__(self, length: int, block: int):
        gen = torch.Generator().manual_seed(length + block)
        self.length, self.block, self.blocks = length, block, length // block
        self.query, self.key, self.value = (
            torch.randn(1, H, length, D, generator=gen).requires_grad_() for _ in range(3))
        self.logits = torch.randn(1, H, self.blocks, self.blocks, generator=gen).requires_grad_()
        self.grad = torch.randn(1, H, length, D, generator=gen)

    def ours(self, causal: str = "none", columns: str = "full", window: int = 0) -> torch.Tensor:
        sort = sinkhorn.balance(self.logits, ITERATIONS, TEMPERATURE, causal, columns, window)
        return sinkhorn.attention(self.query, self.key, self.value, sort, self.block, causal,
                                  window=window)

    def eager(self) -> torch.Tensor:
        return peers.eager_sinkhorn(self.query, self.key, self.value, self.logits, self.block,
                                    ITERATIONS, TEMPERATURE)

    def inputs(self) -> list[torch.Tensor]:
        return [self.query, self.key, self.value, self.logits]

    def step(self, forward) -> list[torch.Tensor]:
        out = forward()
        return list(torch.autograd.grad(out, self.inputs(), self.grad, allow_unused=True))

    def check(self) -> None:
        pairs = zip([self.ours(), *self.step(self.ours)], [self.eager(), *self.step(self.eager)])
        for name, (a, b) in zip(("out", "query", "key", "value", "logits"), pairs):
            error = ((a - b).square().mean() / b.square().mean()).sqrt().item()
            if not error < 1e-5:
                sys.exit(f"L={self.length} b={self.block}: {name} is off by {error:.2g}; no figures")

    def flops(self, backward: bool) -> float:
        """Multiply-adds twice: the sort of K and V, and attention to 2b keys."""
        sort = 2 * 2 * self.blocks * self.length * D * H
        attend = 2 * 2 * self.length * 2 * self.block * D * H
        return (sort * 3 + attend * 3.5) if backward else sort + attend


def emit(sink, **row) -> None:
    sink.write(json.dumps(row) + "\n")


def contest(sink, length: int, block: int, with_full: bool, rate: float) -> None:
    problem = Problem(length, block)
    problem.check()
    for backward in (False, True):
        def run(forward, backward=backward):
            if backward:
                return lambda: problem.step(forward)
            def call():
                with torch.no_grad():
                    return forward()
            return call
        q, k, v = problem.query, problem.key, problem.value
        fast = timing.measure({
            "sinkhorn": run(problem.ours),
            "sinkhorn strict prefix": run(lambda: problem.ours("strict", "prefix")),
            "sinkhorn strict prior": run(lambda: problem.ours("strict", "prior")),
            "eager Sinkhorn": run(problem.eager),
            "block-local SDPA (half the keys)": run(
                lambda: peers.block_local_sdpa(q, k, v, block)),
        })
        if with_full:
            fast |= timing.measure({
                "full SDPA": run(lambda: peers.full_sdpa(q, k, v)),
                "full SDPA, causal": run(lambda: peers.full_sdpa(q, k, v, True)),
            }, budget_s=10.0, least=1, most=4)
        what = "forward + backward" if backward else "forward"
        ours = fast["sinkhorn"].median
        share = problem.flops(backward) / ours / 1e6 / rate
        print(f"\nL = {length}, b = {block}, {what}: {share:.0%} of the matrix product's rate\n")
        print("| | ms, median (10-90%) | times ours |\n|---|---|---|")
        for name, times in fast.items():
            print(f"| {name} | {times} | {times.median / ours:.2f} |")
            emit(sink, bench="attention", length=length, block=block, backward=backward,
                 contestant=name, ms=times.median, low=times.low, high=times.high)
        sys.stdout.flush()


def scaling(sink, lengths: list[int]) -> None:
    """Cost per token beside the model c1 * 2b + c2 * N, fitted by least squares."""
    rows = []
    for kind in ("b = 64", "b near sqrt(L)"):
        for length in lengths:
            block = 64 if kind == "b = 64" else 2 ** round((length.bit_length() - 1) / 2)
            problem = Problem(length, block)
            times = timing.measure({"ours": lambda: problem.step(problem.ours)}, budget_s=4.0, most=9)
            rows.append((kind, length, block, problem.blocks, times["ours"].median * 1e6 / length))
            emit(sink, bench="scaling", length=length, block=block, ns_per_token=rows[-1][-1])
    features = torch.tensor([[2.0 * b, float(n)] for _, _, b, n, _ in rows], dtype=torch.float64)
    target = torch.tensor([cost for *_, cost in rows], dtype=torch.float64)
    weights = 1 / target  # relative errors count
    c1, c2 = torch.linalg.lstsq(features * weights[:, None], (target * weights)[:, None])[0][:, 0]
    print(f"\nCost per token, forward + backward, beside c1 * 2b + c2 * N with "
          f"c1 = {c1:.2f} ns, c2 = {c2:.2f} ns (H = {H}, D = {D})\n")
    print("| | L | b | N | ns a token | model |\n|---|---|---|---|---|---|")
    for kind, length, block, blocks, cost in rows:
        print(f"| {kind} | {length} | {block} | {blocks} | {cost:.0f} | "
              f"{c1 * 2 * block + c2 * blocks:.0f} |")


def small_operators(sink) -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4096, 512, generator=gen)
    problem = Problem(4096, 64)
    q, k, v = problem.query.detach(), problem.key.detach(), problem.value.detach()
    sort = sinkhorn.balance(problem.logits.detach())
    times = timing.measure({
        "pool mean": lambda: sinkhorn.pool(x, 64),
        "pool mean, eager": lambda: x.view(1, 64, 64, 512).mean(2),
        "pool mean, causal": lambda: sinkhorn.pool(x, 64, "mean", True),
        "balance full": lambda: sinkhorn.balance(problem.logits.detach()),
        "balance full, eager": lambda: peers.eager_balance(problem.logits.detach(), 5, 0.75),
        "balance strict prefix": lambda: sinkhorn.balance(problem.logits.detach(), 5, 0.75, "strict",
                                                          "prefix"),
        "balance strict prior": lambda: sinkhorn.balance(problem.logits.detach(), 5, 0.75, "strict",
                                                         "prior"),
        "sliding window 1, strict": lambda: sinkhorn.attention(q, k, v, None, 64, "strict", window=1),
        "sortcut 2 x 64": lambda: sinkhorn.sortcut(q, k, v, sort, 64, 2),
    }, budget_s=6.0)
    print("\nL = 4096, E = 512, H = 8, D = 64, b = 64, forward\n\n| | ms, median (10-90%) |\n|---|---|")
    for name, t in times.items():
        print(f"| {name} | {t.median:.2f} ({t.low:.2f}-{t.high:.2f}) |")
        emit(sink, bench="small", contestant=name, ms=t.median, low=t.low, high=t.high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="L = 4096 only")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    rate = timing.matmul_rate()
    facts = timing.machine() | {"form": sinkhorn.cpu_form(), "sgemm_gflops": round(rate)}
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build" / "bench.jsonl", "w") as sink:
        emit(sink, **facts)
        print(", ".join(f"{key} {value}" for key, value in facts.items()))
        print(f"float32, batch 1, H = {H}, D = {D}, {ITERATIONS} iterations, balance + attention")
        contest(sink, 4096, 64, True, rate)
        if options.quick:
            return
        contest(sink, 16384, 64, True, rate)
        small_operators(sink)
        scaling(sink, [1024, 2048, 4096, 8192, 16384, 32768, 65536])


if __name__ == "__main__":
    main()
