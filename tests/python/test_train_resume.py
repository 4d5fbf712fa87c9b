"""A run that was stopped, however it was, ends as if nothing had happened."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from cli_program import output, refusal, run
from train_program import (CHANCE, Settings, assert_same_run, check_checkpoint, checkpoints,
                           classify_task, command, failed, log_lines, log_text, losses, safe_open,
                           sort_task, start, tensors, text_task, train, wait_for_steps)

STEPS: Settings = {"train.steps": 30, "train.log_every": 4, "train.save_every": 7,
                   "train.eval_every": 10, "train.eval_batches": 2}
TASKS = {
    "sort": lambda folder: sort_task(**{"optimizer.name": "adamw"}),
    "text": lambda folder: text_task(folder, **{"optimizer.name": "adam",
                                                  "train.precision": "bf16"}),
    "classify": lambda folder: classify_task(
        folder, **{"optimizer.name": "adafactor", "optimizer.rate": 0.1,
                   "train.batch_tokens": 256}),
}


def stop(folder: Path, settings: Settings, reports: int, how: signal.Signals) -> int:
    """Trains until the log has some lines, then signals; the exit code."""
    process = start(folder, settings)
    assert wait_for_steps(process, reports)
    process.send_signal(how)
    process.communicate(timeout=60)
    return process.returncode


@pytest.mark.parametrize("threads", [1, 0])
def test_two_runs_are_one(tmp_path: Path, threads: int) -> None:
    settings = sort_task(**CHANCE, **STEPS) | {"train.threads": threads}
    for name in ("a", "b"):
        train(tmp_path / name, settings)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    # The files too, but for the run's own name in the configuration they carry.
    a, b = (checkpoints(tmp_path / name)[-1].read_bytes() for name in ("a", "b"))
    assert a.replace(str(tmp_path / "a").encode(), str(tmp_path / "b").encode()) == b


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    settings = sort_task(**STEPS)
    train(tmp_path / "a", settings)
    train(tmp_path / "b", settings | {"train.seed": 2})
    assert log_text(tmp_path / "a") != log_text(tmp_path / "b")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_resume_to_the_bit(tmp_path: Path, task: str, how: signal.Signals) -> None:
    settings = TASKS[task](tmp_path / "data") | CHANCE | STEPS
    train(tmp_path / "whole", settings)
    code = stop(tmp_path / "parts", settings | {"train.steps": 10**6}, 3, how)
    assert code == (-how if how == signal.SIGKILL else 128 + how)
    train(tmp_path / "parts", settings, "--resume")
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "adafactor"])
def test_resume_of_every_optimizer(tmp_path: Path, optimizer: str) -> None:
    settings = sort_task(**CHANCE, **STEPS) | {"optimizer.name": optimizer,
                                               "optimizer.rate": 0.01}
    train(tmp_path / "whole", settings)
    train(tmp_path / "parts", settings | {"train.steps": 16})
    train(tmp_path / "parts", settings, "--resume")
    whole, parts = tensors(checkpoints(tmp_path / "whole")[-1]), tensors(
        checkpoints(tmp_path / "parts")[-1])
    assert whole.keys() == parts.keys()
    assert all(whole[name].equal(parts[name]) for name in whole)


@pytest.mark.parametrize("task", TASKS)
def test_resume_from_the_initial_state(tmp_path: Path, task: str) -> None:
    settings = TASKS[task](tmp_path / "data") | CHANCE | STEPS
    train(tmp_path / "whole", settings)
    train(tmp_path / "parts", settings | {"train.steps": 0})
    check_checkpoint(tmp_path / "parts" / "checkpoints" / "step-00000000.safetensors")
    train(tmp_path / "parts", settings, "--resume")
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_exits(tmp_path: Path, how: signal.Signals) -> None:
    settings = sort_task(**{"train.steps": 100000, "train.save_every": 100000,
                            "train.log_every": 1})
    assert stop(tmp_path / "run", settings, 5, how) == 128 + how
    (saved,) = checkpoints(tmp_path / "run")
    step = int(saved.stem.removeprefix("step-"))
    assert step >= 5
    check_checkpoint(saved)
    assert log_lines(tmp_path / "run")[-1]["step"] == step
    config = (tmp_path / "run" / "config.ini").read_text()
    assert f"has made {step} steps; train.steps is 2" in failed(
        tmp_path / "run", settings | {"train.steps": 2}, "--resume", code=2)
    assert (tmp_path / "run" / "config.ini").read_text() == config
    said = train(tmp_path / "run", settings | {"train.steps": step + 1}, "--resume")
    assert f"step {step} of {step + 1}, resumed" in said


def test_twenty_kills(tmp_path: Path) -> None:
    chance = random.Random(20)
    settings = sort_task(**CHANCE, **{"train.log_every": 1, "train.save_every": 2,
                                      "train.eval_every": 5, "train.eval_batches": 1})
    folder = tmp_path / "killed"
    newest = 0
    for _ in range(20):
        resumes = (folder / "config.ini").exists()  # killed before that, there is no run yet
        process = start(folder, settings | {"train.steps": 10**6}, *["--resume"] * resumes)
        if chance.random() < 0.3:
            time.sleep(chance.uniform(0, 0.7))  # while it starts
        else:
            assert wait_for_steps(process, chance.randint(1, 12))
            time.sleep(chance.uniform(0, 0.05))
        process.kill()
        said, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL
        for path in checkpoints(folder):
            check_checkpoint(path)
        if checkpoints(folder):
            step = int(checkpoints(folder)[-1].stem.removeprefix("step-"))
            assert step >= newest, "a checkpoint was lost"
            newest = step
        for reported in re.findall(r"^step (\d+)/", said, re.MULTILINE):
            assert newest >= int(reported) - 2, "more than the steps since the last save were lost"
    assert newest > 20
    settings |= {"train.steps": newest + 10}
    train(folder, settings, "--resume")
    train(tmp_path / "whole", settings)
    assert_same_run(folder, tmp_path / "whole")
    assert not list(folder.rglob("*.tmp*")), "something half written was left"


def test_a_finished_run_resumes_to_itself(tmp_path: Path) -> None:
    settings = sort_task(**STEPS)
    train(tmp_path / "run", settings)
    before = log_text(tmp_path / "run")
    train(tmp_path / "run", settings, "--resume")
    assert log_text(tmp_path / "run") == before


def test_a_run_is_not_trained_over(tmp_path: Path) -> None:
    settings = sort_task(**STEPS)
    train(tmp_path / "run", settings)
    before = log_text(tmp_path / "run")
    assert failed(tmp_path / "run", settings, code=2) == (
        f"{tmp_path / 'run'}: holds a run already; resume it (--resume) or name another folder")
    assert log_text(tmp_path / "run") == before
    assert "holds no run to resume" in failed(tmp_path / "none", settings, "--resume", code=2)


@pytest.mark.parametrize(("key", "value", "now"), [
    ("model.width", 64, "width = 64"), ("model.dropout", 0.5, "dropout = 0.5"),
    ("optimizer.name", "adam", 'name = "adam"'), ("task.sort_symbols", 8, "sort_symbols = 8"),
    ("decoder.kind", "local", 'kind = "local"'), ("train.seed", 7, "seed = 7"),
    ("train.batch", 3, "batch = 3"),
])
def test_resume_of_another_model_is_refused(tmp_path: Path, key: str, value: object,
                                            now: str) -> None:
    settings = sort_task(**STEPS) | {"train.steps": 2}
    train(tmp_path / "run", settings)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    message = failed(tmp_path / "run", settings | {key: value}, "--resume", code=2)
    assert "cannot resume with another configuration" in message
    assert now in message
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*")
                      if path.is_file()}


def test_resume_of_a_run_that_did_not_know_a_key(tmp_path: Path) -> None:
    """As a run of an earlier version does not know the keys that have come since."""
    settings = sort_task(**STEPS) | {"train.steps": 2}
    train(tmp_path / "run", settings)
    config = tmp_path / "run" / "config.ini"
    lines = config.read_text().splitlines(keepends=True)
    older = [line for line in lines if not line.startswith(("merged", "tie_kv"))]
    assert len(older) < len(lines)
    config.write_text("".join(older))
    train(tmp_path / "run", settings | {"train.steps": 4}, "--resume")
    assert config.read_text().count("tie_kv") == "".join(lines).count("tie_kv")


def test_resume_of_a_run_that_knew_another_key(tmp_path: Path) -> None:
    settings = sort_task(**STEPS) | {"train.steps": 2}
    train(tmp_path / "run", settings)
    config = tmp_path / "run" / "config.ini"
    config.write_text(config.read_text().replace("[model]\n", "[model]\nrotary = true\n"))
    message = failed(tmp_path / "run", settings | {"train.steps": 4}, "--resume", code=2)
    assert "the run has '[model] rotary = true', this is without it; what may change" in message


def test_a_configuration_that_is_no_run_stays(tmp_path: Path) -> None:
    """Of whatever name, and whatever lies beside it."""
    folder = tmp_path / "project"
    (folder / "checkpoints").mkdir(parents=True)
    mine = folder / "config.ini"
    mine.write_text("# mine\n[task]\nname = sort\n")
    assert refusal("train", folder, "--continue") == (
        f"{folder}: is not the folder of a run; expected that, or a configuration file")
    said = output("train", mine, "--dry-run")
    assert 'run = "runs/config"' in said
    assert mine.read_text() == "# mine\n[task]\nname = sort\n"


def test_a_signal_while_evaluating(tmp_path: Path) -> None:
    """It is heard before the next batch; the resumed run begins with what was given up."""
    settings = sort_task(**CHANCE, **{"train.steps": 6, "train.log_every": 1, "train.eval_every": 3,
                                      "train.batch": 1, "task.sort_test_size": 20000})
    process = start(tmp_path / "parts", settings)
    assert wait_for_steps(process, 3)
    time.sleep(0.3)
    begin = time.monotonic()
    process.terminate()
    process.communicate(timeout=60)
    assert time.monotonic() - begin < 5
    assert process.returncode == 128 + signal.SIGTERM
    assert [path.stem for path in checkpoints(tmp_path / "parts")] == ["step-00000003"]
    assert not any("valid" in line for line in log_lines(tmp_path / "parts"))
    fewer = settings | {"train.eval_batches": 4, "train.test_batches": 4}
    train(tmp_path / "parts", fewer, "--resume")
    train(tmp_path / "whole", fewer)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_a_signal_in_the_last_test(tmp_path: Path) -> None:
    settings = sort_task(**{"train.steps": 2, "train.log_every": 1, "train.batch": 1,
                            "train.eval_batches": 1, "task.sort_test_size": 20000})
    process = start(tmp_path / "run", settings)
    assert any("valid" in line for line in process.stdout)
    time.sleep(0.3)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    logged = log_text(tmp_path / "run")
    assert '"valid"' in logged and '"test"' not in logged
    assert [path.stem for path in checkpoints(tmp_path / "run")] == ["step-00000002"]
    said = train(tmp_path / "run", settings | {"train.test_batches": 2}, "--resume")
    assert "step 2  test:" in said


def test_a_copied_run_is_a_run_of_its_own(tmp_path: Path) -> None:
    """Whether it is named by its folder or by the configuration in it."""
    settings = sort_task(**STEPS) | {"train.steps": 4}
    train(tmp_path / "first", settings)
    before = {path: path.read_bytes() for path in (tmp_path / "first").rglob("*") if path.is_file()}
    for name, config in (("second", "second"), ("third", "third/config.ini")):
        shutil.copytree(tmp_path / "first", tmp_path / name)
        said = output("train", str(tmp_path / config), "--resume", "--train.steps", "6")
        assert f"{tmp_path / name}: " in said and "step 4 of 6, resumed" in said
        assert checkpoints(tmp_path / name)[-1].stem == "step-00000006"
    assert before == {path: path.read_bytes() for path in (tmp_path / "first").rglob("*")
                      if path.is_file()}


def test_continue_begins_or_resumes(tmp_path: Path) -> None:
    settings = sort_task(**CHANCE, **STEPS)
    train(tmp_path / "parts", settings | {"train.steps": 8}, "--continue")
    said = train(tmp_path / "parts", settings, "--continue")
    assert "step 8 of 30, resumed" in said
    train(tmp_path / "whole", settings)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert "--resume excludes --continue" in failed(tmp_path / "parts", settings, "--continue",
                                                    "--resume", code=2)


def test_continue_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    """A run that was killed before its first one is begun, with what is asked for now."""
    settings = sort_task(**CHANCE, **STEPS)
    train(tmp_path / "run", settings | {"train.steps": 2, "model.width": 64})
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    said = train(tmp_path / "run", settings, "--continue")
    assert "step 0 of 30\n" in said
    train(tmp_path / "whole", settings)
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 30


@pytest.mark.parametrize("flag", ["--resume", "--continue"])
def test_damaged_checkpoints_are_not_trained_over(tmp_path: Path, flag: str) -> None:
    settings = sort_task(**STEPS) | {"train.steps": 20, "train.keep": 2}
    train(tmp_path / "run", settings)
    *steps, best = [*checkpoints(tmp_path / "run"),
                    tmp_path / "run" / "checkpoints" / "best.safetensors"]
    for path in steps:
        path.write_bytes(path.read_bytes()[:1000])  # a link to the best among them
    best.write_bytes(b"")
    before = log_text(tmp_path / "run")
    done = run(*command(tmp_path / "run", settings, flag))
    assert done.returncode == 1
    *notices, message = done.stderr.splitlines()
    assert notices == [f"sinkhorn: {path}: damaged; left out" for path in reversed(steps)]
    assert message == (f"sinkhorn: {tmp_path / 'run'}: none of its checkpoints reads back; begin "
                       "again in another folder")
    assert log_text(tmp_path / "run") == before


def test_the_best_serves_where_the_newest_are_damaged(tmp_path: Path) -> None:
    settings = sort_task(**CHANCE, **STEPS) | {"train.keep": 1}
    train(tmp_path / "whole", settings)
    train(tmp_path / "run", settings | {"train.steps": 20})
    folder = tmp_path / "run" / "checkpoints"
    with safe_open(folder / "best.safetensors", framework="pt") as file:
        step = file.metadata()["step"]
    (newest,) = checkpoints(tmp_path / "run")
    newest.unlink()  # it may be the best by another name
    newest.write_bytes(b"cut off")
    done = run(*command(tmp_path / "run", settings, "--resume"))
    assert done.stderr == f"sinkhorn: {newest}: damaged; left out\n"
    assert f"step {step} of 30, resumed" in done.stdout
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_what_a_killed_part_took_is_counted(tmp_path: Path) -> None:
    settings = sort_task(**STEPS) | {"train.save_every": 1, "train.log_every": 1}
    process = start(tmp_path / "run", settings | {"train.steps": 10**6})
    assert wait_for_steps(process, 20)
    process.kill()
    process.wait()
    result = tmp_path / "run" / "result.json"
    first = json.loads(result.read_text())
    assert not first["finished"] and first["steps"] >= 19
    settings |= {"train.steps": checkpoints(tmp_path / "run")[-1].stem.removeprefix("step-")}
    train(tmp_path / "run", settings, "--resume")  # makes no step
    last = json.loads(result.read_text())
    assert last["finished"]
    assert last["seconds"] > first["seconds"] > 0
    assert last["tokens_per_second"] == first["tokens_per_second"]


def test_another_machine_leaves_its_description(tmp_path: Path) -> None:
    settings = sort_task(**STEPS) | {"train.steps": 4}
    train(tmp_path / "run", settings)
    first = (tmp_path / "run" / "environment.json").read_text()
    train(tmp_path / "run", settings | {"train.steps": 6}, "--resume")
    assert not list((tmp_path / "run").glob("environment-*"))
    train(tmp_path / "run", settings | {"train.steps": 8, "train.threads": 2}, "--resume")
    assert (tmp_path / "run" / "environment.json").read_text() == first
    assert json.loads((tmp_path / "run" / "environment-6.json").read_text())["threads"] == 2


def test_resume_where_the_data_was_moved(tmp_path: Path) -> None:
    steps = STEPS | {"train.log_every": 5}
    settings = text_task(tmp_path / "here") | steps
    train(tmp_path / "whole", settings | {"train.steps": 20})
    train(tmp_path / "run", settings | {"train.steps": 10})
    moved = text_task(tmp_path / "there") | steps | {"train.steps": 20}
    train(tmp_path / "run", moved, "--resume")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
