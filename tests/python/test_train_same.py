"""A configuration and a seed make one run, to the bit, whatever chance there is in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train_program import (CHANCE, Settings, assert_same_run, checkpoints, classify_task, log_lines,
                           tensors, text_task, train)

# Two threads, and wide enough for work to be shared out between them.
STEPS: Settings = {"train.steps": 12, "train.log_every": 1, "train.save_every": 4,
                   "train.keep": 9, "train.eval_every": 6, "train.batch": 16,
                   "train.threads": 2, "model.width": 128, "model.ff_width": 256, "model.heads": 4}
TASKS = {
    "text": lambda folder: text_task(folder, **{"task.tokens": "pieces", "task.vocab": 300,
                                                  "task.length": 96, "train.precision": "bf16"}),
    "classify": lambda folder: classify_task(folder, **{"optimizer.name": "adafactor"}),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module", params=TASKS)
def first(request: pytest.FixtureRequest, data: Path) -> tuple[Settings, Path]:
    """A run of a task, with dropout and Gumbel noise."""
    settings = TASKS[request.param](data / request.param) | STEPS | CHANCE
    folder = data / f"{request.param}_run"
    train(folder, settings)
    assert (data / request.param / "cache").is_dir()
    return settings, folder


def assert_same(folder: Path, expected: Path) -> None:
    """The same log, and the same tensors in every checkpoint."""
    assert_same_run(folder, expected)
    names = [path.name for path in checkpoints(expected)]
    assert len(names) >= 3 and names == [path.name for path in checkpoints(folder)]
    for name in [*names, "best.safetensors"]:
        ours, theirs = (tensors(at / "checkpoints" / name) for at in (folder, expected))
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            assert tensor.dtype == ours[key].dtype and torch.equal(tensor, ours[key]), (name, key)


def test_the_same_run_again(first: tuple[Settings, Path], tmp_path: Path) -> None:
    """From data that is read anew: its tokens and pieces are made as they were."""
    settings, expected = first
    train(tmp_path / "run", settings | {"task.cache": tmp_path / "cache"})
    assert_same(tmp_path / "run", expected)


@pytest.mark.parametrize("key", [*CHANCE, "train.seed"])
def test_every_chance_makes_a_difference(first: tuple[Settings, Path], tmp_path: Path,
                                         key: str) -> None:
    """Else the tests above would say nothing of it."""
    settings, expected = first
    other = {"attention.gumbel": "off", "train.seed": 2}.get(key, 0)
    train(tmp_path / "run", settings | {"train.steps": 2, "train.eval_every": 0, key: other})
    ours, theirs = log_lines(tmp_path / "run")[:2], log_lines(expected)[:2]
    assert [line["step"] for line in ours] == [1, 2]
    assert ours[1]["loss"] != theirs[1]["loss"]
