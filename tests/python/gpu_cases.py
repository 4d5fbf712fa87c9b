"""The shared list of cases on a GPU, without pytest: one line a group, the first faults in full.

  gpu_cases.py [--only attention] [--dtype bfloat16] [--check values] [--match D=64] [--device cpu]

Groups run in processes of their own, several at a time, so that a broken kernel spoils its own
group alone. Exit code 1 if anything failed, 77 without a GPU. --sanitize runs a few cases in this
process, our operators only, for compute-sanitizer:

  compute-sanitizer --tool memcheck python3 tests/python/gpu_cases.py --sanitize
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if "--sanitize" in sys.argv:  # every tensor an allocation of its own
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cases  # noqa: E402  (found through the path set above)
import gpu_checks  # noqa: E402
import tile_cases  # noqa: E402
from cases import Attention, Balance, Case, Pool, Sortcut  # noqa: E402
from support import call, load_libraries, value_and_grads  # noqa: E402

OPS = ("attention", "sortcut", "balance", "pool")
TYPES = ("bfloat16", "float16", "float32")
CHECKS = ("values", "half_sort", "strides", "heads_apart", "blocks_apart", "causality", "dropout",
          "graph", "saved")
SHARDS = {"attention": 3}  # of the values, so that no group takes much longer than the rest
ON_CPU_AT_MOST = 30_000_000  # cases.cost, unless --all
SHOWN = 4  # faults in full, a group
MEMORY_TRIES = 6  # of a case that finds no memory beside those of other processes

ALL: list[Case] = [*cases.VALUES, *tile_cases.TILES, *cases.GRADCHECK]

SOME = [  # for what need not be asked of every case
    Pool("mean", True, "right", L=1000, block=32, E=64),
    Pool("sum", False, "holes", L=1000, block=32, E=64),
    Pool("recent", True, "right", L=300, block=16, E=17),
    Balance("none", "full", 5, noise=True, masked=True, N=64),
    Balance("strict", "prefix", 5, noise=True, masked=True, N=65),
    Balance("inclusive", "prior", 5, noise=True, masked=True, N=130),
    Balance("none", "full", 3, noise=True, masked=True, N=130),
    Balance("strict", "prior", 3, 1, N=300),
    Balance("none", "full", 5, N=512),
    *(Attention(causal, combine, window, mask, B=2, H=2, L=330, block=block, D=D)
      for (causal, combine, window), mask, block, D in zip(
          cases.ATTENTION_RULES, ("right", "none", "holes", "none") * 4, (64, 32, 16, 64) * 4,
          (64, 64, 32, 128) * 4)),
    *(Attention(causal, "concat", window, "right", False, 2, 2, 330, 64, 64)
      for causal, window in cases.LOCAL_RULES[:6]),
    Attention("strict", "concat", 0, "none", B=1, H=2, L=4096, block=64, D=64),
    Attention("none", "concat", 0, "none", B=1, H=2, L=2100, block=16, D=64),
    Attention("none", "concat", 0, "none", B=2, H=2, L=320, block=64, D=64),
    Attention("strict", "concat", 1, "none", B=2, H=2, L=320, block=64, D=64),
    Attention("strict", "concat", 1, "none", False, 2, 2, 330, 64, 64),
    Attention("strict", "concat", 0, "none", B=2, H=2, L=512, block=128, D=64),
    Attention("strict", "concat", 0, "none", B=2, H=2, L=768, block=256, D=64),
    Attention("inclusive", "concat", 0, "none", B=1, H=2, L=512, block=256, D=40),
    Attention("none", "concat", 0, "none", B=1, H=2, L=512, block=256, D=64),
    Attention("strict", "concat", 0, "none", B=1, H=1, L=1024, block=512, D=64),
    Attention("strict", "concat", 0, "none", B=2, H=2, L=320, block=64, D=128),
    Attention("inclusive", "concat", 0, "none", B=2, H=2, L=144, block=16, D=72),
    Attention("strict", "concat", 0, "none", B=2, H=2, L=320, block=64, D=256),
    Attention("inclusive", "concat", 0, "none", B=2, H=2, L=144, block=16, D=136),
    Attention("strict", "concat", 0, "none", B=2, H=2, L=320, block=64, D=32),
    Attention("inclusive", "concat", 0, "none", B=2, H=2, L=144, block=16, D=24),
    Attention("none", "concat", 0, "none", B=2, H=2, L=512, block=128, D=32),
    Attention("strict", "concat", 1, "none", B=2, H=2, L=320, block=64, D=32),
    Attention("strict", "concat", 0, "none", B=2, H=2, L=256, block=64, D=64),
    Attention("none", "concat", 0, "none", B=2, H=2, L=512, block=64, D=32),
    Attention("none", "concat", 0, "none", B=2, H=2, L=768, block=64, D=64),
    Attention("strict", "concat", 0, "none", B=2, H=2, L=512, block=64, D=40),
    Attention("inclusive", "concat", 0, "none", B=2, H=2, L=128, block=64, D=64),
    Attention("strict", "concat", 1, "none", B=2, H=2, L=896, block=64, D=64),
    Attention("strict", "concat", 0, "none", B=1, H=2, L=2048, block=64, D=64),
    Attention("inclusive", "concat", 0, "none", B=2, H=2, L=112, block=16, D=72),
    Sortcut(2, "none", B=2, H=2, Lq=300, L=512, block=64, D=64),
    Sortcut(2, "right", B=2, H=2, Lq=300, L=500, block=32, D=64),
    Sortcut(3, "none", B=1, H=2, Lq=700, L=1000, block=64, D=128),
    Attention("strict", "concat", 0, "none", B=2, H=2, L=320, block=64, D=64, zero_rows=True),
    Attention("none", "outputs", 0, "none", B=2, H=2, L=144, block=16, D=128, zero_rows=True),
    Attention("none", "concat", 0, "none", B=2, H=2, L=640, block=64, D=64, zero_rows=True),
    Attention("strict", "concat", 1, "none", B=2, H=2, L=320, block=64, D=64, zero_rows=True),
    Sortcut(2, "none", B=2, H=2, Lq=300, L=512, block=64, D=64, zero_rows=True),
    Sortcut(3, "none", B=1, H=2, Lq=300, L=640, block=64, D=128, zero_rows=True),
]


def is_causal(case: Case) -> bool:
    if case.op == "pool":
        return case.causal
    return case.op != "sortcut" and case.causal != "none" and getattr(case, "columns", "") != "full"


def group_cases(check: str, op: str, shard: int) -> list[Case]:
    if check == "values":
        return [case for case in ALL if case.op == op][shard::SHARDS.get(op, 1)]
    if check == "causality":
        chosen = SOME + tile_cases.ATTENTION_TILES[::5] + tile_cases.BALANCE_TILES[::7]
        return [case for case in chosen if is_causal(case)]
    if check == "blocks_apart":  # the sorts of few and of many blocks, and the library's; D = 64:
        # the sort inside attention
        return [Attention(causal, "concat", window, "none", True, 1, 2, blocks * 64, 64, D)
                for blocks, D in ((5, 32), (20, 32), (70, 32), (131, 32), (4, 64), (8, 64), (16, 64),
                                  (28, 64))
                for causal, window in (("strict", 0), ("strict", 1), ("inclusive", 0))]
    if check in ("dropout", "half_sort", "heads_apart"):
        more = tile_cases.FEW_BLOCKS if check == "heads_apart" else []
        return [case for case in SOME + more if case.op in ("attention", "sortcut")]
    return SOME


def faults_of(check: str, case: Case, dtype: torch.dtype, device: str,
              worst: dict[str, tuple[float, str]]) -> Iterator[str]:
    if check == "values" and dtype == torch.float64:
        return gpu_checks.float64_values(case, device)
    if check == "values":
        return gpu_checks.values(case, dtype, device, worst)
    if check == "half_sort":
        return gpu_checks.values(case, dtype, device, worst, sort_dtype=dtype)
    return getattr(gpu_checks, check)(case, dtype, device)


def run_group(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own."""
    check, op, dtype_name, shard = name.split("/")
    chosen = group_cases(check, op, int(shard))
    if options.device == "cpu" and not options.all:
        chosen = [case for case in chosen if cases.cost(case) <= ON_CPU_AT_MOST]
    ops = options.only.split(",") if options.only else OPS
    chosen = [case for case in chosen if case.op in ops and options.match in str(case)]
    worst: dict[str, tuple[float, str]] = {}
    failures: list[str] = []
    passed, begin = 0, time.time()
    lacked: collections.Counter[Case] = collections.Counter()  # memory, for what runs beside
    waiting = list(chosen)
    while waiting:
        case = waiting.pop(0)
        found: list[str] = []
        try:
            found = list(faults_of(check, case, getattr(torch, dtype_name), options.device, worst))
            if options.device == "cuda":
                torch.cuda.synchronize()
                if torch.cuda.memory_reserved() > 10 << 30:
                    torch.cuda.empty_cache()
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            lacked[case] += 1
            if lacked[case] < MEMORY_TRIES:
                waiting.append(case)  # again, after all others
                time.sleep(10 * (lacked[case] > 1))
                continue
            found.append(f"{type(error).__name__}: {str(error).split(chr(10))[0]}")
        except Exception as error:  # noqa: BLE001  (whatever it is, it is this case's failure)
            found.append(f"{type(error).__name__}: {str(error).split(chr(10))[0]}")
            if "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError":
                failures.append(f"{case}\n      {found[-1]}")
                failures.append(f"the {len(waiting)} cases after it were not run")
                break
        passed += not found
        failures += [f"{case}\n      " + "\n      ".join(found)] if found else []
    return {"passed": passed, "failures": failures, "worst": worst, "seconds": time.time() - begin}


