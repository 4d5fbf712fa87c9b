"""What goes wrong in training ends it with one line and leaves the last good state."""

from __future__ import annotations

import json
import re
import resource
import signal
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from train_program import (CHANCE, assert_same_run, check_checkpoint, checkpoints, failed,
                           log_lines, sort_task, start, tensors, text_task, train,
                           wait_for_steps)


# Parameters of 1e7 after some steps, and products of them that no float32 holds.
EXPLODING = {"optimizer.rate": 1e7, "optimizer.clip": 0, "optimizer.warmup": 4,
             "train.steps": 200, "train.save_every": 1000}


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
@pytest.mark.parametrize("log_every", [1, 7, 200])
def test_a_loss_that_explodes_leaves_the_last_good_state(tmp_path: Path, log_every: int,
                                                         optimizer: str) -> None:
    """Whenever it is noticed: the checkpoint is that of a run that ends one step before."""
    settings = sort_task(**CHANCE, **EXPLODING) | {"optimizer.name": optimizer,
                                                   "train.log_every": log_every}
    message = failed(tmp_path / "run", settings)
    found = re.match(r"step (\d+): (the gradient of (\S+)|the loss) is not finite; the state "
                     r"before it is saved: --resume goes on from there", message)
    assert found, message
    good = int(found[1]) - 1
    (saved,) = checkpoints(tmp_path / "run")
    assert saved.stem == f"step-{good:08d}"
    state = check_checkpoint(saved)
    if found[3]:
        assert f"model/{found[3]}" in state
    log = tmp_path / "run" / "log.jsonl"
    assert not log.exists() or not re.search("nan|inf", log.read_text(), re.IGNORECASE)
    train(tmp_path / "short", settings | {"train.steps": good})
    expected = tensors(checkpoints(tmp_path / "short")[-1])
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert state[name].equal(tensor) or name.startswith("report/"), name


def test_what_is_not_finite_is_named(tmp_path: Path) -> None:
    """A gradient where the loss is fine: squares of 1e30 are more than float32 holds."""
    settings = text_task(tmp_path / "data", **{"train.steps": 3, "model.tied": "false"})
    train(tmp_path / "run", settings)
    (saved,) = checkpoints(tmp_path / "run")
    with safe_open(saved, framework="pt") as file:
        metadata = file.metadata()
    state = tensors(saved)
    state["model/output.weight"].mul_(1e30)  # and the norm before it makes that good
    state["model/decoder.norm.weight"].mul_(1e-30)
    state["model/decoder.norm.bias"].mul_(1e-30)
    save_file(state, saved, metadata)
    message = failed(tmp_path / "run", settings | {"train.steps": 6}, "--resume")
    named = "the gradient of decoder.norm.weight is not finite; the state before it is saved"
    assert message.startswith(f"step 4: {named}"), message


def test_what_went_before_an_explosion_is_kept(tmp_path: Path) -> None:
    """The state before the step may be spoilt already: a user may want to go further back."""
    settings = sort_task(**CHANCE, **{"train.steps": 4, "train.save_every": 2, "train.keep": 1})
    train(tmp_path / "run", settings)
    message = failed(tmp_path / "run", settings | EXPLODING, "--resume")
    good = int(message.removeprefix("step ").split(":")[0]) - 1
    names = [path.stem for path in checkpoints(tmp_path / "run")]
    assert names == ["step-00000004", f"step-{good:08d}"]


def test_a_run_goes_on_with_another_rate(tmp_path: Path) -> None:
    settings = sort_task(**{"train.steps": 4, "train.log_every": 1})
    train(tmp_path / "run", settings)
    calm = {"optimizer.rate": 1e-5, "optimizer.clip": 0.5, "train.steps": 8}
    said = train(tmp_path / "run", settings | calm, "--resume")
    assert "step 4 of 8, resumed" in said
    rates = [line["rate"] for line in log_lines(tmp_path / "run") if "rate" in line]
    assert max(rates[4:]) <= 1e-5 < min(rates[:4])
    assert "rate = 1e-05" in (tmp_path / "run" / "config.ini").read_text()


def test_a_run_that_came_to_no_checkpoint_is_begun_anew(tmp_path: Path) -> None:
    settings = sort_task(**{"train.steps": 6, "train.log_every": 1})
    process = start(tmp_path / "run", settings | {"train.steps": 10**6, "train.save_every": 10**6})
    assert wait_for_steps(process, 3)
    process.kill()
    process.wait()
    assert not checkpoints(tmp_path / "run")
    train(tmp_path / "run", settings)
    train(tmp_path / "other", settings)
    assert_same_run(tmp_path / "run", tmp_path / "other")


