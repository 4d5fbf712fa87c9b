"""Every attention and every sort network learns, in every precision, with every optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from train_program import (
    CHANCE,
    SMALL,
    checkpoints,
    classify_task,
    figures,
    losses,
    sort_task,
    tensors,
    text_task,
    train,
)

# Sorting lists of up to 15 of 16 symbols. By the symbols' frequencies a token costs 2.81 nats; from
# the place and the symbol before it, without a look at the list, 1.62.
SORT = sort_task(**{"model.width": 64, "model.ff_width": 128, "model.heads": 4, "train.batch": 32,
                    "train.steps": 200})
BAR = 0.75

ATTENTION: dict[str, dict[str, Any]] = {
    "sinkhorn": {},
    "mixture": {"kind": "mixture"},
    "full": {"kind": "full"},
    "local": {"kind": "local"},
    "window": {"kind": "window"},
    "sparse": {"kind": "sparse"},
    "sparse merged": {"kind": "sparse", "merged": "on"},
    "linear_relu": {"sort_net": "linear_relu"},
    "mlp": {"sort_net": "mlp"},
    "mlp_relu": {"sort_net": "mlp_relu"},
    "bilinear": {"sort_net": "bilinear"},
    "paper": {"preset": "paper"},
    "prefix": {"preset": "prefix"},
    "windowed": {"preset": "windowed"},
    "outputs": {"combine": "outputs"},
    "rows only": {"columns": "none"},
    "no balancing": {"iterations": 0},
    "tied keys and values": {"tie_kv": "on"},
}


@pytest.mark.parametrize("name", ATTENTION)
def test_every_attention_learns_to_sort(tmp_path: Path, name: str) -> None:
    words = {f"attention.{key}": value for key, value in ATTENTION[name].items()}
    train(tmp_path / "run", SORT | {"attention.gumbel": "on"} | words)
    found = losses(tmp_path / "run")
    assert found[0] > 2
    assert found[-1] < BAR
    assert figures(tmp_path / "run", "test")["loss"] < BAR
    sorts = name not in ("full", "local", "window", "sparse", "sparse merged")
    squares = sort_net_gradients(tmp_path / "run")
    assert (len(squares) > 0) == sorts
    for parameter, mean_square in squares.items():
        assert mean_square.any(), f"no gradient came to {parameter}"


def sort_net_gradients(run: Path) -> dict[str, torch.Tensor]:
    """Running means of their squares, by parameter."""
    return {name: x for name, x in tensors(checkpoints(run)[-1]).items()
            if "exp_avg_sq/" in name and ".sort_net." in name}


@pytest.mark.parametrize("columns", ["prefix", "prior", "none", "full"])
def test_every_column_sum_learns_text(tmp_path: Path, columns: str) -> None:
    settings = text_task(tmp_path, **{"decoder.columns": columns, "train.steps": 120})
    train(tmp_path / "run", settings)
    assert losses(tmp_path / "run")[-1] < 2.0  # 5.6 at first, 2.6 by the bytes' frequencies
    assert figures(tmp_path / "run", "test")["bits_per_byte"] < 2.9


# Pairs lie in blocks 0 and 1, queries in 6 and 7: two layers of two blocks back reach block 2.
RECALL = SMALL | {"task.name": "recall", "task.length": 64, "task.recall_pairs": 2,
                  "task.recall_keys": 8, "task.recall_values": 8, "task.recall_fillers": 2,
                  "task.recall_test_size": 200, "model.layers": 2, "attention.block": 8,
                  "train.batch": 32, "train.steps": 200}


@pytest.mark.parametrize(("words", "recalls"), [
    ({"kind": "full"}, True),
    ({"preset": "windowed"}, True),
    ({"kind": "window", "window": 2}, False),
], ids=["full", "windowed", "window"])
def test_what_reaches_far_recalls(tmp_path: Path, words: dict[str, Any], recalls: bool) -> None:
    train(tmp_path / "run", RECALL | {f"attention.{key}": value for key, value in words.items()})
    accuracy = figures(tmp_path / "run", "test")["accuracy"]
    if recalls:
        assert accuracy > 40  # 56 by guessing among the two values told
    else:
        assert 5 < accuracy < 20  # 12.5 by chance


@pytest.mark.parametrize("kind", ["sinkhorn", "sortcut", "full"])
def test_classifier_learns(tmp_path: Path, kind: str) -> None:
    settings = classify_task(tmp_path, **{"attention.kind": kind, "train.batch": 32,
                                          "train.steps": 200})
    train(tmp_path / "run", settings)
    assert losses(tmp_path / "run")[-1] < 0.3  # 0.69 by chance
    assert figures(tmp_path / "run", "test")["accuracy"] > 85


@pytest.mark.parametrize("precision", ["bf16", "float64"])
def test_every_precision_learns(tmp_path: Path, precision: str) -> None:
    train(tmp_path / "run", SORT | CHANCE | {"train.precision": precision})
    assert losses(tmp_path / "run")[-1] < 0.9  # with dropout
    assert figures(tmp_path / "run", "test")["loss"] < BAR


@pytest.mark.parametrize(("name", "schedule", "rate"), [
    ("adam", "noam", 0.1), ("adamw", "cosine", 3e-3), ("adamw", "linear", 3e-3),
    ("adafactor", "rsqrt", 0.1),
])
def test_every_optimizer_learns(tmp_path: Path, name: str, schedule: str, rate: float) -> None:
    train(tmp_path / "run", SORT | {"optimizer.name": name, "optimizer.schedule": schedule,
                                    "optimizer.rate": rate, "optimizer.warmup": 40})
    assert losses(tmp_path / "run")[-1] < 0.9


def test_recomputed_layers_change_nothing(tmp_path: Path) -> None:
    settings = sort_task(**CHANCE, **{"train.steps": 20, "train.log_every": 1, "model.layers": 2})
    train(tmp_path / "plain", settings)
    train(tmp_path / "again", settings | {"model.checkpoint": "on"})
    assert losses(tmp_path / "again") == losses(tmp_path / "plain")


def test_accumulated_batches_follow_one_large_batch(tmp_path: Path) -> None:
    settings = text_task(tmp_path, **{"train.steps": 30, "train.log_every": 1})
    train(tmp_path / "large", settings | {"train.batch": 32})
    train(tmp_path / "small", settings | {"train.batch": 16, "train.accumulate": 2})
    assert losses(tmp_path / "small") == pytest.approx(losses(tmp_path / "large"), abs=1e-4)


def test_batches_by_tokens_learn(tmp_path: Path) -> None:
    train(tmp_path / "run", SORT | {"train.batch_tokens": 512})
    assert losses(tmp_path / "run")[-1] < BAR
