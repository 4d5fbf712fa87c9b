"""What a run leaves: figures that `eval` finds again, sorting matrices, and files for others."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from cli_program import output, refusal, run
from train_program import (check_checkpoint, checkpoints, classify_task, command, failed, figures,
                           log_lines, sort_task, text_task, train)

load_file = pytest.importorskip("safetensors.torch").load_file
EventAccumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator").EventAccumulator

STEPS = {"train.steps": 30, "train.log_every": 5, "train.eval_every": 10, "train.save_every": 10}
TASKS = ["sort", "text", "classify"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    tasks = {"sort": sort_task(**{"train.greedy": "on"}), "text": text_task(folder / "text_data"),
             "classify": classify_task(folder / "classify_data")}
    for name, settings in tasks.items():
        said = train(folder / name, settings | STEPS)
        (folder / f"{name}.txt").write_text(said)
    return folder


@pytest.mark.parametrize("task", TASKS)
def test_eval_finds_the_figures_of_training(runs: Path, task: str) -> None:
    found = json.loads(output("eval", runs / task, "--json"))
    assert found["step"] == 30 and found["split"] == "test"
    assert found["checkpoint"] == str(checkpoints(runs / task)[-1])
    assert found["figures"] == figures(runs / task, "test")
    assert found["rows"] > 0 and found["tokens"] > 0
    (line,) = [line for line in (runs / f"{task}.txt").read_text().splitlines()
               if line.startswith("step 30  test:")]
    plain = output("eval", runs / task)
    for name, value in found["figures"].items():
        assert f"  {name} {value:.4f}" in line
        assert re.search(rf"^{name} +{value:.4f}$", plain, re.MULTILINE)


@pytest.mark.parametrize("task", TASKS)
def test_eval_of_the_best_on_the_validation_split(runs: Path, task: str) -> None:
    found = json.loads(output("eval", runs / task, "--json", "--split", "valid",
                              "--checkpoint", "best", "--train.greedy", "off"))
    (line,) = [line for line in log_lines(runs / task)
               if "valid" in line and line["step"] == found["step"]]
    assert found["figures"] == line["valid"]


def test_greedy_figures_are_named(runs: Path) -> None:
    names = figures(runs / "sort", "test")
    assert {"exact_match", "edit_distance_forced", "edit_distance_greedy"} <= names.keys()
    assert "edit_distance_greedy" not in figures(runs / "sort", "valid")


def test_eval_of_a_checkpoint_that_is_not_there(runs: Path) -> None:
    missing = runs / "sort" / "checkpoints" / "step-00000099.safetensors"
    assert str(missing) in refusal("eval", runs / "sort", "--checkpoint", missing, code=1)
    assert refusal("eval", runs / "sort", "--checkpoint", "lst", code=1) == (
        "--checkpoint: lst: no such file; expected newest, best, or a file")


def test_inspect_takes_an_empty_text_for_no_other(runs: Path) -> None:
    assert refusal("inspect", runs / "sort", "--text", "").startswith("--text is empty; leave it")


@pytest.mark.parametrize("task", TASKS)
def test_inspect_shows_what_is_sorted(runs: Path, task: str, tmp_path: Path) -> None:
    found = json.loads(output("inspect", runs / task, "--json", "--out", tmp_path / "pictures"))
    weights = {name.removeprefix("model/"): list(t.shape)
               for name, t in check_checkpoint(checkpoints(runs / task)[-1]).items()
               if name.startswith("model/")}
    assert found["parameters"] == weights
    assert found["parameter_count"] == sum(torch.Size(shape).numel() for shape in weights.values())
    stacks = {"sort": ["encoder", "decoder"], "text": ["decoder"], "classify": ["encoder"]}[task]
    assert [(s["stack"], s["head"]) for s in found["sorts"]] == [
        (stack, head) for stack in stacks for head in range(2)]
    for sort in found["sorts"]:
        r = torch.tensor(sort["r"], dtype=torch.float64).view(sort["blocks"], sort["blocks"])
        sums = r.sum(1)
        assert ((sums - 1).abs().lt(1e-5) | sums.eq(0)).all()
        if sort["stack"] == "decoder":
            assert r.triu().eq(0).all()  # strict: sources lie before
        for share in ("own", "previous", "newest", "largest"):
            assert -1e-6 <= sort[share] <= 1 + 1e-6
    assert len(found["pictures"]) == len(stacks)
    for picture in found["pictures"]:
        assert Path(picture).parent == tmp_path / "pictures"
        assert Path(picture).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_inspect_of_an_input_of_ones_own(runs: Path, tmp_path: Path) -> None:
    found = json.loads(output("inspect", runs / "text", "--json", "--text", "three four five",
                              "--out", tmp_path))
    assert found["input"] == "three four five"
    assert found["sorts"][0]["blocks"] == 4
    assert "layer 0 head 1: 4 blocks" in output("inspect", runs / "text", "--text",
                                                "three four five", "--out", tmp_path)


@pytest.mark.parametrize("task", TASKS)
def test_tensorboard_reads_what_the_log_says(runs: Path, task: str) -> None:
    events = EventAccumulator(str(runs / task))
    events.Reload()
    for name in ("loss", "gradient_norm", "rate"):
        logged = [(line["step"], line[name]) for line in log_lines(runs / task) if name in line]
        read = [(event.step, event.value) for event in events.Scalars(f"train/{name}")]
        assert [step for step, _ in read] == [step for step, _ in logged] == list(range(5, 31, 5))
        assert [value for _, value in read] == pytest.approx([v for _, v in logged], rel=1e-6)
    for split in ("valid", "test"):
        for name, value in figures(runs / task, split).items():
            assert events.Scalars(f"{split}/{name}")[-1].value == pytest.approx(value, rel=1e-6)
    assert events.Scalars("speed/tokens_per_second")


@pytest.mark.parametrize("task", TASKS)
def test_files_of_a_run(runs: Path, task: str) -> None:
    folder = runs / task
    assert [path.name for path in checkpoints(folder)] == [
        "step-00000020.safetensors", "step-00000030.safetensors"]
    assert load_file(folder / "checkpoints" / "best.safetensors").keys() == check_checkpoint(
        checkpoints(folder)[-1]).keys()
    assert json.loads((folder / "checkpoints" / "newest.json").read_text())["step"] == 30
    assert json.loads((folder / "environment.json").read_text())
    # The configuration is whole: it makes the same run again.
    config = folder / "config.ini"
    assert output("train", config, "--dry-run") == config.read_text()


def test_a_run_that_was_moved(runs: Path, tmp_path: Path) -> None:
    (runs / "sort").rename(tmp_path / "moved")
    try:
        found = json.loads(output("eval", tmp_path / "moved", "--json"))
        assert found["figures"] == figures(tmp_path / "moved", "test")
    finally:
        (tmp_path / "moved").rename(runs / "sort")


def test_a_run_whose_data_was_moved(runs: Path, tmp_path: Path) -> None:
    """Who only asks the model needs no data; who asks for figures is told where it was expected."""
    data = runs / "text_data" / "text.txt"
    data.rename(tmp_path / "elsewhere.txt")
    try:
        assert output("generate", runs / "text", "--prompt", "one two", "--max-tokens", "4")
        assert output("inspect", runs / "text", "--text", "one two", "--out", tmp_path / "seen")
        output("export", runs / "text", tmp_path / "exported")
        assert refusal("eval", runs / "text", code=1).startswith(f"{data}: no such file")
        found = json.loads(output("eval", runs / "text", "--json", "--task.data",
                                  tmp_path / "elsewhere.txt"))
        assert found["figures"] == figures(runs / "text", "test")
    finally:
        (tmp_path / "elsewhere.txt").rename(data)


def relabelled(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.glob("*.tsv"):
        text = re.sub("^no\t", "zero\t", path.read_text(), flags=re.MULTILINE)
        (to / path.name).write_text(text)
    return to


def first_line(path: Path, label: str) -> int:
    return [line.startswith(f"{label}\t") for line in path.read_text().splitlines()].index(True) + 1


def test_eval_of_a_whole_labelled_file(runs: Path, tmp_path: Path) -> None:
    """Nothing is held out of it, and it need not have every label."""
    lines = (runs / "classify_data" / "test.tsv").read_text().splitlines()
    found = {}
    for name, some in (("all", lines), ("yes", [x for x in lines if x.startswith("yes")]),
                       ("one", lines[:1])):
        file = tmp_path / f"{name}.tsv"
        file.write_text("\n".join(some) + "\n")
        found[name] = json.loads(output("eval", runs / "classify", "--task.data", file, "--split",
                                        "all", "--json"))
        assert (found[name]["split"], found[name]["rows"]) == ("all", len(some))
        assert found[name]["data"] == f"{name}.tsv: {len(some)} examples"
    truth = json.loads(output("eval", runs / "classify", "--json"))
    assert found["all"]["figures"] == truth["figures"] and truth["split"] == "test"
    assert found["yes"]["figures"] != truth["figures"]
    bad = tmp_path / "bad.tsv"
    bad.write_text("no\tabc\nmaybe\tabc\n")
    assert refusal("eval", runs / "classify", "--task.data", bad, "--split", "all", code=1) == (
        f"{bad}:2: label 'maybe' was never seen in training; expected no or yes")


def test_eval_of_a_whole_text(runs: Path, tmp_path: Path) -> None:
    text = tmp_path / "new.txt"
    text.write_text("three four five\n" * 3)
    words = ("eval", runs / "text", "--split", "all", "--json")
    said = json.loads(output(*words, "--task.data", text))
    assert said["data"] == "new.txt: 48 tokens" and said["tokens"] == 49  # and the end
    (tmp_path / "folder").mkdir()
    for name in ("train", "valid", "test"):
        shutil.copy(text, tmp_path / "folder" / f"{name}.txt")
    assert json.loads(output(*words, "--task.data", tmp_path / "folder"))["tokens"] == 3 * 49
    assert refusal(*words) == (
        f"--split all: all of which data? Name it with --task.data; all of what {runs / 'text'} was "
        "trained on says little")
    assert refusal("eval", runs / "sort", "--split", "all") == (
        f"--split all is for data of one's own; {runs / 'sort'} is a run of the task sort, which "
        "makes its data")


def test_data_with_other_labels_is_refused(runs: Path, tmp_path: Path) -> None:
    other = relabelled(runs / "classify_data", tmp_path / "other")
    assert refusal("eval", runs / "classify", "--task.data", other, code=1) == (
        f"{other / 'train.tsv'}:{first_line(other / 'train.tsv', 'zero')}: label 'zero' was never "
        "seen in training; expected no or yes")
    settings = classify_task(runs / "classify_data") | STEPS | {"task.data": other}
    assert failed(runs / "classify", settings, "--resume") == (
        f"task.data: {other} has another vocabulary or other labels than {runs / 'classify'} was "
        "trained on; resume with the data it had")


def test_a_text_that_has_changed_is_not_gone_on_with(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "text", tmp_path / "run")
    longer = tmp_path / "text.txt"
    longer.write_text((runs / "text_data" / "text.txt").read_text() + " and more")
    settings = text_task(runs / "text_data") | STEPS | {"train.steps": 40}
    had = json.loads((tmp_path / "run" / "task.json").read_text())["info"]["data_tokens"]
    message = failed(tmp_path / "run", settings | {"task.data": longer}, "--resume")
    assert re.fullmatch(rf"task.data: {longer} has \d+ tokens, and had {had} when "
                        rf"{tmp_path / 'run'} began; resume with the data it had", message)
    moved = shutil.copy(runs / "text_data" / "text.txt", tmp_path / "moved.txt")
    train(tmp_path / "run", settings | {"task.data": moved}, "--resume")
    assert log_lines(tmp_path / "run")[-1]["step"] == 40


def test_a_damaged_checkpoint_is_named(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "sort", tmp_path / "run")
    damaged = checkpoints(tmp_path / "run")[-1]
    damaged.write_bytes(damaged.read_bytes()[:1000])
    done = run("eval", tmp_path / "run", "--checkpoint", "newest", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["step"] == 20
    assert done.stderr == f"sinkhorn: {damaged}: damaged; left out\n"


def test_keys_that_would_change_nothing_are_refused(runs: Path) -> None:
    for key in ("--task.name", "--task.vocab", "--model.layers", "--train.steps", "--train.seed"):
        for command in ("eval", "inspect"):
            said = refusal(command, runs / "text", key, "4")
            assert said.startswith(f"unknown option {key}; the keys that {command} takes are --task.data")
    assert "--train.batch," in refusal("eval", runs / "text", "--train.seed", "4")
    assert "--train.batch" not in refusal("inspect", runs / "text", "--train.seed", "4")
    text, sort = runs / "text", runs / "sort"
    for command in ("eval", "inspect"):
        assert refusal(command, text, "--task.sort_test_max", "7") == (
            f"--task.sort_test_max is for runs of the task sort; {text} is one of text")
        assert refusal(command, sort, "--task.data", "x") == (
            f"--task.data changes nothing of {sort}, a run of the task sort")
    for command, key in (("eval", "--task.name"), ("eval", "--train.seed"),
                         ("inspect", "--train.batch"), ("inspect", "--task.valid")):
        assert key not in output(command, "--help")


def test_what_training_saw_is_not_held_out(runs: Path) -> None:
    run = runs / "classify"
    assert refusal("eval", run, "--split", "valid", "--task.valid", "train") == (
        f"--task.valid train: {run} was trained on all of the training split, nothing was held out "
        "of it")


def test_a_run_may_lie_anywhere(runs: Path, tmp_path: Path) -> None:
    for name in ("h#1", 'a "quoted" one'):
        shutil.copytree(runs / "text", tmp_path / name / "run")
        run = tmp_path / name / "run"
        expected = json.loads(output("eval", runs / "text", "--json"))["figures"]
        assert json.loads(output("eval", run, "--json"))["figures"] == expected
        output("export", run, tmp_path / name / "out")
        assert json.loads(output("eval", tmp_path / name / "out", "--json"))["figures"] == expected
        output("report", run, "-o", tmp_path / "page.html", "--samples", "0")


def test_data_is_found_from_another_folder(tmp_path: Path) -> None:
    settings = text_task(tmp_path, **{"train.steps": 2}) | {"task.data": "text.txt"}
    done = run(*command(tmp_path / "run", settings), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    other = tmp_path / "other"
    other.mkdir()
    (other / "text.txt").write_text("another text, which is not meant\n" * 100)
    done = run("eval", tmp_path / "run", "--json", cwd=other)
    assert done.returncode == 0, done.stderr
    assert done.stdout == output("eval", tmp_path / "run", "--json")


def test_a_checkpoint_by_its_name(runs: Path) -> None:
    name = checkpoints(runs / "text")[-1].name
    assert json.loads(output("eval", runs / "text", "--checkpoint", name, "--json"))["step"] > 0
    assert refusal("eval", runs / "text", "--checkpoint", "none", code=1).startswith("--checkpoint: none")


def test_the_best_of_a_run_without_one(tmp_path: Path) -> None:
    train(tmp_path / "run", text_task(tmp_path, **{"train.steps": 0}))
    assert refusal("export", tmp_path / "run", tmp_path / "out", "--checkpoint", "best",
                   code=1) == (
        f"{tmp_path / 'run'}: has no best checkpoint yet; --checkpoint newest takes the last one")


@pytest.mark.parametrize(("task", "text", "says"), [
    ("sort", "5 x", "--text cannot be read: input: 'x'; expected numbers from 0 to 15"),
    ("sort", "5 16", "--text cannot be read: input: '16'; expected numbers from 0 to 15"),
    ("sort", "  ", "--text holds nothing to read")])
def test_inspect_of_an_input_that_cannot_be_read(runs: Path, task: str, text: str,
                                                 says: str) -> None:
    assert refusal("inspect", runs / task, "--text", text) == says


def test_the_first_line_says_what_is_trained(runs: Path, tmp_path: Path) -> None:
    first = (runs / "text.txt").read_text().splitlines()[0]
    assert first.startswith("task text: text.txt, 24 tokens; attention sinkhorn, blocks of 4"), first
    assert first.endswith("; 1 layer of width 32"), first
    settings = sort_task(**{"train.steps": 0})
    del settings["task.name"]
    first = train(tmp_path / "run", settings).splitlines()[0]
    assert first.startswith("task sort: 16 symbols, lists of up to 15, by default, since no "
                            "task.name is given; attention "), first


def test_eval_of_shorter_inputs_and_of_a_part_of_the_split(runs: Path) -> None:
    whole = json.loads(output("eval", runs / "sort", "--json"))
    short = json.loads(output("eval", runs / "sort", "--json", "--task.sort_test_max", "7"))
    assert short["rows"] == whole["rows"] and short["tokens"] < whole["tokens"]
    part = json.loads(output("eval", runs / "sort", "--json", "--train.eval_batches", "2"))
    assert part["rows"] == 16
    # Two of four batches that go from short to long: neither the shortest nor the longest half.
    assert 0.35 < part["tokens"] / whole["tokens"] < 0.65
