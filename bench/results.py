"""Trains the runs of docs/results.md and prints their table.

  results.py --out DIR [--data DIR] [--rows sort,characters,recall] [--jobs N] [--steps N] [key=value ...]

Several runs share the device. Each leaves its run folder in DIR; DIR/results.json holds the figures.
A run that is already finished there is not run again; one that was cut off is resumed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "build/release/sinkhorn"

# name: (configuration, attention)
ROWS = {
    "sort/full": ("sort", {"kind": "full"}),
    "sort/local": ("sort", {"kind": "local"}),
    "sort/window": ("sort", {"kind": "window", "window": 1}),
    "sort/sinkhorn": ("sort", {"kind": "sinkhorn"}),
    "sort/mixture": ("sort", {"kind": "mixture"}),
    "characters/full": ("characters", {"kind": "full"}),
    "characters/local": ("characters", {"kind": "local"}),
    "characters/window": ("characters", {"kind": "window", "window": 1}),
    "characters/sinkhorn": ("characters", {"kind": "sinkhorn"}),
    "characters/windowed": ("characters", {"preset": "windowed"}),
    "characters/window2": ("characters", {"kind": "window", "window": 2}),
    "characters/mixture": ("characters", {"kind": "mixture"}),
    "recall/full": ("recall", {"kind": "full"}),
    "recall/window": ("recall", {"kind": "window", "window": 1}),
    "recall/window2": ("recall", {"kind": "window", "window": 2}),
    "recall/sinkhorn": ("recall", {"kind": "sinkhorn"}),
    "recall/windowed": ("recall", {"preset": "windowed"}),
    "recall/prior": ("recall", {"columns": "prior", "sort_net": "bilinear", "pooling": "recent"}),
}


def figures_of(run: Path) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    log = run / "log.jsonl"
    for line in log.read_text().splitlines() if log.exists() else []:
        entry = json.loads(line)
        for split in ("valid", "test"):
            if split in entry:
                found[split] = {"step": entry["step"], **entry[split]}
    return found


def train(name: str, out: Path, data: str | None, steps: int | None, keys: list[str]) -> dict:
    config, attention = ROWS[name]
    run = out / name
    if "test" in figures_of(run):
        return {"name": name, "status": 0, "seconds": 0.0, **figures_of(run)}
    command = [str(PROGRAM), "train", str(ROOT / f"configs/results/{config}.ini"),
               "--train.run", str(run)]
    for key, value in attention.items():
        command += [f"--attention.{key}", str(value)]
    if config == "characters":
        command += ["--task.data", str(data)]
    if steps:
        command += ["--train.steps", str(steps)]
    for pair in keys:
        key, value = pair.split("=", 1)
        command += [f"--{key}", value]
    if (run / "config.ini").exists():
        command.append("--resume")
    run.parent.mkdir(parents=True, exist_ok=True)
    begin = time.time()
    done = subprocess.run(command, capture_output=True, text=True)
    (out / (name.replace("/", "-") + ".log")).write_text(done.stdout + done.stderr)
    return {"name": name, "status": done.returncode, "seconds": time.time() - begin,
            "last": (done.stdout + done.stderr).strip().splitlines()[-1:], **figures_of(run)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data")
    parser.add_argument("--rows", default="sort,characters,recall")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--steps", type=int)
    parser.add_argument("keys", nargs="*")
    args = parser.parse_args()
    wanted = args.rows.split(",")
    names = [n for n in ROWS if n in wanted or n.split("/")[0] in wanted]
    args.out.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(
            lambda n: train(n, args.out, args.data, args.steps, args.keys), names))
    (args.out / "results.json").write_text(json.dumps(results, indent=1))
    for r in results:
        parts = [f"{split} {k} {v:.4f}" for split in ("valid", "test")
                 for k, v in r.get(split, {}).items() if k != "step"]
        print(f"{r['name']:22s} rc {r['status']} {r['seconds']:7.1f} s  " + "; ".join(parts)
              + ("" if r["status"] == 0 else f"  {r.get('last')}"), flush=True)


if __name__ == "__main__":
    main()
