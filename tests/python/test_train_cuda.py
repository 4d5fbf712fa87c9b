"""Training on a GPU: captured steps equal plain ones to the bit, and a resumed run an uninterrupted one.
Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train_program import CHANCE, Settings, log_text, sort_task, text_task, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

KINDS = ["sinkhorn", "mixture", "full", "local", "window", "sparse"]


def on_gpu(settings: Settings, **more: object) -> Settings:
    return settings | CHANCE | {"train.device": "cuda", "train.steps": 20, "train.log_every": 5,
                                "train.save_every": 10} | more


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_equal_plain_ones(tmp_path: Path, kind: str, precision: str) -> None:
    settings = on_gpu(sort_task(), **{"attention.kind": kind, "train.precision": precision})
    train(tmp_path / "captured", settings)
    train(tmp_path / "plain", settings | {"train.graph": "false"})
    assert log_text(tmp_path / "captured") == log_text(tmp_path / "plain")


def test_repeated_runs_are_equal(tmp_path: Path) -> None:
    settings = on_gpu(text_task(tmp_path / "text"))
    train(tmp_path / "one", settings)
    train(tmp_path / "two", settings)
    assert log_text(tmp_path / "one") == log_text(tmp_path / "two")


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    settings = on_gpu(text_task(tmp_path / "text"), **{"optimizer.schedule": "constant"})
    train(tmp_path / "whole", settings)
    train(tmp_path / "parts", settings | {"train.steps": 10})
    train(tmp_path / "parts", settings, "--resume")
    lines = [line for line in log_text(tmp_path / "whole").splitlines() if '"step":10' not in line]
    parts = [line for line in log_text(tmp_path / "parts").splitlines() if '"step":10' not in line]
    assert lines == parts
