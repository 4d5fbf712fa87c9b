"""The CUDA forms of balance, and pool, where their tiles change: one warp a head up to 16 blocks
with causal columns, one CTA a head up to 128, a crew of them up to 1024, strips of whole rows and
groups of heads above, few and many iterations. Skipped without a GPU.

As a program it runs the same checks without pytest, and then prints times:

  python3 tests/python/test_balance_cuda.py
"""

from __future__ import annotations

import sys
import unittest
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import comparison  # noqa: E402  (found through the path set above)
import gpu_checks  # noqa: E402
from cases import BALANCE_RULES, POOL_MODES, Balance, Case, Pool  # noqa: E402
from support import load_libraries, randn, takes_hoppers_kernels, value_and_grads  # noqa: E402

ops = torch.ops.sinkhorn
SIZES = (15, 16, 17, 32, 33, 64, 65, 128, 129, 160, 161, 257, 516, 1030)
ITERATIONS = (5, 1, 9, 2, 20)  # beyond 7 backward replays in stretches
WARP_SIZES, WARP_ITERATIONS = (1, 3, 8, 9, 16), (1, 5, 7, 8)  # a warp goes back through up to 7


def on_gpu() -> None:
    if not torch.cuda.is_available():
        raise unittest.SkipTest("needs a CUDA device")


