"""Whole training steps on a GPU: the program beside the same model in PyTorch with SDPA.

  gpu_step.py [--sizes tiny,64k] [--preset NAME] [--no-compile] [--no-peers] [--out FILE]

Both sides: language models of the same sizes and heads, pre-norm, ReLU, tied output, no dropout,
bf16, AdamW, random tokens. Ours: Sinkhorn attention by the preset `prefix` (own and sorted block, 5
iterations, Gumbel noise, linear sort network) or another, steps captured in a graph by the program.
The peer is timed eager, with torch.compile and with mode="reduce-overhead"; the best counts.
Vocabularies: 8,000 for tiny, 32,000 for lm_*, 259 (bytes and pad, begin, end) for the rest. The
program also takes the norm of the gradients, which the peer does not.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench")]

from step_peer import BYTES, SIZES, Size, tokens_per_second  # noqa: E402
from timing import machine  # noqa: E402

PROGRAM = Path(os.environ.get("SINKHORN_BUILD_DIR", ROOT / "build" / "release")) / "sinkhorn"
MODES = {"eager": None, "compiled": "default", "reduce-overhead": "reduce-overhead"}
ROUNDS = 4  # the first one warms up and captures


# Random text and its vocabulary ------------------------------------------------------------------


def word(number: int) -> str:
    """Five letters, another word for each number."""
    letters = ""
    for _ in range(5):
        number, letter = divmod(number, 26)
        letters += chr(ord("a") + letter)
    return letters


def _field(number: int, payload: bytes | int | float) -> bytes:
    """One field of a protocol buffer: varint, 32 bits or bytes."""

    def varint(value: int) -> bytes:
        out = b""
        while value > 127:
            out += bytes([value & 127 | 128])
            value >>= 7
        return out + bytes([value])

    if isinstance(payload, float):
        return varint(number << 3 | 5) + struct.pack("<f", payload)
    if isinstance(payload, int):
        return varint(number << 3) + varint(payload)
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def write_pieces(path: Path, vocab: int) -> int:
    """A SentencePiece model of exactly `vocab` pieces: pad, begin, end, unknown, the bytes, words.
    Returns how many words it knows."""
    control, unknown, byte, normal = 3, 2, 6, 1
    pieces = [("<pad>", 0.0, control), ("<s>", 0.0, control), ("</s>", 0.0, control),
              ("<unk>", 0.0, unknown)]
    pieces += [(f"<0x{value:02X}>", 0.0, byte) for value in range(256)]
    words = vocab - len(pieces)
    pieces += [("\u2581" + word(number), -10.0, normal) for number in range(words)]
    model = b"".join(_field(1, _field(1, text.encode()) + _field(2, score) + _field(3, kind))
                     for text, score, kind in pieces)
    unigram = 1
    model += _field(2, _field(3, unigram) + _field(4, vocab) + _field(35, 1) + _field(40, 3)
                    + _field(41, 1) + _field(42, 2) + _field(43, 0))
    model += _field(3, _field(1, b"identity") + _field(3, 0) + _field(4, 0) + _field(5, 1))
    path.write_bytes(model)
    return words


def write_data(folder: Path, s: Size) -> dict[str, object]:
    """Random text; the program's settings that read it as tokens of the vocabulary."""
    draw = random.Random(5)
    text = folder / f"text{s.vocab}.txt"
    if s.vocab == BYTES:
        if not text.exists():
            letters = "abcdefghijklmnopqrstuvwxyz     "
            text.write_text("\n".join("".join(draw.choices(letters, k=99)) for _ in range(40000)))
        return {"task.data": text, "task.tokens": "bytes"}
    model = folder / f"pieces{s.vocab}.model"
    if not text.exists():
        words = write_pieces(model, s.vocab)
        text.write_text("\n".join(" ".join(word(draw.randrange(words)) for _ in range(20))
                                  for _ in range(8000)))
    return {"task.data": text, "task.tokens": "pieces", "task.tokenizer": model}


# The two sides -----------------------------------------------------------------------------------


def in_numbers(text: str) -> float:
    """The program's 861k or 1.57M."""
    return float(text.rstrip("kMG")) * {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1], 1.0)


