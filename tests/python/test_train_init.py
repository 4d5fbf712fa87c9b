"""Training that begins with the parameters of another."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cli_program import output
from train_program import (CHANCE, assert_same_run, checkpoints, classify_task, failed, sort_task,
                           start, tensors, text_task, train, wait_for_steps)

SHORT = {"train.steps": 4, "train.eval_batches": 1, "train.test_batches": 1}


def parameters(run: Path) -> dict:
    state = tensors(checkpoints(run)[-1])
    return {name: x for name, x in state.items() if name.startswith("model/")}


def test_parameters_are_taken_and_nothing_else(tmp_path: Path) -> None:
    settings = sort_task(**SHORT)
    train(tmp_path / "first", settings)
    expected = parameters(tmp_path / "first")
    for number, place in enumerate((tmp_path / "first", checkpoints(tmp_path / "first")[-1])):
        run = tmp_path / f"second{number}"
        train(run, settings | {"train.init": place, "train.steps": 0, "train.seed": 9})
        found = parameters(run)
        assert found.keys() == expected.keys()
        assert all(found[name].equal(expected[name]) for name in expected)
        moments = [x for name, x in tensors(checkpoints(run)[-1]).items()
                   if name.startswith("optimizer/")]
        assert moments and not any(x.any() for x in moments)
    train(run, settings | {"train.init": place, "train.seed": 9}, "--resume")
    assert not any(parameters(run)[name].equal(expected[name]) for name in expected)


def test_of_an_export_in_half_the_bytes(tmp_path: Path) -> None:
    settings = sort_task(**SHORT)
    train(tmp_path / "first", settings)
    output("export", tmp_path / "first", tmp_path / "half", "--dtype", "bf16")
    train(tmp_path / "second", settings | {"train.init": tmp_path / "half", "train.steps": 0})
    found, expected = parameters(tmp_path / "second"), parameters(tmp_path / "first")
    for name, x in expected.items():
        assert found[name].dtype == x.dtype
        assert found[name].equal(x) or found[name].equal(x.bfloat16().float()), name


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    """Of a run, of its checkpoint, of an export and of its file; without one nothing is trained."""
    pieces = {"task.tokens": "pieces", "task.vocab": 300} | SHORT
    train(tmp_path / "first", text_task(tmp_path / "data", **pieces))
    output("export", tmp_path / "first", tmp_path / "export")
    other = text_task(tmp_path / "other", **pieces)
    text = other["task.data"]
    text.write_text(text.read_text().replace("seven", "eleven") * 2)
    first = (tmp_path / "first" / "tokenizer.model").read_bytes()
    (saved,) = checkpoints(tmp_path / "first")
    export = tmp_path / "export"
    for number, place in enumerate((tmp_path / "first", saved, export,
                                    export / "model.safetensors")):
        run = tmp_path / f"second{number}"
        train(run, other | {"train.init": place})
        assert (run / "tokenizer.model").read_bytes() == first
    alone = tmp_path / "alone" / "checkpoints" / saved.name
    alone.parent.mkdir(parents=True)
    shutil.copy(saved, alone)
    assert failed(tmp_path / "third", other | {"train.init": alone}) == (
        f"train.init: {alone}: no tokenizer.model lies with it; name the one it was trained with "
        "in task.tokenizer, or say that it reads bytes by task.tokens = bytes")
    assert failed(tmp_path / "third", other | {"train.init": tmp_path / "typo"}) == (
        f"train.init: {tmp_path / 'typo'}: is not there; expected a run, an export or a checkpoint")
    named = {"train.init": alone, "task.tokenizer": tmp_path / "first" / "tokenizer.model"}
    train(tmp_path / "third", other | named)
    assert (tmp_path / "third" / "tokenizer.model").read_bytes() == first


def test_a_tokenizer_may_lie_in_the_folder_of_its_run(tmp_path: Path) -> None:
    pieces = text_task(tmp_path / "data", **{"task.tokens": "pieces", "task.vocab": 300} | SHORT)
    own = tmp_path / "run" / "tokenizer.model"
    own.parent.mkdir()
    output("tokenizer", "train", pieces["task.data"], "--out", own, "--vocab", "300")
    before = own.read_bytes()
    train(tmp_path / "run", pieces | {"task.tokenizer": own})
    assert own.read_bytes() == before
    assert output("generate", tmp_path / "run", "--prompt", "one", "--max-tokens", "2")


def test_bytes_do_not_go_on_from_pieces(tmp_path: Path) -> None:
    pieces = {"task.tokens": "pieces", "task.vocab": 300} | SHORT
    train(tmp_path / "first", text_task(tmp_path / "data", **pieces))
    settings = text_task(tmp_path / "data", **SHORT) | {"train.init": tmp_path / "first"}
    message = failed(tmp_path / "second", settings)
    assert "tensor model/" in message and "the configuration makes it" in message


def test_of_more_digits_than_float32_has(tmp_path: Path) -> None:
    settings = sort_task(**SHORT) | {"train.precision": "float64"}
    train(tmp_path / "first", settings)
    train(tmp_path / "second", settings | {"train.init": tmp_path / "first", "train.steps": 0})
    found, expected = parameters(tmp_path / "second"), parameters(tmp_path / "first")
    assert all(found[name].equal(expected[name]) for name in expected)
    assert any(not x.equal(x.float().double()) for x in expected.values())


def test_killed_before_its_first_checkpoint(tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins once more with what it began with, wherever the command is given."""
    settings = sort_task(**CHANCE, **SHORT)
    train(tmp_path / "first", settings)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    second = settings | {"train.init": "first", "train.steps": 10**6, "train.log_every": 1}
    process = start(tmp_path / "second", second)
    assert wait_for_steps(process, 2)
    process.kill()
    process.wait()
    assert not checkpoints(tmp_path / "second")
    monkeypatch.chdir(tmp_path / "elsewhere")
    output("train", tmp_path / "second", "--continue", "--train.steps", "4")
    monkeypatch.chdir(tmp_path)
    train(tmp_path / "whole", second | {"train.steps": 4})
    assert_same_run(tmp_path / "second", tmp_path / "whole")


def test_another_model_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "first", sort_task(**SHORT))
    wide = sort_task(**SHORT) | {"train.init": tmp_path / "first", "model.width": 64}
    message = failed(tmp_path / "second", wide)
    assert "tensor model/" in message and "the configuration makes it" in message
    assert not (tmp_path / "second" / "config.ini").exists()
    labels = classify_task(tmp_path / "data", **SHORT) | {"train.init": tmp_path / "first"}
    assert "tensor model/" in failed(tmp_path / "third", labels)
    nowhere = sort_task(**SHORT) | {"train.init": tmp_path / "none"}
    assert failed(tmp_path / "fourth", nowhere) == (
        f"train.init: {tmp_path / 'none'}: is not there; expected a run, an export or a checkpoint")
    elsewhere = sort_task(**SHORT) | {"train.init": tmp_path / "data"}
    assert failed(tmp_path / "fifth", elsewhere) == (
        f"train.init: {tmp_path / 'data'}: is another folder; expected a run, an export or a checkpoint")