def test_a_full_disk_is_reported_and_costs_nothing(tmp_path: Path) -> None:
    """A disk that fills up while training: from some moment on files end at 32 KiB."""
    settings = sort_task(**CHANCE, **{"train.save_every": 4, "train.log_every": 2,
                                      "train.steps": 120})
    train(tmp_path / "whole", settings)
    process = start(tmp_path / "run", settings,
                    preexec_fn=lambda: signal.signal(signal.SIGXFSZ, signal.SIG_IGN))
    assert wait_for_steps(process, 5)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (32 << 10, 32 << 10))
    _, message = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.fullmatch(r"sinkhorn: .*/checkpoints/.*File too large.*\n", message), message
    saved = checkpoints(tmp_path / "run")
    assert saved
    for path in saved:
        check_checkpoint(path)
    train(tmp_path / "run", settings, "--resume")  # there is room again
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(("number", "code"), [
    (signal.SIGHUP, 128 + signal.SIGHUP),
    (signal.SIGPIPE, 1),  # what was to be printed could not be
])
def test_a_terminal_that_goes_away_costs_nothing(tmp_path: Path, number: signal.Signals,
                                                 code: int) -> None:
    settings = sort_task(**CHANCE, **{"train.save_every": 10**6, "train.log_every": 2,
                                      "train.steps": 200})
    train(tmp_path / "whole", settings)
    process = start(tmp_path / "run", settings)
    assert wait_for_steps(process, 5)
    if number == signal.SIGHUP:
        process.send_signal(number)
    else:
        process.stdout.close()  # the next line finds nobody
    process.wait(timeout=60)
    assert process.returncode == code
    assert checkpoints(tmp_path / "run")
    train(tmp_path / "run", settings, "--resume")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "mine.txt").write_text("mine")
    assert failed(tmp_path / "texts", sort_task(**{"train.steps": 1}), code=2) == (
        f"{tmp_path / 'texts'}: holds other things than a run; name another folder")
    assert [path.name for path in (tmp_path / "texts").iterdir()] == ["mine.txt"]


def test_a_text_without_spaces_has_a_best_checkpoint(tmp_path: Path) -> None:
    """A perplexity per word means nothing there, and ends nothing."""
    settings = text_task(tmp_path / "data", **{"task.tokens": "pieces", "task.vocab": 300,
                                               "train.steps": 4, "train.eval_every": 2,
                                               "train.eval_batches": 1})
    text = settings["task.data"]
    text.write_text(text.read_text().replace(" ", "").replace("\n", ""))
    said = train(tmp_path / "run", settings)
    assert "token_perplexity" in said
    assert (tmp_path / "run" / "checkpoints" / "best.safetensors").exists()


def test_a_model_that_no_memory_holds(tmp_path: Path) -> None:
    message = failed(tmp_path / "run", sort_task(**{"model.width": 2**20, "train.steps": 1}))
    assert message == "out of memory; make the batch, the sequences or the model smaller"


def test_sequences_longer_than_the_model_reads(tmp_path: Path) -> None:
    settings = text_task(tmp_path / "data", **{"task.length": 24, "model.max_length": 23})
    message = failed(tmp_path / "run", settings, code=2)
    assert message.startswith("model.max_length: 23 is less than the 24 tokens")


def test_rows_longer_than_the_text(tmp_path: Path) -> None:
    settings = text_task(tmp_path / "data", **{"task.length": 10**8, "train.steps": 1})
    message = failed(tmp_path / "run", settings, code=2)
    assert message.startswith("task.length: 100000000 is more than all of the training text, ")


def test_resuming_a_finished_run_keeps_what_was_measured(tmp_path: Path) -> None:
    settings = sort_task(**{"train.steps": 2})
    train(tmp_path / "run", settings)
    before = json.loads((tmp_path / "run" / "result.json").read_text())
    assert before["tokens_per_second"] > 0
    train(tmp_path / "run", settings, "--resume")
    after = json.loads((tmp_path / "run" / "result.json").read_text())
    assert after["tokens_per_second"] == before["tokens_per_second"]
    assert after["peak_memory"] >= before["peak_memory"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = failed(tmp_path / "file", sort_task(**{"train.steps": 1}))
    assert message.startswith(str(tmp_path / "file"))
