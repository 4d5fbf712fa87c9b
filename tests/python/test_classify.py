"""`sinkhorn classify`: a trained classifier labels new texts; what is refused, and how."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_program import PROGRAM, objects, output, refusal, run
from export_program import evaluated
from train_program import SMALL, Settings, sort_task, tensors, text_task, train

safetensors = pytest.importorskip("safetensors.torch")

LABELS = ["bad", "dull", "good"]
WHERE = "texts are given by --text, --file, or - for standard input"


def sentence(gen: torch.Generator, word: str) -> str:
    """A few words, one of which decides; some are longer than the model reads."""
    words = ["it", "was", "a", "film", "of", "an", "hour"]
    picks = [words[i] for i in torch.randint(0, 7, (int(torch.randint(2, 9, (1,), generator=gen)),),
                                             generator=gen)]
    picks.insert(int(torch.randint(0, len(picks), (1,), generator=gen)), word)
    return " ".join(picks * (2 if len(picks) == 9 else 1))


def write_reviews(folder: Path) -> None:
    """Labelled by a word, which every fifth line of the test contradicts."""
    folder.mkdir()
    gen = torch.Generator().manual_seed(4)
    for name, rows in (("train", 400), ("valid", 30), ("test", 100)):
        lines = [f"{LABELS[(n + (name == 'test' and n % 5 == 0)) % 3]}\t"
                 f"{sentence(gen, LABELS[n % 3])}\n" for n in range(rows)]
        (folder / f"{name}.tsv").write_text("".join(lines))


def settings_of(task: str, data: Path, length: int) -> Settings:
    return SMALL | {"task.name": task, "task.data": data, "task.tokens": "bytes",
                    "task.cache": data.parent / "cache", "task.length": length}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("classify")


@pytest.fixture(scope="module")
def reviews(folder: Path) -> Path:
    """A run; its data lies beside it in `data`, the texts of the test in `texts`."""
    write_reviews(folder / "data")
    train(folder / "run", settings_of("classify", folder / "data", 48) | {
        "train.steps": 250, "train.batch": 16})
    (folder / "texts").write_text("".join(f"{text}\n" for _, text in labelled(folder)))
    return folder / "run"


def labelled(folder: Path) -> list[list[str]]:
    """Labels and texts of the test."""
    return [line.split("\t") for line in (folder / "data" / "test.tsv").read_text().splitlines()]


def verdicts(run_folder: Path, *words: Any) -> list[dict[str, Any]]:
    return objects(output("classify", run_folder, "--json", *map(str, words)))


def piped(*words: Any, given: bytes) -> tuple[int, str, str]:
    """Exit code, output and errors of `classify` with this on standard input."""
    done = subprocess.run([PROGRAM, "classify", *words], input=given, capture_output=True,
                          timeout=300, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


# ------------------------------------------------------------------------------------- labels

def test_the_labels_are_those_that_eval_counts(reviews: Path, folder: Path) -> None:
    found = verdicts(reviews, "--file", folder / "texts")
    expected = labelled(folder)
    assert [one["text"] for one in found] == [text for _, text in expected]
    right = sum(one["label"] == label for one, (label, _) in zip(found, expected, strict=True))
    figures = evaluated(reviews)["figures"]
    assert right == figures["accuracy"] == pytest.approx(80, abs=10)  # of 100
    nats = [-torch.tensor(one["probabilities"][label]).log().item()
            for one, (label, _) in zip(found, expected, strict=True)]
    assert sum(nats) / len(nats) == pytest.approx(figures["loss"], rel=1e-4)


def test_probabilities_are_shares_and_the_same_in_words(reviews: Path, folder: Path) -> None:
    found = verdicts(reviews, "--file", folder / "texts")
    for one in found:
        assert list(one) == ["text", "label", "probability", "probabilities"]
        assert list(one["probabilities"]) == LABELS
        assert sum(one["probabilities"].values()) == pytest.approx(1, abs=1e-12)
        assert one["probability"] == max(one["probabilities"].values())
        assert one["probabilities"][one["label"]] == one["probability"]
    assert output("classify", reviews, "--file", folder / "texts") == "".join(
        f"{one['label']}\t{one['probability']:.4f}\n" for one in found)


def test_other_batches_give_the_same_labels(reviews: Path, folder: Path) -> None:
    expected = verdicts(reviews, "--file", folder / "texts")
    for batch in (1, 7, 1000, 2**62):
        found = verdicts(reviews, "--file", folder / "texts", "--batch", batch)
        for one, other in zip(found, expected, strict=True):
            assert (one["text"], one["label"]) == (other["text"], other["label"])
            assert one["probabilities"] == pytest.approx(other["probabilities"], abs=1e-5)
    first = labelled(folder)[0][1]
    [alone] = verdicts(reviews, "--text", first)
    assert alone["probabilities"] == pytest.approx(expected[0]["probabilities"], abs=1e-5)


def test_what_is_too_long_is_cut(reviews: Path) -> None:
    start = "it was a good film of an hour and it was a film"[:47]
    [whole] = verdicts(reviews, "--text", start)
    [longer] = verdicts(reviews, "--text", start + " bad" * 200)
    assert longer["probabilities"] == whole["probabilities"]
    assert longer["text"].endswith(" bad")


def test_other_precisions_and_checkpoints(reviews: Path) -> None:
    expected = verdicts(reviews, "--text", "it was good")[0]
    [wide] = verdicts(reviews, "--text", "it was good", "--precision", "float64")
    assert wide["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-5)
    [half] = verdicts(reviews, "--text", "it was good", "--precision", "bf16", "--device", "cpu")
    assert half["label"] == expected["label"]
    newest = max((reviews / "checkpoints").glob("step-*.safetensors"))
    for word in (newest, "newest"):
        assert verdicts(reviews, "--text", "it was good", "--checkpoint", word) == [expected]


def test_an_export_labels_where_the_data_is_not(reviews: Path, folder: Path,
                                                tmp_path: Path) -> None:
    output("export", reviews, tmp_path / "out", "--checkpoint", "newest")
    expected = verdicts(reviews, "--file", folder / "texts")
    hidden = (folder / "data").rename(folder / "hidden")
    try:
        for place in (tmp_path / "out", reviews):
            for one, other in zip(verdicts(place, "--file", folder / "texts"), expected,
                                  strict=True):
                # A mapped file lies elsewhere in memory than a copy: sums may round differently.
                probabilities = other["probabilities"]
                assert one["label"] == other["label"]
                assert one["probabilities"] == pytest.approx(probabilities, abs=1e-5)
    finally:
        hidden.rename(folder / "data")


def test_pairs(tmp_path: Path) -> None:
    data = tmp_path / "snli_1.0"
    data.mkdir()
    labels = ["entailment", "contradiction", "neutral"]
    pairs = [(f"at {n}", f"{('yes', 'no', 'maybe')[n % 3]} {n}") for n in range(30)]
    for name in ("train", "dev", "test"):
        lines = [{"gold_label": label, "sentence1": first, "sentence2": second}
                 for label, (first, second) in zip(labels * 10, pairs)]
        (data / f"snli_1.0_{name}.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    place = tmp_path / "run"
    train(place, settings_of("nli", data, 24) | {"train.steps": 100})
    file = tmp_path / "pairs"
    file.write_text("".join(f"{first}\t{second}\n" for first, second in pairs))
    found = verdicts(place, "--file", file)
    right = sum(one["label"] == labels[n % 3] for n, one in enumerate(found))
    assert 100 * right / 30 == pytest.approx(evaluated(place)["figures"]["accuracy"])
    assert right >= 20
    [swapped] = verdicts(place, "--text", "yes 0\tat 0")
    assert swapped["probabilities"] != pytest.approx(found[0]["probabilities"], abs=1e-9)
    why = "is no pair; it must be two sentences, separated by a tab"
    for text in ("one", "one\t", "\ttwo", "one\ttwo\tthree"):
        assert refusal("classify", place, "--text", text) == f"--text {why}"
        file.write_text(f"one\ttwo\n{text}\n")
        assert refusal("classify", place, "--file", file, code=1) == f"{file}:2: the text {why}"


# -------------------------------------------------------------------------------------- lines

def test_files_pipes_and_line_ends(reviews: Path, tmp_path: Path) -> None:
    texts = ["it was good", "a dull hour", "naïve – ☃"]
    spellings = {"unix": "\n".join(texts) + "\n", "open": "\n".join(texts),
                 "dos": "\r\n".join(texts) + "\r\n", "marked": "\ufeff" + "\n".join(texts)}
    file = tmp_path / "texts"
    truth = ""
    for name, text in spellings.items():
        file.write_bytes(text.encode())
        said = output("classify", reviews, "--file", file, "--json")
        truth = truth or said
        assert said == truth, name
        assert piped(reviews, "-", "--json", given=text.encode()) == (0, truth, ""), name
    assert [line["text"] for line in objects(truth)] == texts
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", f"cat '{file}' > '{pipe}'"]) as writer:
        assert output("classify", reviews, "--file", pipe, "--json") == truth
    assert writer.returncode == 0


def test_answers_come_a_batch_at_a_time(reviews: Path) -> None:
    with subprocess.Popen([PROGRAM, "classify", reviews, "-", "--batch", "2"], text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        for _ in range(2):  # before the input ends
            process.stdin.write("it was good\nit was bad\n")
            process.stdin.flush()
            assert [process.stdout.readline().count("\t") for _ in range(2)] == [1, 1]
        process.stdin.write("it was dull\n")
        process.stdin.close()
        assert process.stdout.read().count("\n") == 1
    assert process.returncode == 0


@pytest.mark.parametrize(("line", "why"), [
    (b"", "the text is empty; it must be some text"),
    (b" \t ", "the text is empty; it must be some text"),
    (b"\r", "the text is empty; it must be some text"),
    (b"so \xff so", "byte 4 of the line is 0xff; expected UTF-8 text"),
])
def test_lines_that_cannot_be_read(reviews: Path, tmp_path: Path, line: bytes, why: str) -> None:
    file, text = tmp_path / "texts", b"it was good\nit was bad\n" + line + b"\nit was dull\n"
    file.write_bytes(text)
    assert refusal("classify", reviews, "--file", file, code=1) == f"{file}:3: {why}"
    assert piped(reviews, "-", given=text) == (1, "", f"sinkhorn: standard input:3: {why}\n")
    code, said, errors = piped(reviews, "-", "--batch", "2", given=text)  # those before are done
    assert (code, said.count("\n"), errors) == (1, 2, f"sinkhorn: standard input:3: {why}\n")


# ----------------------------------------------------------------------------------- refusals

@pytest.mark.parametrize(("words", "message"), [
    ([], f"no text to label; {WHERE}"),
    (["texts.txt"], f"unexpected argument texts.txt; {WHERE}"),
    (["--text", ""], "--text is empty; it must be some text"),
    (["--text", "  "], "--text is empty; it must be some text"),
    (["--text", "a", "--file", "b"], "--text excludes --file"),
    (["--text", "a", "-"], "--text excludes STDIN"),
    (["--file", "a", "-"], "--file excludes STDIN"),
    (["--text", "a", "--batch", "0"], "--batch: 0 is not 1 or more"),
    (["--text", "a", "--batch", str(2**70)], f"--batch: {2**70} is too large"),
    (["--text", "a", "--jsn"], "unknown option --jsn; did you mean --json?"),
])
def test_what_cannot_be_meant(reviews: Path, words: list[str], message: str) -> None:
    assert refusal("classify", reviews, *words) == message


@pytest.mark.parametrize("option", ["--train.steps", "--task.length", "--task.name"])
def test_options_that_would_do_nothing_are_not_known(reviews: Path, option: str) -> None:
    assert refusal("classify", reviews, option, "4").startswith(f"unknown option {option}")


def test_a_text_is_utf8(reviews: Path) -> None:
    assert piped(reviews, "--text", b"a\xff", given=b"") == (
        2, "", "sinkhorn: --text is not UTF-8 text from byte 2 on\n")


def test_files_that_cannot_be_read(reviews: Path, tmp_path: Path) -> None:
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.touch()
    assert refusal("classify", reviews, "--file", missing, code=1) == (
        f"{missing}: cannot be opened: No such file or directory")
    assert refusal("classify", reviews, "--file", tmp_path, code=1) == (
        f"{tmp_path}: is not a file; expected one")
    assert refusal("classify", reviews, "--file", empty, code=1) == (
        f"{empty}: the file is empty; expected lines of text")
    for word in ("-", "--file=/dev/null"):
        name = word.removeprefix("--file=").replace("-", "standard input")
        assert piped(reviews, word, given=b"") == (
            1, "", f"sinkhorn: {name}: is empty; expected lines of text\n")


def test_runs_that_give_no_labels(reviews: Path, folder: Path, tmp_path: Path) -> None:
    tasks = {"sort": sort_task(), "text": text_task(folder / "text_data")}
    for name, settings in tasks.items():
        train(tmp_path / name, settings | {"train.steps": 1})
        assert refusal("classify", tmp_path / name, "--text", "a") == (
            f"{tmp_path / name}: a model of the task {name} gives no labels; see generate")
    assert "not the folder of a run" in refusal("classify", tmp_path, "--text", "a")
    assert run("classify").returncode == 2
    nameless = Path(shutil.copytree(reviews, tmp_path / "nameless"))
    task = json.loads((nameless / "task.json").read_text())
    task["info"]["labels"] = []
    (nameless / "task.json").write_text(json.dumps(task))
    assert refusal("classify", nameless, "--text", "a") == (
        f"{nameless}: 0 labels are written down for 3 classes; there is nothing to call them by")


def test_a_model_that_says_no_numbers_is_named(reviews: Path, tmp_path: Path) -> None:
    whole = reviews / "checkpoints" / "step-00000250.safetensors"
    with safetensors.safe_open(whole, "pt") as opened:
        metadata = opened.metadata()
    state = tensors(whole)
    state["model/output.bias"] += float("inf")
    file = tmp_path / "broken.safetensors"
    safetensors.save_file(state, file, metadata)
    assert refusal("classify", reviews, "--checkpoint", file, "--text", "a", code=1) == (
        f"{file}, step 250: the model's scores of the labels are not numbers: it cannot classify")


def test_a_full_disk_is_a_failure(reviews: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        done = subprocess.run([PROGRAM, "classify", reviews, "--text", "a"], stdout=full,
                              stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "sinkhorn: standard output cannot be written\n")
