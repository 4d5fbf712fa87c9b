"""Small trained runs and their exports, for the tests of both."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from cli_program import output
from train_program import Settings, classify_task, sort_task, text_task, train

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
STEPS: Settings = {"train.steps": 60, "train.eval_every": 20, "train.save_every": 20}


def export_runs(folder: Path, *names: str) -> Path:
    """A trained run of each task named, NAME, and its exports, NAME.float32, NAME.bf16, NAME.fp16."""
    # So slowly that a loss is left in which rounding shows.
    slow: Settings = {"optimizer.rate": 3e-4}
    tasks = {"sort": sort_task, "text": lambda: text_task(folder / "text_data"),
             "classify": lambda: classify_task(folder / "classify_data", **slow)}
    for name in names:
        train(folder / name, tasks[name]() | STEPS | {"model.layers": 2})
        for dtype in ("float32", *HALF):
            output("export", folder / name, folder / f"{name}.{dtype}", "--dtype", dtype)
    return folder


@functools.cache
def evaluated(folder: Path, *words: str) -> dict[str, Any]:
    """What `eval` says of a folder that does not change."""
    return json.loads(output("eval", folder, "--json", *words))


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())
