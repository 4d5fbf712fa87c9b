"""What other programs read: a run folder, with the packages others use (safetensors, tensorboard), and
the JSON of `data check`."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest
import support
import torch
from cli_program import output, run as run_program

safe_open = pytest.importorskip("safetensors").safe_open
EVENTS = "tensorboard.backend.event_processing"
EventAccumulator = pytest.importorskip(f"{EVENTS}.event_accumulator").EventAccumulator
EventFileLoader = pytest.importorskip(f"{EVENTS}.event_file_loader").EventFileLoader

TYPES = {
    "Bool": torch.bool, "Byte": torch.uint8, "Char": torch.int8, "Short": torch.int16,
    "Int": torch.int32, "Long": torch.int64, "BFloat16": torch.bfloat16, "Half": torch.float16,
    "Float": torch.float32, "Double": torch.float64,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files") / "run"
    subprocess.run([support.BUILD / "bin" / "write_files", folder], check=True)
    return folder


@pytest.mark.parametrize("name", ["step-00000020", "best"])
def test_checkpoint_in_python(run: Path, name: str) -> None:
    with safe_open(run / "checkpoints" / f"{name}.safetensors", framework="pt") as file:
        assert file.metadata() == {"step": "20", "note": 'é"'}
        assert set(file.keys()) == {f"t.{word}" for word in TYPES} | {"scalar", "empty"}
        expected = torch.arange(24, dtype=torch.int32).reshape(4, 6).t()
        for word, dtype in TYPES.items():
            tensor = file.get_tensor(f"t.{word}")
            assert tensor.dtype == dtype
            assert torch.equal(tensor, expected.to(dtype))
        assert file.get_tensor("scalar").shape == () and file.get_tensor("scalar").item() == 3.5
        assert file.get_tensor("empty").shape == (0, 3)


def test_log_lines(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 10, "loss": 0.1},
        {"step": 20, "loss": 0.05},
        {"step": 30, "loss": 7.0, "rate": 0.25},
        {"step": 30, "eval": {"perplexity": "NaN"}},
    ]


def test_event_files_in_tensorboard(run: Path) -> None:
    events = EventAccumulator(str(run))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "train/rate", "eval/perplexity"}
    loss = [(event.step, event.value) for event in events.Scalars("train/loss")]
    # The step before the resume at 20 was 30 as well: TensorBoard forgets it.
    assert loss == [(10, pytest.approx(0.1)), (20, pytest.approx(0.05)), (30, 7.0)]
    assert math.isnan(events.Scalars("eval/perplexity")[0].value)


def test_event_files_begin_with_their_version(run: Path) -> None:
    files = sorted(run.glob("events.out.tfevents.*"))
    assert len(files) == 2
    for path in files:
        first = next(iter(EventFileLoader(str(path)).Load()))
        assert first.file_version == "brain.Event:2"
        assert abs(first.wall_time - path.stat().st_mtime) < 60


def test_data_check_of_a_subset(tmp_path: Path) -> None:
    folder = tmp_path / "snli_1.0"
    folder.mkdir()
    for split, verdicts in (("train", ["neutral", "neutral", "entailment"]), ("dev", ["neutral"])):
        lines = [json.dumps({"gold_label": verdict, "sentence1": "a", "sentence2": "b"})
                 for verdict in verdicts]
        (folder / f"snli_1.0_{split}.jsonl").write_text("\n".join(lines))
    answer = json.loads(output("data", "check", "nli", tmp_path, "--json"))
    note = ("train is a subset: 3 of 549367; valid is a subset: 1 of 9842; test is a subset: 1 of 9842; "
            "test is the validation split")
    assert answer.pop("lines")[-1] == f"usable: SNLI; {note}"
    held = {"files": 1, "items": 1, "bytes": None, "expected": 9842, "subset": True,
            "labels": {"entailment": 0, "neutral": 1, "contradiction": 0}}
    assert answer == {
        "task": "nli", "data": str(tmp_path), "complete": True, "name": "SNLI",
        "page": "https://nlp.stanford.edu/projects/snli/", "note": note, "error": "",
        "splits": {
            "train": {**held, "items": 3, "expected": 549367,
                      "labels": {"entailment": 1, "neutral": 2, "contradiction": 0}},
            "valid": held,
            "test": held,
        },
    }


def test_data_check_of_a_running_text(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("twenty bytes a line\n" * 2000)
    answer = json.loads(output("data", "check", "text", text, "--json"))
    assert answer["note"] == "validation and test are the last two twentieths of the text"
    assert (answer["name"], answer["page"]) == ("text.txt", "")
    split = {"files": 1, "items": None, "expected": None, "subset": False}
    assert answer["splits"] == {"train": {**split, "bytes": 36000}, "valid": {**split, "bytes": 2000},
                                "test": {**split, "bytes": 2000}}


def test_data_check_of_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("a\tgood\nb\n")
    (tmp_path / "valid.tsv").write_text("a\tgood\n")
    done = run_program("data", "check", "classify", tmp_path, "--json")
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert answer["complete"] is False
    assert answer["error"].startswith(f"{tmp_path}/train.tsv:2: found 1 columns; expected 2")
    assert answer["lines"][-1] == "not usable: " + answer["error"]
    assert answer["splits"]["train"] == {
        "files": 1, "items": None, "bytes": None, "expected": None, "subset": False}
