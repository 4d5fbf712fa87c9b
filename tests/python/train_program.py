"""Trains with the program of this build: small tasks, interrupted runs, and what they left.

A configuration is a dictionary of "section.key": value. Runs are on one CPU thread: they are tiny.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_program import PROGRAM, run
from torch import Tensor

safe_open = pytest.importorskip("safetensors").safe_open

Settings = dict[str, Any]

# One layer; no chance but the data's order, so that tests add what they are about.
SMALL: Settings = {
    "model.layers": 1, "model.width": 32, "model.ff_width": 64, "model.heads": 2,
    "model.dropout": 0, "model.attention_dropout": 0, "model.relu_dropout": 0,
    "attention.block": 4, "attention.stride": 4, "attention.summary": 2, "attention.gumbel": "off",
    "optimizer.rate": 3e-3, "optimizer.schedule": "constant", "optimizer.warmup": 10,
    "train.device": "cpu", "train.threads": 1, "train.batch": 8, "train.eval_every": 0,
}
# Everything that draws random numbers while training.
CHANCE: Settings = {
    "model.dropout": 0.1, "model.attention_dropout": 0.1, "model.relu_dropout": 0.1,
    "attention.gumbel": "on",
}


def sort_task(**more: Any) -> Settings:
    return SMALL | {
        "task.name": "sort", "task.sort_symbols": 16, "task.sort_train_max": 15,
        "task.sort_test_max": 15, "task.sort_test_size": 32,
    } | more


def text_task(folder: Path, **more: Any) -> Settings:
    """Sentences of a few words that follow from one another, as bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    lines = [" ".join(words[(n + i) % 7] for i in range(2 + n % 6)) + "\n" for n in range(200)]
    (folder / "text.txt").write_text("".join(lines))
    return SMALL | {"task.name": "text", "task.data": folder / "text.txt", "task.tokens": "bytes",
                    "task.cache": folder / "cache", "task.length": 24} | more


def classify_task(folder: Path, **more: Any) -> Settings:
    """Whether there is an x in a word."""
    folder.mkdir(parents=True, exist_ok=True)
    gen = torch.Generator().manual_seed(3)
    for name, rows in (("train", 400), ("valid", 32), ("test", 32)):
        lines = []
        for _ in range(rows):
            letters = torch.randint(0, 24, (int(torch.randint(2, 20, (1,), generator=gen)),),
                                    generator=gen)
            word = "".join("abcdefghijklmnopqrstuvwxx"[i] for i in letters)
            lines.append(f"{'yes' if 'x' in word else 'no'}\t{word}\n")
        (folder / f"{name}.tsv").write_text("".join(lines))
    return SMALL | {"task.name": "classify", "task.data": folder, "task.tokens": "bytes",
                    "task.cache": folder / "cache", "task.length": 24} | more


def command(folder: Path, settings: Settings, *flags: str) -> list[str]:
    """What is shared stands in a file, which may state what a test's kind of attention or optimizer
    does not look at; the rest on the command line, where that would be refused."""
    lines = []
    for key in SMALL.keys() & settings.keys():
        section, name = key.split(".")
        lines.append(f"[{section}]\n{name} = {settings[key]}\n")
    shared = folder.parent / f"{folder.name}.ini"
    shared.write_text("".join(sorted(lines)))
    words = ["train", str(shared), "--train.run", str(folder)]
    for key, value in settings.items():
        words += [] if key in SMALL else [f"--{key}", str(value)]
    return [*words, *flags]


def train(folder: Path, settings: Settings, *flags: str) -> str:
    """Trains to the end; what was printed."""
    done = run(*command(folder, settings, *flags))
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", done.stderr
    return done.stdout


def failed(folder: Path, settings: Settings, *flags: str, code: int = 1) -> str:
    """The one line of a training that must fail."""
    done = run(*command(folder, settings, *flags))
    assert done.returncode == code, (done.returncode, done.stderr)
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("sinkhorn: "), done.stderr
    return lines[0].removeprefix("sinkhorn: ")


def start(folder: Path, settings: Settings, *flags: str, **how: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([PROGRAM, *command(folder, settings, *flags)], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how)


def wait_for_steps(process: subprocess.Popen[str], count: int) -> bool:
    """Reads until `count` steps were reported; false if the run ended before."""
    for line in process.stdout:
        count -= "/" in line and line.startswith("step ")
        if count <= 0:
            return True
    return False


def log_text(folder: Path) -> str:
    return (folder / "log.jsonl").read_text()


def log_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log_text(folder).splitlines()]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in log_lines(folder) if "loss" in line]


def figures(folder: Path, split: str) -> dict[str, float]:
    """Of the last evaluation of a split."""
    return [line[split] for line in log_lines(folder) if split in line][-1]


def checkpoints(folder: Path) -> list[Path]:
    """From the oldest to the newest, without the best."""
    return sorted((folder / "checkpoints").glob("step-*.safetensors"))


def tensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def check_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint that must be whole, finite and of the step in its name."""
    with safe_open(path, framework="pt") as file:
        assert int(file.metadata()["step"]) == int(path.stem.removeprefix("step-"))
    found = tensors(path)
    assert any(name.startswith("model/") for name in found)
    assert any(name.startswith("optimizer/") for name in found)
    for name, tensor in found.items():
        assert not tensor.is_floating_point() or tensor.isfinite().all(), f"{path}: {name}"
    return found


def assert_same_run(folder: Path, expected: Path) -> None:
    """The same log and the same last state, to the bit."""
    assert log_text(folder) == log_text(expected)
    ours, theirs = checkpoints(folder)[-1], checkpoints(expected)[-1]
    assert ours.name == theirs.name
    state, truth = check_checkpoint(ours), check_checkpoint(theirs)
    assert state.keys() == truth.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, truth[name]), name