def ours(s: Size, folder: Path, preset: str, device: str, more: list[str]) -> tuple[float, str]:
    """Tokens a second, the median over rounds after the first, and the program's first line."""
    settings = write_data(folder, s) | {
        "task.name": "text", "task.cache": folder / "cache", "task.length": s.length,
        "model.size": s.size, "model.heads": s.heads, "model.tied": "true", "model.dropout": 0,
        "model.attention_dropout": 0, "model.relu_dropout": 0, "model.label_smoothing": 0,
        "attention.kind": "sinkhorn", "attention.preset": preset,
        "attention.block": s.block,
        "optimizer.name": "adamw", "optimizer.schedule": "constant", "optimizer.clip": 0,
        "train.device": device, "train.precision": "bf16", "train.graph": "true",
        "train.batch": s.batch, "train.steps": ROUNDS * s.steps, "train.log_every": s.steps,
        "train.eval_every": 0, "train.eval_batches": 1, "train.save_every": ROUNDS * s.steps,
        "train.keep": 1, "train.run": folder / f"run-{s.name.split(',')[0]}"}
    empty = folder / "empty.ini"
    empty.touch()
    command = [str(PROGRAM), "train", str(empty)]
    for key, value in settings.items():
        command += [f"--{key}", str(value)]
    done = subprocess.run(command + more, capture_output=True, text=True)
    shutil.rmtree(settings["train.run"], ignore_errors=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip() or f"exit code {done.returncode}")
    speeds = [in_numbers(found) for found in re.findall(r"  (\S+) tokens/s", done.stdout)]
    return statistics.median(speeds[1:]), done.stdout.splitlines()[0].split(": ", 1)[1]


def peers(s: Size, modes: list[str], device: str) -> dict[str, float]:
    found = {}
    for name in modes:
        try:
            found[name] = tokens_per_second(s, MODES[name], device)
        except RuntimeError as error:
            print(f"  {s.name}, {name}: {str(error).splitlines()[0]}", flush=True)
        torch.compiler.reset()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return found


def scratch() -> str | None:
    """In memory where there is room: checkpoints of the big model are some GB."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and shutil.disk_usage(shared).free > 16 << 30 else None


def thousands(value: float | None) -> str:
    return "" if value is None else f"{value / 1e3:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="", help="names, by comma; all of them otherwise")
    parser.add_argument("--preset", default="prefix", help="of ours' attention")
    parser.add_argument("--no-compile", action="store_true", help="the peer eager only")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench_gpu_step.jsonl")
    parser.add_argument("more", nargs="*", help="further arguments of the program, after --")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("bench-gpu-step: needs a CUDA device, and PyTorch finds none here")
    if not PROGRAM.exists():
        sys.exit(f"bench-gpu-step: no {PROGRAM}; run `make build`")
    modes = [] if options.no_peers else ["eager"] if options.no_compile else list(MODES)
    facts = machine() | {"gpu": torch.cuda.get_device_name() if options.device == "cuda" else ""}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    print(f"thousand tokens a second, training, preset {options.preset}\n\n"
          "| | vocabulary | ours | " + " | ".join(
        f"peer, {mode}" for mode in modes) + " | ours over the best peer | goal |\n|---|---|---|"
        + "---|" * (len(modes) + 2), flush=True)
    failed = False
    with open(options.out, "w") as sink, tempfile.TemporaryDirectory(dir=scratch()) as folder:
        sink.write(json.dumps({"bench": "facts"} | facts) + "\n")
        for s in SIZES:
            if options.sizes and s.name.split(",")[0] not in options.sizes.split(","):
                continue
            speed, note = None, ""
            try:
                speed, note = ours(s, Path(folder), options.preset, options.device, options.more)
            except RuntimeError as error:
                failed = True
                print(f"  {s.name}, ours: {error}", flush=True)
            found = peers(s, modes, options.device)
            ratio = speed / max(found.values()) if speed and found else None
            cells = [f"{s.name}, {s.batch} x {s.length}, b = {s.block}", str(s.vocab),
                     thousands(speed), *(thousands(found.get(mode)) for mode in modes),
                     "" if ratio is None else f"{ratio:.2f}",
                     f"{s.goal:g}" + ("" if ratio is None else
                                      ": met" if ratio >= s.goal else ": MISSED")]
            print("| " + " | ".join(cells) + " |", flush=True)
            sink.write(json.dumps({"bench": "step", "size": s.name, "vocab": s.vocab,
                                   "preset": options.preset, "ours": speed,
                                   "peers": found, "goal": s.goal, "model": note}) + "\n")
            sink.flush()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