def start_group(name: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--group", name, "--device", options.device,
               "--match", options.match, "--only", options.only] + ["--all"] * options.all
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env,
                              timeout=options.timeout)
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        fault = f"still running after {options.timeout} s"
    except (json.JSONDecodeError, IndexError):
        fault = f"exit code {done.returncode}: " + "\n      ".join(done.stderr.splitlines()[-6:])
    return {"passed": 0, "failures": [fault], "worst": {}, "seconds": 0.0}


def report(name: str, result: dict[str, Any]) -> None:
    failures = result["failures"]
    worst = ", ".join(f"{where} {share:.0%}" for share, where in result["worst"].values())
    print(f"{name:28s} {result['passed']:4d} passed {len(failures):4d} failed "
          f"{result['seconds']:5.1f} s" + (f"  worst, of its bound: {worst}" if worst else ""))
    for failure in failures[:SHOWN]:
        print(f"    {failure}")
    if len(failures) > SHOWN:
        print(f"    and {len(failures) - SHOWN} more")
    sys.stdout.flush()


def group_names(options: argparse.Namespace) -> list[str]:
    names = []
    for check in options.check.split(","):
        if check == "graph" and options.device != "cuda":
            continue
        ops = OPS if check == "values" else ("all",)
        for op in ops:
            if options.only and check == "values" and op not in options.only.split(","):
                continue
            for dtype in options.dtype.split(","):
                if check == "half_sort" and dtype == "float32":
                    continue
                shards = SHARDS.get(op, 1) if check == "values" else 1
                names += [f"{check}/{op}/{dtype}/{shard}" for shard in range(shards)]
    return names


