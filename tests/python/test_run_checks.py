"""What goes together before a run is trained, resumed, looked at or begun with: a line where it does not,
before the first step; and figures that are a model's, whatever they are computed beside."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from cli_program import PROGRAM, output, refusal, run
from train_program import Settings, failed, sort_task, text_task, train


@pytest.fixture(scope="module")
def sorting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sort") / "run"
    train(folder, sort_task(**{"train.steps": 6}))
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Settings]:
    folder = tmp_path_factory.mktemp("text")
    settings = text_task(folder / "data", **{"train.steps": 4, "model.layers": 2})
    train(folder / "run", settings)
    return folder / "run", settings


def test_an_edit_distance_is_no_matter_of_the_batch(sorting: Path) -> None:
    found = [json.loads(output("eval", sorting, "--train.greedy", "true", "--json", "--precision",
                               "float64", "--train.batch", str(batch)))["figures"]
             for batch in (1, 5, 32)]
    assert found[0]["edit_distance_greedy"] > 0  # a model that misses its ends
    for other in found[1:]:
        assert other["edit_distance_greedy"] == pytest.approx(found[0]["edit_distance_greedy"])


@pytest.mark.parametrize("net", ["linear", "mlp"])
def test_columns_for_too_few_blocks(tmp_path: Path, net: str) -> None:
    settings = sort_task(**{"attention.sort_net": net, "attention.max_blocks": 3})
    assert failed(tmp_path / "run", settings, code=2).startswith(
        "attention.max_blocks: 3 is less than the 4 blocks of 4 that 15 tokens make")
    train(tmp_path / "four", settings | {"attention.max_blocks": 4, "train.steps": 1})


def test_an_edited_configuration_resumes_nothing(tmp_path: Path, text) -> None:
    copy = shutil.copytree(text[0], tmp_path / "run")
    config = copy / "config.ini"
    config.write_text(config.read_text().replace("block = 4\n", "block = 8\n"))
    assert ": cannot resume with another configuration: the run has " in refusal(
        "train", copy, "--resume", "--train.steps", "6")


def test_parameters_without_a_place(tmp_path: Path, text) -> None:
    folder, settings = text
    begun = run("train", folder / "config.ini", "--train.init", folder, "--model.layers", "1",
                "--train.run", tmp_path / "one", "--train.steps", "1")
    assert begun.returncode == 0 and "tensors have no place in this model" in begun.stderr
    copy = shutil.copytree(folder, tmp_path / "edited")
    config = copy / "config.ini"
    config.write_text(config.read_text().replace("layers = 2\n", "layers = 1\n"))
    assert "the configuration has no place for its tensor decoder.1." in refusal(
        "eval", copy, code=1)


def test_a_path_that_is_not_utf8() -> None:
    done = subprocess.run([PROGRAM, "train", "nothing.ini", b"--train.run", b"caf\xe9"],
                          capture_output=True, check=False)
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1


def test_a_folder_in_the_place_of_a_file(tmp_path: Path, sorting: Path) -> None:
    copy = shutil.copytree(sorting, tmp_path / "run")
    (copy / "task.json").unlink()
    (copy / "task.json").mkdir()
    assert refusal("eval", copy, code=1) == f"{copy}/task.json: is not a file; expected one"


def test_a_text_longer_than_the_model_reads(text) -> None:
    longest = json.loads(output("inspect", text[0], "--text", "x" * 24, "--json"))
    assert longest["sorts"]
    assert refusal("inspect", text[0], "--text", "x" * 25) == (
        "--text has 25 tokens; this model reads at most 24")


@pytest.mark.parametrize("vocab", [1, 3, 4, 100])
def test_a_vocabulary_too_small_for_the_bytes(tmp_path: Path, vocab: int) -> None:
    (tmp_path / "text.txt").write_text("one two three\n" * 20)
    assert refusal("tokenizer", "train", tmp_path / "text.txt", "--out", tmp_path / "model",
                   "--vocab", str(vocab)).startswith(
        f"a vocabulary of {vocab} pieces is too small for ")


def test_a_vocabulary_beyond_counting(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one two three\n" * 20)
    assert refusal("tokenizer", "train", tmp_path / "text.txt", "--out", tmp_path / "model",
                   "--vocab", "2000000000") == (
        "a vocabulary of 2000000000 pieces: expected 1000000000 at most")
