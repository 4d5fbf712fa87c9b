"""A run is on the disk, whole, before it counts, and a disk that fills up takes nothing of it.

A library between the program and the disk (disk_spy.cpp) writes down what is written, synced and
renamed, in this order, and plays a disk that is full.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cli_program import PROGRAM
from train_program import (CHANCE, Settings, assert_same_run, check_checkpoint, checkpoints,
                           command, sort_task, train)

SETTINGS = sort_task(**CHANCE, **{
    "train.steps": 12, "train.log_every": 2, "train.save_every": 4, "train.eval_every": 6,
    "train.eval_batches": 1, "train.keep": 2})
STEPS = [4, 6, 8, 12]  # those that are saved; the sixth is the best by then

Call = tuple[str, ...]  # what, the paths, and of a write the bytes


@pytest.fixture(scope="module")
def spy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    library = tmp_path_factory.mktemp("library") / "disk_spy.so"
    subprocess.run([compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-o", library,
                    Path(__file__).with_name("disk_spy.cpp"), "-ldl"], check=True)
    return library


def watched(spy: Path, folder: Path, settings: Settings, room: int | None = None,
            *flags: str) -> tuple[subprocess.CompletedProcess[str], list[Call]]:
    """A training and what it did to the disk, on which there is so much room."""
    log = folder.with_suffix(".calls")
    environment = os.environ | {"LD_PRELOAD": str(spy), "DISK_LOG": str(log),
                                "DISK_FOLDER": str(folder)}
    if room is not None:
        environment["DISK_ROOM"] = str(room)
    done = subprocess.run([PROGRAM, *command(folder, settings, *flags)], env=environment,
                          capture_output=True, text=True, timeout=300, check=False)
    return done, [tuple(line.split("\t")) for line in log.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(spy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Call]]:
    """A run that nothing stopped. Others have names of as many letters: a checkpoint holds them."""
    folder = tmp_path_factory.mktemp("runs") / "run-0"
    done, calls = watched(spy, folder, SETTINGS)
    assert done.returncode == 0, done.stderr
    return folder, calls


def placed(calls: list[Call], folder: Path) -> list[str]:
    """The files that took their names: on the disk before, and the name before anything else."""
    names = []
    for at, (what, *paths) in enumerate(calls):
        if what != "rename":
            continue
        source, target = paths
        before = [call[0] for call in calls[:at] if source in call[1:]]
        assert before[-1] == "sync" and before[-2] in ("write", "link"), f"{target}: {before}"
        assert calls[at + 1] == ("sync", str(Path(target).parent)), f"{target}: {calls[at + 1]}"
        names.append(str(Path(target).relative_to(folder)))
    return names


def test_a_file_is_on_disk_before_it_has_its_name(whole: tuple[Path, list[Call]]) -> None:
    folder, calls = whole
    names = placed(calls, folder)
    saved = [f"checkpoints/step-{step:08}.safetensors" for step in STEPS]
    assert names.count("checkpoints/newest.json") == len(STEPS)
    assert set(names) == {"environment.json", "task.json", "config.ini", "result.json",
                          "checkpoints/newest.json", "checkpoints/best.safetensors", *saved}
    # What never takes a name is only ever added to.
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {name.split(".")[0] for name in written - set(names)} == {"log", "events"}


def test_a_resumed_run_writes_as_carefully(spy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, SETTINGS | {"train.steps": 6})
    done, calls = watched(spy, folder, SETTINGS, None, "--resume")
    assert done.returncode == 0, done.stderr
    assert placed(calls, folder)[:4] == ["config.ini", "log.jsonl", "result.json",
                                         "checkpoints/step-00000008.safetensors"]


def new_checkpoints(calls: list[Call]) -> list[int]:
    """Where each gets its name."""
    return [at for at, call in enumerate(calls)
            if call[0] == "rename" and "/checkpoints/step-" in call[2]]


def test_the_log_is_on_disk_before_a_checkpoint(whole: tuple[Path, list[Call]]) -> None:
    """Else a resumed run would go on behind lines that are lost."""
    _, calls = whole
    for at in new_checkpoints(calls):
        for name in ("/log.jsonl", "/events."):
            of_log = [call[0] for call in calls[:at] if name in call[1]]
            assert not of_log or of_log[-1] == "sync", calls[at]
    assert any("/log.jsonl" in call[1] for call in calls[:new_checkpoints(calls)[1]])


def test_new_names_are_on_disk_before_a_checkpoint(whole: tuple[Path, list[Call]]) -> None:
    """A file that is on disk is lost with its name, and a folder with all that it holds."""
    folder, calls = whole
    for at in new_checkpoints(calls):
        appear = {call[1]: place for place, call in reversed(list(enumerate(calls[:at])))
                  if call[0] in ("mkdir", "write") and Path(call[1]).parent == folder
                  and not call[1].endswith(".tmp")}
        synced = max(place for place, call in enumerate(calls[:at])
                     if call == ("sync", str(folder)))
        late = [path for path, place in appear.items() if place > synced]
        assert not late, f"not synced in {folder} when {calls[at][2]} is in place: {late}"


def test_an_old_checkpoint_goes_after_the_new_one_came(whole: tuple[Path, list[Call]]) -> None:
    folder, calls = whole
    newest = str(folder / "checkpoints" / "newest.json")
    removed = [at for at, call in enumerate(calls) if call[0] == "remove"]
    assert [Path(calls[at][1]).stem for at in removed] == ["step-00000004", "step-00000006"]
    for at in removed:
        assert calls[at - 2][::2] == ("rename", newest) and calls[at - 1][0] == "sync"


def room_until(calls: list[Call], name: str, number: int) -> int:
    """Bytes on a disk that is full in the middle of this write to a file of this name."""
    writes = [at for at, call in enumerate(calls) if call[0] == "write" and name in call[1]]
    end = writes[number]
    return sum(int(call[2]) for call in calls[:end] if call[0] == "write") + int(calls[end][2]) // 2


@pytest.mark.parametrize(("run", "name", "number", "kept"), [
    (1, "checkpoints/step-00000008", 1, [4, 6]),
    (2, "checkpoints/step-00000008", -1, [4, 6]),
    (3, "checkpoints/best", 20, [4]),
    (4, "checkpoints/newest.json", 1, [4, 6]),
    (5, "log.jsonl", 5, [6, 8]),
    (6, "events", 5, [4]),
    (7, "result.json", 0, [4]),
    (8, "result.json", -1, [8, 12]),
])
def test_a_full_disk_costs_nothing(spy: Path, whole: tuple[Path, list[Call]], run: int, name: str,
                                   number: int, kept: list[int]) -> None:
    expected, calls = whole
    folder = expected.with_name(f"run-{run}")
    done, _ = watched(spy, folder, SETTINGS, room_until(calls, name, number))
    assert done.returncode == 1
    assert re.fullmatch(rf"sinkhorn: {folder}/{name}[^:]*: cannot write: No space left on device\n",
                        done.stderr), done.stderr
    assert [path.name for path in checkpoints(folder)] == [
        f"step-{step:08}.safetensors" for step in kept]
    for path in checkpoints(folder):
        check_checkpoint(path)
    newest = json.loads((folder / "checkpoints" / "newest.json").read_text())
    assert (folder / "checkpoints" / newest["file"]).exists()
    assert not list(folder.rglob("*.tmp"))
    train(folder, SETTINGS, "--resume")  # there is room again
    assert_same_run(folder, expected)


def test_a_disk_that_is_full_from_the_start(spy: Path, whole: tuple[Path, list[Call]]) -> None:
    """There is no run yet, and one can be made."""
    expected, calls = whole
    folder = expected.with_name("run-a")
    done, _ = watched(spy, folder, SETTINGS, room_until(calls, "config.ini", 0))
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert done.stderr.startswith(f"sinkhorn: {folder}/config.ini")
    train(folder, SETTINGS)
    assert_same_run(folder, expected)


def test_a_half_written_file_is_no_checkpoint(spy: Path, whole: tuple[Path, list[Call]]) -> None:
    """As one that a lost machine leaves behind; what goes on with the run takes it away."""
    expected, _ = whole
    folder = expected.with_name("run-9")
    train(folder, SETTINGS | {"train.steps": 4})
    half = folder / "checkpoints" / "step-00000099.safetensors.123.tmp"
    half.write_bytes(checkpoints(folder)[-1].read_bytes()[:5000])
    train(folder, SETTINGS | {"train.steps": 12}, "--resume")
    assert not half.exists()
    state, truth = (check_checkpoint(checkpoints(at)[-1]) for at in (folder, expected))
    assert all(state[key].equal(truth[key]) for key in truth)