def sanitize(device: str, match: str) -> None:
    """Ours alone, on inputs made on the CPU; every result is read back."""
    small = [case for case in SOME
             if getattr(case, "L", 0) <= 1000 and getattr(case, "N", 0) <= 130]
    small += [Attention("none", "concat", 0, "none", B=17, H=1, L=1280, block=64, D=64)]
    small += [Balance(causal, "full", 2, B=1, H=1, N=N)  # crews of CTAs
              for causal, N in (("none", 200), ("none", 400), ("none", 600), ("strict", 600))]
    small = [case for case in small if match in str(case)]
    count = 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for case in small[:: {torch.bfloat16: 1, torch.float16: 4, torch.float32: 2}[dtype]]:
            inputs = case.inputs(dtype, device)
            drops = count % 5 == 4 and case.op in ("attention", "sortcut")
            more = {"dropout_p": 0.2} if drops else {}
            for x in value_and_grads("sinkhorn", case, inputs, **more).values():
                x.cpu()
            call("sinkhorn", case, inputs).cpu()
            count += 1
    print(f"{count} cases ran")
    sys.exit(0 if count else "gpu_cases: no case's name contains " + match)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="operators, by comma")
    parser.add_argument("--dtype", default=",".join(TYPES))
    parser.add_argument("--check", default=",".join(CHECKS))
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--timeout", type=int, default=600)
    parser.add_argument("--all", action="store_true", help="on the CPU, the costly cases too")
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_cases: no CUDA device; nothing was run (--device cpu runs the list there)")
        sys.exit(77)  # CTest shows it as skipped
    torch.set_num_threads(1)
    if options.sanitize or options.group:
        load_libraries(reference=not options.sanitize)
    if options.sanitize:
        return sanitize(options.device, options.match)
    if options.group:
        print(json.dumps(run_group(options.group, options)))
        return
    begin, failed, passed = time.time(), 0, 0
    jobs = options.jobs or max(1, min(8, (os.cpu_count() or 1) * (1 if options.device == "cpu" else
                                                                  2) // 2))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        runs = {pool.submit(start_group, name, options): name for name in group_names(options)}
        for run in concurrent.futures.as_completed(runs):
            report(runs[run], run.result())
            failed += len(run.result()["failures"])
            passed += run.result()["passed"]
    print(f"{passed} passed, {failed} failed on {options.device} in {time.time() - begin:.0f} s")
    if not passed and not failed:
        sys.exit("gpu_cases: no case is of these operators, types, checks and names")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
