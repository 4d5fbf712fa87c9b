"""`sinkhorn generate` at the edges of what its options can mean: tiny and huge numbers, prompts that
are streams, options that another command would take, models that say no numbers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_program import PROGRAM, output, refusal
from train_program import text_task, train

safetensors = pytest.importorskip("safetensors.torch")

LENGTH = 64
GREEDY = ("--prompt", "one two ", "--temperature", "0", "--max-tokens", "12")


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("edges")
    settings = text_task(folder / "data", **{"task.length": LENGTH, "train.steps": 60})
    train(folder / "text", settings)
    return folder / "text"


def sample(run_folder: Path, *words: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output("generate", run_folder, "--json", *words))
    return found


# ------------------------------------------------------------------------------------- numbers

def test_a_tiny_temperature_is_greedy(text_run: Path) -> None:
    expected = sample(text_run, *GREEDY)
    for temperature in ("1e-30", "1e-40", "1e-300"):
        words = ["--prompt", "one two ", "--max-tokens", "12", "--temperature", temperature]
        assert sample(text_run, *words) == expected
        assert sample(text_run, *words, "--top-k", "9", "--top-p", "0.9") == expected


def test_tiny_and_huge_penalties_are_strong_ones(text_run: Path) -> None:
    for strong, absurd in (("1e-20", "1e-300"), ("1e20", "1e300")):
        expected = sample(text_run, *GREEDY, "--repetition-penalty", strong)
        assert sample(text_run, *GREEDY, "--repetition-penalty", absurd) == expected


def test_a_huge_temperature_says_only_what_may_be_said(text_run: Path) -> None:
    ids = sample(text_run, "--temperature", "1e300", "--max-tokens", "60", "--ignore-end")["ids"]
    assert len(set(ids)) > 20 and min(ids) >= 2


@pytest.mark.parametrize("tokens", [str(2**63 - 1), str(2**63 - 1024), "1000000000000"])
def test_more_tokens_than_a_model_holds_are_as_many_as_it_does(text_run: Path,
                                                               tokens: str) -> None:
    words = ["--prompt", "one", "--ignore-end", "--max-tokens"]
    found = sample(text_run, *words, tokens)
    assert found["stop"] == "length"
    assert found["ids"] == sample(text_run, *words, "500")["ids"]
    assert len(found["ids"]) == LENGTH - 4 + 1


def test_more_samples_than_memory_holds_are_refused(tmp_path: Path) -> None:
    # 256 bytes a token: a TiB in all, a quarter of a GiB in one.
    settings = text_task(tmp_path / "data", **{"model.max_length": 2**20, "attention.kind": "full",
                                               "train.steps": 1})
    train(tmp_path / "long", settings)
    words = ["--prompt", "one", "--samples", "4096", "--max-tokens"]
    line = refusal("generate", tmp_path / "long", *words, str(2**20), code=1)
    assert line.startswith("4096 sequences of up to 1048576 tokens need 1024.0 GiB of memory, ")
    assert line.endswith(" are free; ask for fewer --samples or --beams, or for fewer --max-tokens")
    assert len(output("generate", tmp_path / "long", *words[:3], "2", "--max-tokens", "4")) > 4


# ------------------------------------------------------------------------------------- prompts

def prompted(text_run: Path, path: str, given: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, "generate", text_run, *GREEDY[2:], "--prompt-file", path],
                          input=given, capture_output=True, text=True, timeout=300, check=False)


def test_a_prompt_file_may_be_a_stream(text_run: Path, tmp_path: Path) -> None:
    expected = output("generate", text_run, *GREEDY)
    done = prompted(text_run, "/dev/stdin", "one two \n")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", expected)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", f"echo 'one two ' > '{pipe}'"]) as writer:
        assert output("generate", text_run, *GREEDY[2:], "--prompt-file", pipe) == expected
    assert writer.returncode == 0


def test_an_empty_stream_is_an_empty_prompt(text_run: Path) -> None:
    for path in ("/dev/null", "/dev/stdin"):
        done = prompted(text_run, path, "")
        assert (done.returncode, done.stdout, done.stderr) == (
            2, "", "sinkhorn: the prompt is empty; leave it out to begin as the training data does\n")


# ------------------------------------------------------------------------------------- refusals

def test_prompts_that_cannot_be_read(text_run: Path, tmp_path: Path) -> None:
    assert refusal("generate", text_run, "--prompt", "") == (
        "the prompt is empty; leave it out to begin as the training data does")
    assert refusal("generate", text_run, "--prompt", "x" * 64) == (
        "the prompt has 64 tokens; this model reads at most 63")
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"fine \xff not")
    assert refusal("generate", text_run, "--prompt-file", bad) == (
        "the prompt is not UTF-8 text from byte 6 on")
    missing = tmp_path / "missing.txt"
    assert str(missing) in refusal("generate", text_run, "--prompt-file", missing, code=1)
    assert "is not a file" in refusal("generate", text_run, "--prompt-file", tmp_path, code=1)
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert "the prompt is empty" in refusal("generate", text_run, "--prompt-file", empty)


@pytest.mark.parametrize(("words", "message"), [
    (["--temperature", "-1"], "temperature is -1; it must be 0 (greedy) or more"),
    (["--temperature", "nan"], "temperature is nan; it must be 0 (greedy) or more"),
    (["--top-p", "0"], "top_p is 0; it must be above 0 and at most 1"),
    (["--top-k", "-2"], "--top-k: -2 is not 0 or more"),
    (["--top-k", "9" * 20], "--top-k: 99999999999999999999 is too large"),
    (["--repetition-penalty", "0"], "repetition_penalty is 0; it must be above 0; 1 is none"),
    (["--samples", "0"], "--samples"),
    (["--seed", "x"], "--seed"),
    (["--stop", ""], "--stop is empty; it must be some text"),
    (["--stream", "--samples", "2"], "--stream shows one sample as it is made; leave out --samples"),
    (["--stream", "--json"], "--stream excludes --json"),
    (["--beams", "2", "--samples", "3"], "--samples is 3 of 2 --beams; it must be at most that"),
    (["--beams", "2", "--top-k", "3"], "--top-k excludes --beams"),
    (["--length-penalty", "1"], "--length-penalty requires --beams"),
    (["--prompt", "a", "--prompt-file", "b"], "excludes"),
    (["somewhere"], "unexpected argument somewhere; a prompt is given by --prompt, --prompt-file, "
                    "or - for standard input"),
    (["--out", "x.png"], "--out is for images; this model's text goes to standard output"),
    (["--device", "banana"], "train.device"),
    (["--precision", "int3"], "train.precision"),
])
def test_options_that_cannot_be_meant(text_run: Path, words: list[str], message: str) -> None:
    assert message in refusal("generate", text_run, *words)


@pytest.mark.parametrize(("words", "message"), [
    (["--max-tokens", "0"], "--max-tokens: 0 is not 1 or more"),
    (["--max-tokens", "-3"], "--max-tokens: -3 is not 1 or more"),
    (["--max-tokens", "0x0"], "--max-tokens: 0x0 is not 1 or more"),
    (["--image", "x.png", "--image-index", "-1"], "--image-index: -1 is not 0 or more"),
    (["--seed", "-1"], "--seed: -1 is not 0 or more"),
    (["--seed", "-99999999999999999999999"], "--seed: -99999999999999999999999 is not 0 or more"),
    (["--seed", "99999999999999999999999"], "--seed: 99999999999999999999999 is too large"),
    (["--image", "missing.png"], "--image is for models of the task pixels"),
])
def test_what_cannot_be_meant(text_run: Path, words: list[str], message: str) -> None:
    assert refusal("generate", text_run, *words) == message


@pytest.mark.parametrize("option", ["--train.run", "--task.length", "--train.steps", "--task.name"])
def test_options_that_would_do_nothing_are_not_known(text_run: Path, option: str) -> None:
    assert refusal("generate", text_run, option, "4096").startswith(f"unknown option {option}")


def test_a_run_is_the_folder_that_is_named(text_run: Path) -> None:
    for command in ("eval", "inspect"):
        line = refusal(command, text_run, "--train.run", "elsewhere")
        assert line.startswith("unknown option --train.run")


def test_a_stop_text_is_utf8(text_run: Path) -> None:
    done = subprocess.run([PROGRAM, "generate", text_run, "--stop", b"a\xff"],
                          capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (
        2, "", "sinkhorn: --stop is not UTF-8 text from byte 2 on\n")


def test_a_model_that_says_no_numbers_is_named(text_run: Path, tmp_path: Path) -> None:
    whole = text_run / "checkpoints" / "step-00000060.safetensors"
    with safetensors.safe_open(whole, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}
        metadata = opened.metadata()
    for name in tensors:
        if name.endswith("norm.weight"):
            tensors[name] = torch.full_like(tensors[name], float("nan"))
    file = tmp_path / "broken.safetensors"
    safetensors.save_file(tensors, file, metadata)
    for words in (["--temperature", "0"], [], ["--beams", "2"]):
        assert refusal("generate", text_run, "--checkpoint", file, *words, code=1) == (
            f"{file}, step 60: the model's scores of the next token are not numbers: "
            "it cannot generate")
