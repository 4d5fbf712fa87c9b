"""Peak memory of a training step from 1k to 64k tokens, one sequence, beside c0 + c1 L + c2 N^2.

  memory.py [--device cuda] [--blocks 64,32] [--lengths 1024,...]

A character language model (d = 256, 4 layers, 4 heads, bytes of this project's own sources), two steps
a length. c0, c1 and c2 are fitted by least squares to all block sizes together: with one of them N^2
could not be told from L^2.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


def peak(length: int, block: int, args, folder: Path) -> float:
    text = folder / "text.txt"
    if not text.exists():
        sources = b"\n".join(p.read_bytes() for p in sorted(ROOT.glob("src/**/*.cpp")))
        text.write_bytes(sources.decode(errors="ignore").encode())
    done = subprocess.run(
        [ROOT / "build/release/sinkhorn", "train", ROOT / "configs/study/characters.task.ini",
         "--task.name", "text", "--task.data", text, "--task.cache", folder / "cache",
         "--task.length", str(length), "--attention.kind", args.kind,
         *([] if args.kind in ("full", "sparse") else ["--attention.block", str(block)]),
         "--train.batch", "1", "--train.steps", "2",
         "--train.eval_batches", "1", "--train.device", args.device, "--train.graph", "false",
         "--train.run", folder / f"run{length}-{block}"], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stderr.strip())
    return float(re.search(r"peak memory ([0-9.]+) GiB", done.stdout).group(1)) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kind", default="sinkhorn")
    parser.add_argument("--blocks", default="64,32")
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384,32768,65536")
    args = parser.parse_args()
    lengths = [int(n) for n in args.lengths.split(",")]
    sizes = [(n, int(b)) for b in args.blocks.split(",") for n in lengths]
    with tempfile.TemporaryDirectory() as folder:
        peaks = [peak(n, b, args, Path(folder)) for n, b in sizes]
    rows = torch.tensor([[1.0, n, (-(-n // b)) ** 2] for n, b in sizes], dtype=torch.float64)
    fit = torch.linalg.lstsq(rows, torch.tensor(peaks, dtype=torch.float64)[:, None]).solution
    c0, c1, c2 = fit.flatten().tolist()
    heads_layers = 16
    print(f"{args.kind}, {args.device}: {c0:.0f} MiB + {c1 * 1024:.1f} KiB a token"
          f" + {c2 * 2**20 / 4 / heads_layers:.1f} float32 N x N matrices a head and layer\n")
    print("| L | b | N | MiB | model |\n|---|---|---|---|---|")
    for (n, b), p, row in zip(sizes, peaks, rows):
        print(f"| {n} | {b} | {-(-n // b)} | {p:.0f} | {float(row @ fit.flatten()):.0f} |")


if __name__ == "__main__":
    main()
