"""Training on a GPU: captured steps equal plain ones to the bit, a resumed run an uninterrupted one,
and no step waits for the device. Skipped where there is none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from cli_program import PROGRAM
from train_program import (CHANCE, Settings, checkpoints, classify_task, command, failed, log_text,
                           sort_task, tensors, text_task, train)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

KINDS = ["sinkhorn", "mixture", "full", "local", "window", "sparse"]


def on_gpu(settings: Settings, **more: object) -> Settings:
    return settings | CHANCE | {"train.device": "cuda", "train.steps": 20, "train.log_every": 5,
                                "train.save_every": 10} | more


def replayed(folder: Path) -> int:
    """Steps made from a captured graph."""
    return json.loads((folder / "result.json").read_text())["replayed_steps"]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_equal_plain_ones(tmp_path: Path, kind: str, precision: str) -> None:
    settings = on_gpu(sort_task(), **{"attention.kind": kind, "train.precision": precision})
    train(tmp_path / "captured", settings)
    train(tmp_path / "plain", settings | {"train.graph": "false"})
    assert log_text(tmp_path / "captured") == log_text(tmp_path / "plain")
    assert replayed(tmp_path / "captured") > 0 == replayed(tmp_path / "plain")


# Beside attention: optimizers, more batches a step, batches of many shapes, recomputed layers.
OTHERS: dict[str, Settings] = {
    "adafactor": {"optimizer.name": "adafactor", "optimizer.schedule": "rsqrt",
                  "optimizer.rate": 0.1},
    "adam": {"optimizer.name": "adam"},
    "accumulated": {"train.accumulate": 2},
    "by tokens": {"train.batch_tokens": 256},
    "recomputed": {"model.checkpoint": "on", "model.layers": 2},
}


# Steps of recomputed layers are not captured.
@pytest.mark.parametrize("name", [*(name for name in OTHERS if name != "recomputed"), "classifier"])
def test_captured_steps_of_other_kinds_equal_plain_ones(tmp_path: Path, name: str) -> None:
    task = classify_task(tmp_path / "data") if name == "classifier" else sort_task()
    settings = on_gpu(task, **OTHERS.get(name, {}), **{"train.precision": "bf16"})
    train(tmp_path / "captured", settings)
    train(tmp_path / "plain", settings | {"train.graph": "false"})
    assert log_text(tmp_path / "captured") == log_text(tmp_path / "plain")
    assert replayed(tmp_path / "captured") > 0 == replayed(tmp_path / "plain")


@pytest.mark.parametrize("graph", ["true", "false"])
def test_recomputed_layers_change_nothing(tmp_path: Path, graph: str) -> None:
    settings = on_gpu(sort_task(), **{"train.precision": "bf16", "model.layers": 2,
                                      "train.graph": graph})
    train(tmp_path / "plain", settings)
    train(tmp_path / "again", settings | {"model.checkpoint": "on"})
    assert log_text(tmp_path / "again") == log_text(tmp_path / "plain")


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


@pytest.mark.parametrize("graph", ["true", "false"])
def test_a_loss_that_explodes_leaves_the_last_good_state(tmp_path: Path, graph: str) -> None:
    """The checkpoint is that of a run that ends one step before. Matrices grow tenfold a step."""
    settings = on_gpu(sort_task(**CHANCE), **{
        "optimizer.rate": 0.01, "optimizer.weight_decay": 1100, "optimizer.clip": 0,
        "optimizer.warmup": 0, "train.graph": graph, "train.steps": 200, "train.log_every": 50,
        "train.save_every": 1000})
    message = failed(tmp_path / "run", settings)
    good = int(message.removeprefix("step ").split(":")[0]) - 1
    (saved,) = checkpoints(tmp_path / "run")
    assert saved.stem == f"step-{good:08d}"
    train(tmp_path / "short", settings | {"train.steps": good})
    assert (replayed(tmp_path / "short") > 0) == (graph == "true")
    state, expected = tensors(saved), tensors(checkpoints(tmp_path / "short")[-1])
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert state[name].equal(tensor) or name.startswith("report/"), name


@pytest.fixture(scope="module")
def wait_counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that counts a program's waits for the device and its copies."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    library = tmp_path_factory.mktemp("library") / "wait_counter.so"
    subprocess.run([compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-o", library,
                    Path(__file__).with_name("wait_counter.cpp"), "-ldl"], check=True)
    return library


class Counts(NamedTuple):
    waits: int
    pageable: int  # copies from or to memory that is not pinned: they wait as well
    pinned: int


def counted(folder: Path, settings: Settings, library: Path) -> Counts:
    """What a training waits for and copies."""
    counts = folder.with_suffix(".waits")
    subprocess.run([PROGRAM, *command(folder, settings)], check=True, stdout=subprocess.DEVNULL,
                   env=os.environ | {"LD_PRELOAD": str(library), "WAIT_COUNTS": str(counts)})
    return Counts(*map(int, counts.read_text().split()))


@pytest.mark.parametrize("graph", ["true", "false"])
@pytest.mark.parametrize("name", [*KINDS, *(name for name in OTHERS if name != "by tokens")])
def test_no_step_waits_for_the_device(tmp_path: Path, wait_counter: Path, name: str,
                                      graph: str) -> None:
    """Loading, capturing, the last report, evaluating and saving do wait; 40 steps more do not."""
    settings = on_gpu(text_task(tmp_path / "text"), **OTHERS.get(name, {"attention.kind": name}), **{
        "train.graph": graph, "train.precision": "bf16",
        "train.log_every": 1000, "train.save_every": 1000})
    few = counted(tmp_path / "few", settings | {"train.steps": 20}, wait_counter)
    many = counted(tmp_path / "many", settings | {"train.steps": 60}, wait_counter)
    assert few.waits > 0 and few.pageable > 0  # the counter counts
    assert many.waits == few.waits
    assert many.pageable == few.pageable
    assert many.pinned >= few.pinned + 40, "a step's batch comes from pinned memory"
