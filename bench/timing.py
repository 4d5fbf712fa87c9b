"""Medians with their spread, of several contestants in one run, their turns interleaved."""

from __future__ import annotations

import statistics
import subprocess
import time
from pathlib import Path
from typing import Callable

import torch


class Times:
    def __init__(self, seconds: list[float]):
        self.median = statistics.median(seconds) * 1e3
        ordered = sorted(seconds)
        self.low = ordered[len(ordered) // 10] * 1e3
        self.high = ordered[-1 - len(ordered) // 10] * 1e3

    def __str__(self) -> str:
        return f"{self.median:.1f} ({self.low:.1f}-{self.high:.1f})"


def measure(contestants: dict[str, Callable[[], object]], budget_s: float = 8.0,
            least: int = 3, most: int = 25) -> dict[str, Times]:
    """Round after round until the budget is spent, at least `least`. In each round each contestant runs
    once to take the caches and the allocator over from the one before, then is timed."""
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    start = time.perf_counter()
    for turn in range(most):
        for name, run in contestants.items():
            run()
            for _ in range(2):
                begin = time.perf_counter()
                run()
                taken[name].append(time.perf_counter() - begin)
        if turn + 1 >= least and time.perf_counter() - start > budget_s:
            break
    return {name: Times(seconds) for name, seconds in taken.items()}


def machine() -> dict[str, object]:
    root = Path(__file__).resolve().parents[1]
    try:
        commit = subprocess.run(["git", "-C", str(root), "describe", "--always", "--dirty"],
                                capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        commit = ""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {"commit": commit or "unknown", "cpu": model, "threads": torch.get_num_threads(),
            "torch": torch.__version__}


def matmul_rate(n: int = 1024) -> float:
    """GFLOP/s of one float32 matrix product: what the machine can do."""
    a, b = torch.randn(n, n), torch.randn(n, n)
    times = measure({"matmul": lambda: a @ b}, budget_s=1.0, most=15)
    return 2 * n**3 / times["matmul"].median / 1e6