def balance_cases() -> list[Balance]:
    found = []
    for turn, N in enumerate(SIZES):
        for rule, (causal, columns, window) in enumerate(BALANCE_RULES):
            if (rule + turn) % 3 == 0:
                found.append(Balance(causal, columns, ITERATIONS[(rule + turn // 3) % 5], window,
                                     bool(turn & 1), bool(rule & 1), 2, 2, N))
    scanned = [rule for rule in BALANCE_RULES if rule[1] in ("prefix", "prior")]
    for turn, N in enumerate(WARP_SIZES):
        for rule, (causal, columns, window) in enumerate(scanned):
            found.append(Balance(causal, columns, WARP_ITERATIONS[(rule + turn) % 4], window,
                                 bool(turn & 1), bool(rule & 2), 2, 3, N))
    return found


def crew_cases() -> list[Balance]:
    """Full columns of 129 to 1024 blocks. At a low temperature columns that nobody wants sum to less
    than a float32 keeps beside the largest element of a row."""
    rules = (("none", 0), ("strict", 0), ("inclusive", 0), ("strict", 2))
    found = []
    for turn, N in enumerate((129, 131, 192, 256, 258, 300, 384, 511, 512, 256, 513, 700, 1024, 1022)):
        for place, temperature in enumerate((0.75, 0.03, 0.1)):
            causal, window = rules[0 if place == 1 else (turn + place) % 4]
            found.append(Balance(causal, "full", (5, 1, 4, 2, 3)[(place + turn) % 5], window,
                                 (turn + place) % 2 == 1, (turn + place) % 3 == 1, 3, 2, N,
                                 temperature))
    return found


def faults(chosen: list[Case], check: str, dtype: torch.dtype) -> list[str]:
    found = []
    for case in chosen:
        some = (gpu_checks.values(case, dtype, "cuda", {}) if check == "values" else
                getattr(gpu_checks, check)(case, dtype, "cuda"))
        found += [f"{dtype}, {case}: {fault}" for fault in some]
    return found


def test_balance_is_as_good_as_eager_at_the_borders_of_its_tiles():
    on_gpu()
    chosen = balance_cases()
    found = faults(chosen, "values", torch.float32) + faults(chosen[::4], "values", torch.bfloat16)
    assert not found, "\n".join(found)


def test_balance_of_16384_blocks_is_as_good_as_eager():
    on_gpu()
    if torch.cuda.mem_get_info()[0] < 100 << 30:
        raise unittest.SkipTest("needs 100 GiB for the reference in float64")
    found = []
    for causal, columns in (("none", "full"), ("strict", "prefix"), ("strict", "prior")):
        found += faults([Balance(causal, columns, 2, B=1, H=1, N=16384)], "values", torch.float32)
        torch.cuda.empty_cache()
    assert not found, "\n".join(found)


def test_balance_by_crews_is_as_good_as_eager():
    on_gpu()
    chosen = crew_cases()
    found = faults(chosen, "values", torch.float32)
    for turn, dtype in enumerate((torch.bfloat16, torch.float16)):
        found += faults(chosen[turn::3], "values", dtype)
    found += faults(chosen[::4], "strides", torch.float32)
    found += faults(chosen[::5], "graph", torch.float32)
    assert not found, "\n".join(found)


def test_balance_rows_do_not_depend_on_later_rows_in_either_form():
    on_gpu()
    chosen = [case for case in balance_cases() if case.causal != "none" and case.columns != "full"]
    found = faults(chosen[::2], "causality", torch.float32)
    assert not found, "\n".join(found)


def test_more_heads_than_a_group_give_each_head_its_own_result():
    on_gpu()
    for causal, columns in (("none", "full"), ("strict", "prefix"), ("inclusive", "prior")):
        # Groups of 7; crews, of 1024 blocks in groups of 8.
        for B, N, noise in ((20, 140, True), (4, 1030, True), (4, 1032, False), (9, 400, True), (5, 900, False)):
            case = Balance(causal, columns, 3, noise=noise, B=B, H=3, N=N)
            inputs = case.inputs(torch.float32, "cuda")
            grad = comparison.output_gradient(case, inputs, torch.float32)
            whole = value_and_grads("sinkhorn", case, inputs, grad)
            for first in (0, B // 2, B - 1):
                part = {name: None if x is None else x[first : first + 1]
                        for name, x in inputs.items()}
                one = value_and_grads("sinkhorn", replace(case, B=1), part, grad[first : first + 1])
                for name, x in one.items():
                    assert torch.equal(x, whole[name][first : first + 1]), f"{case}: {name}"


def test_large_logits_give_finite_results_and_rows_that_sum_to_1_by_crews_and_strips():
    on_gpu()
    for causal, columns, window in BALANCE_RULES:
        for size in (30.0, 1e6):
            for N, iterations in ((150, 5), (400, 5), (600, 5), (150, 9)):
                logits = (size * randn(1, 2, N, N, seed=1, dtype=torch.float32)).cuda()
                logits.requires_grad_()
                result = ops.balance(logits, iterations, 1.0, causal, columns, window)
                (grad,) = torch.autograd.grad(result, logits, torch.rand_like(result))
                assert torch.isfinite(result).all() and torch.isfinite(grad).all()
                sums = result.sum(-1)[..., window + (causal == "strict"):]
                torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-5)


def test_crews_stay_finite_however_large_the_logits():
    on_gpu()
    for causal in ("none", "strict", "inclusive"):
        for N, size in ((200, 1e9), (200, 1e12), (800, 1e12)):
            logits = size * (randn(1, 2, N, N, seed=1, dtype=torch.float32)
                             + torch.linspace(-1, 1, N))
            logits = logits.cuda().requires_grad_()
            result = ops.balance(logits, 5, 1.0, causal, "full", 0)
            (grad,) = torch.autograd.grad(result, logits, torch.rand_like(result))
            assert torch.isfinite(result).all() and torch.isfinite(grad).all(), f"{causal} {N} {size}"


def forward_and_backward(logits: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    options = (5, 0.75, "none", "full", 0, None, None)
    result, terms = ops.balance_fwd(logits, *options)
    return [result, ops.balance_bwd(grad, logits, terms, *options)]


def test_crews_on_several_streams_at_once_give_the_bits_of_one():
    on_gpu()
    inputs = [(torch.randn(1, heads, N, N, device="cuda"), torch.randn(1, heads, N, N, device="cuda"))
              for heads, N in ((8, 512), (32, 256), (8, 1024), (3, 700))]
    alone = [forward_and_backward(*pair) for pair in inputs]
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(20):
        found = []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append([forward_and_backward(*pair) for pair in inputs])
        torch.cuda.synchronize()
        for some in found:
            for expected, results in zip(alone, some):
                assert all(torch.equal(a, b) for a, b in zip(expected, results))


def test_crews_take_what_they_are_for_on_hopper():
    on_gpu()
    if not takes_hoppers_kernels():
        raise unittest.SkipTest("needs Hopper's kernels")
    for N, forward, backward in ((129, "crew", "crew"), (512, "crew", "crew"),
                                 (1024, "crew", "strip"), (1025, "strip", "strip")):
        logits = torch.randn(1, 1, N, N, device="cuda")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            forward_and_backward(logits, logits)
            torch.cuda.synchronize()
        names = " ".join(event.key for event in profiler.key_averages())
        for form, way in ((forward, "fwd"), (backward, "bwd")):
            by_crew = f"balance_crew_{way}_kernel" in names
            assert by_crew == (form == "crew"), f"{N} blocks, {way}: {names}"


def test_an_empty_batch_is_no_work_for_a_crew():
    on_gpu()
    logits = torch.empty(0, 2, 200, 200, device="cuda", requires_grad=True)
    result = ops.balance(logits, 5, 0.75, "none", "full", 0)
    result.sum().backward()
    assert result.shape == logits.shape and logits.grad.shape == logits.shape


def test_pool_is_as_good_as_eager_for_wide_and_odd_rows_and_many_blocks():
    on_gpu()
    chosen = [Pool(mode, causal, mask, 2, L, block, E) for mode, causal in POOL_MODES
              for mask in ("none", "holes")
              for L, block, E in ((1500, 1, 8), (5000, 16, 24), (257, 64, 264), (130, 200, 33))]
    found = faults(chosen, "values", torch.float32) + faults(chosen[::3], "values", torch.bfloat16)
    found += faults([case for case in chosen if case.causal], "causality", torch.bfloat16)
    assert not found, "\n".join(found)


# Times -------------------------------------------------------------------------------------------


def microseconds(run) -> float:
    """The median replay of a captured call."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(30):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 1e3 * sorted(times)[15]


def print_times() -> None:
    print("balance, 5 iterations, us            forward  backward")
    for heads, N in ((512, 16), (128, 64), (64, 128), (32, 256), (16, 512), (8, 512), (8, 1024),
                     (1, 4096)):
        for causal, columns in (("none", "full"), ("strict", "prefix"), ("strict", "prior")):
            logits = torch.randn(1, heads, N, N, device="cuda")
            options = (5, 0.75, causal, columns, 0, None, None)
            result, terms = ops.balance_fwd(logits, *options)
            grad = torch.randn_like(result)
            forward = microseconds(lambda: ops.balance_fwd(logits, *options))
            backward = microseconds(lambda: ops.balance_bwd(grad, logits, terms, *options))
            print(f"{heads:4d} heads of {N:5d}, {causal:6s} {columns:6s}   "
                  f"{forward:9.1f} {backward:9.1f}", flush=True)
    print("pool, 65,536 tokens of 512, bfloat16, us")
    for mode, causal in POOL_MODES:
        x = torch.randn(16, 4096, 512, device="cuda", dtype=torch.bfloat16)
        pooled = ops.pool_fwd(x, 64, mode, causal, None)
        forward = microseconds(lambda: ops.pool_fwd(x, 64, mode, causal, None))
        backward = microseconds(lambda: ops.pool_bwd(pooled, None, 4096, 64, mode, causal))
        print(f"{mode:6s} causal={causal!s:6s}               {forward:9.1f} {backward:9.1f}")


def main() -> None:
    if not torch.cuda.is_available():
        print("no CUDA device; nothing was run")
        sys.exit(77)
    load_libraries()
    failed = 0
    for name, test in list(globals().items()):
        if not name.startswith("test_"):
            continue
        try:
            test()
            print(f"passed  {name}", flush=True)
        except unittest.SkipTest as reason:
            print(f"skipped {name}: {reason}", flush=True)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is this test's failure)
            failed += 1
            print(f"FAILED  {name}\n{str(error)[:3000]}", flush=True)
    print_times()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
