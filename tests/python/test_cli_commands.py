"""The commands around training: help, exit codes, and what a program reads from them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from cli_program import COMMANDS, PROGRAM, output, refusal, run

DEFAULTS = {
    "train": ["--train.steps INT 1000", "--attention.block INT 64", "--optimizer.rate NUMBER 0.001",
              "--model.tied {true,false} true"],
    "eval": ["--split {valid,test,all} test", "--checkpoint TEXT newest"],
    "inspect": ["--checkpoint TEXT newest", "--example INT "],
    "export": ["--dtype {float32,bf16,fp16} float32", "--checkpoint {newest,best} newest"],
    "generate": ["--samples INT in 1 - 4096 1", "--top-p NUMBER 1", "--seed INT 1",
                 "--length-penalty NUMBER 0.6", "--checkpoint TEXT newest"],
    "reproduce": ["--scale {smoke,small,full} smoke", "runs a row, with seeds 1 to this", "--out DIR runs/reproduce",
                  "--preset {default,paper} default"],
    "tokenizer train": ["--vocab INT 32000"],
}


def plain(text: str) -> str:
    """Help as words: versions of CLI11 write a default as =x or [x]."""
    return " ".join(re.sub(r"[=\[\]]", " ", re.sub(r":\w+", "", text)).split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_defaults(command: str) -> None:
    text = output(*COMMANDS[command], "--help")
    assert f"sinkhorn {command}" in text
    for words in DEFAULTS.get(command, []):
        assert words in plain(text), plain(text)


def test_help_of_the_program_names_every_command() -> None:
    text = output("--help")
    for words in COMMANDS.values():
        assert re.search(rf"^  {words[0]}\b", text, re.MULTILINE), words
    assert "check" in output("data", "--help")
    assert "train" in output("tokenizer", "--help")


def test_version() -> None:
    assert re.fullmatch(r"sinkhorn \d+\.\d+\.\d+\n", output("--version"))


def test_info_in_words_and_in_json() -> None:
    facts = json.loads(output("info", "--json"))
    assert facts["cores"] >= 1 and facts["threads"] >= 1  # numbers, not words
    assert facts["cuda devices"] == sum(name.startswith("cuda:") for name in facts)
    text = output("info")
    for name, value in facts.items():
        assert re.search(rf"^{re.escape(name)}  +{re.escape(str(value))}$", text, re.MULTILINE), name


def test_commands_that_cannot_be_meant() -> None:
    assert refusal().startswith("which command? one of train, eval")
    assert refusal("trian") == "unknown command trian; did you mean train?"
    assert refusal("data").startswith("which command? one of check")
    assert refusal("data", "chek") == "unknown command chek; did you mean check?"
    assert refusal("info", "--jsn") == "unknown option --jsn; did you mean --json?"
    assert refusal("info", "more") == "unexpected argument more"
    assert refusal("eval") == "RUN is required"
    assert "--text excludes --example" in refusal("inspect", "x", "--text", "a", "--example", "1")
    for number in ("-1", "-99999999999999999999999"):
        assert refusal("inspect", "x", "--example", number) == (
            f"--example: {number} is not 0 or more")
    assert refusal("tokenizer", "train", "x", "--out", "y", "--vocab", "0") == (
        "--vocab: 0 is not 1 or more")


def test_a_folder_that_holds_no_run(tmp_path: Path) -> None:
    expected = f"{tmp_path}: not the folder of a run; expected config.ini (an export: config.json) in it"
    assert refusal("eval", tmp_path) == expected
    assert refusal("inspect", tmp_path) == expected


def test_data_check_of_incomplete_data(tmp_path: Path) -> None:
    done = run("data", "check", "lm", tmp_path, "--json")
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    assert answer["task"] == "lm"
    assert answer["complete"] is False
    assert answer["lines"]
    assert run("data", "check", "lm", tmp_path).stdout.splitlines() == answer["lines"]
    assert refusal("data", "check", "lmm", tmp_path).startswith('task.name: "lmm" is not one of')


def test_data_check_reads_what_training_would(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"a line of text\n" * 1000)
    lines = output("data", "check", "text", text).splitlines()
    assert re.fullmatch(r"  read to the end, items: \d+ train, \d+ valid, \d+ test", lines[-2])
    assert lines[-1] == "usable: text.txt"
    text.write_bytes(b"a line of text\n" * 1000 + b"\xff\n" + b"more\n" * 100)
    done = run("data", "check", "text", text)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == (
        f"not usable: {text}:1001: byte 1 of the line is 0xff; expected UTF-8 text")

    def last_line(train: str, valid: str = "") -> str:
        for name, lines in (("train", train), ("valid", valid)):
            (tmp_path / f"{name}.tsv").write_text(lines) if lines else None
        return run("data", "check", "classify", tmp_path).stdout.splitlines()[-1]

    text.unlink()
    assert "no items in the valid split" in last_line("a\tgood\nb\tbad\n")
    assert "every label is" in last_line("a\tgood\na\tbad\n", "a\tfair\n")
    assert "'c' was never seen in training" in last_line("a\tgood\nb\tbad\n", "c\tfair\n")
    assert last_line("a\tgood\nb\tbad\n", "a\tfair\n").startswith("usable: ")
    lines = output("data", "check", "classify", tmp_path).splitlines()
    assert lines[-2] == "  labels in train: a 1, b 1"


def test_a_folder_that_may_not_be_read(tmp_path: Path) -> None:
    """As another user where this one may read everything."""
    data = Path(tempfile.mkdtemp())  # pytest's own folders are closed to others
    try:
        (data / "a.txt").write_text("a line of text\n" * 100)
        (data / "closed").mkdir()
        data.chmod(0o755)
        (data / "closed").chmod(0)
        root = os.geteuid() == 0
        done = subprocess.run([PROGRAM, "data", "check", "text", data], capture_output=True, text=True,
                              check=False, **({"user": 65534, "env": {}} if root else {}))
        if root and done.returncode == 127:
            pytest.skip("another user cannot run the program here")
        assert done.returncode == 1, done.stderr
        assert done.stdout.splitlines()[-1] == (
            f"not usable: {data}/closed: cannot be read: Permission denied")
    finally:
        (data / "closed").chmod(0o755)
        shutil.rmtree(data)


@pytest.mark.parametrize("task", ["sort", "recall"])
def test_data_check_of_generated_data(task: str) -> None:
    assert json.loads(output("data", "check", task, "--json"))["complete"] is True
    assert output("data", "check", task).startswith(f"{task} needs no data")


def test_tokenizer_train(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the {n}th line says {n * n} and no more\n" for n in range(400)))
    model = tmp_path / "pieces.model"
    said = output("tokenizer", "train", text, "--out", model, "--vocab", "300")
    pieces = int(re.fullmatch(rf"{re.escape(str(model))}: (\d+) pieces\n", said).group(1))
    assert 256 < pieces <= 300
    assert model.stat().st_size > 0
    assert str(tmp_path / "none.txt") in refusal("tokenizer", "train", tmp_path / "none.txt",
                                                 "--out", model, code=1)
    assert refusal("tokenizer", "train", text) == "--out is required"
    assert refusal("tokenizer", "train", text, "--out", tmp_path, code=1) == (
        f"{tmp_path}: is not a file; expected one, or a new name, for the tokenizer")


def test_a_full_disk_is_a_failure() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        done = subprocess.run([str(PROGRAM), "completion", "bash"], stdout=full,
                              stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "sinkhorn: standard output cannot be written\n"
