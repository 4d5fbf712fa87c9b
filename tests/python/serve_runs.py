"""Runs to serve, and servers of them: fixtures of the tests of `sinkhorn serve`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Iterator

import pytest
from serve_program import Server
from train_program import text_task, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def text_run(folder: Path) -> Path:
    train(folder / "text", text_task(folder / "data", **{"task.length": 64, "train.steps": 300}))
    return folder / "text"


@pytest.fixture(scope="module")
def long_run(folder: Path) -> Path:
    """Untrained, with room for texts that take seconds."""
    train(folder / "long", text_task(folder / "data", **{
        "task.length": 64, "train.steps": 1, "model.max_length": 16384, "model.layers": 2,
        "decoder.sort_net": "bilinear"}))
    return folder / "long"


@pytest.fixture(scope="module")
def server(text_run: Path) -> Iterator[Server]:
    started = Server(text_run, "--slots", 2)
    yield started
    code, said = started.end()
    assert (code, said) == (128 + signal.SIGTERM, "")


@pytest.fixture(scope="module")
def slow(long_run: Path) -> Iterator[Server]:
    """One slot, one place to wait."""
    started = Server(long_run, "--slots", 1, "--queue", 1, "--max-tokens-limit", 16000)
    yield started
    assert started.end(signal.SIGINT) == (128 + signal.SIGINT, "")
