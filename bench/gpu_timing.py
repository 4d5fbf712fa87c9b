"""Times on a GPU: a call is captured in a CUDA graph and replayed between two events, so that
neither Python nor launch gaps count. The benches' inputs are larger than the second-level cache."""

from __future__ import annotations

from typing import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from timing import Times, machine

Call = Callable[[], object]
WARM_UP = 3


def captured(run: Call) -> tuple[Call, bool]:
    """The call as a graph's replay, and whether it could be captured; else the call itself."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            graph.results = run()  # kept alive with it
    except RuntimeError as error:
        torch.cuda.synchronize()
        print(f"(not captured, timed call by call: {str(error).splitlines()[0]})")
        return run, False
    return graph.replay, True


def timed(run: Call, times: int) -> list[float]:
    """Seconds of each call, by events; one wait at the end."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e-3 for begin, end in events]


def measure(run: Call, budget_s: float = 0.25, least: int = 5, most: int = 200) -> Times:
    """Median and spread of as many calls as fit the budget, after a warm-up of a fifth of it."""
    replay, _ = captured(run)
    first = max(min(timed(replay, WARM_UP)), 1e-6)
    timed(replay, max(1, min(most, int(0.2 * budget_s / first))))
    times = Times(timed(replay, max(least, min(most, int(budget_s / first)))))
    del replay, run
    torch.cuda.empty_cache()
    return times


def extra_memory(run: Call) -> int:
    """Bytes at the peak of one call beyond what was allocated before it: results, all that is saved
    between forward and backward, gradients and scratch. Inputs and the incoming gradient are there
    before and do not count."""
    run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del results
    return peak


def by_kernel(run: Call, times: int = 5) -> list[tuple[str, float, float]]:
    """Name, calls and microseconds of each kernel in one call, the longest first."""
    for _ in range(WARM_UP):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(times):
            run()
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            total = totals.setdefault(event.name, [0, 0.0])
            total[0] += 1
            total[1] += event.time_range.elapsed_us()
    rows = [(name, calls / times, us / times) for name, (calls, us) in totals.items()]
    return sorted(rows, key=lambda row: -row[2])


def copy_rate() -> float:
    """TB/s of a kernel that reads and writes each number once (a copy in a captured graph is made
    by other means, and slower)."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    times = measure(lambda: torch.neg(source, out=target), budget_s=0.1)
    return 2 * source.numel() * source.element_size() / times.median / 1e9


def matmul_rate(n: int = 8192) -> float:
    """TFLOP/s of one bf16 matrix product on random numbers."""
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / measure(lambda: a @ b, budget_s=0.1).median / 1e9


def facts() -> dict[str, object]:
    return machine() | {
        "gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda,
        "copy_tb_s": round(copy_rate(), 2), "bf16_matmul_tflops": round(matmul_rate())}
