"""`sinkhorn reproduce`: a table trained, interrupted, resumed, skipped as done, and what goes wrong."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from cli_program import CONFIGS, PROGRAM, output, refusal, run
from reproduce_program import COMMON, FULL, SINKHORN, cells, results, words, write_table


def test_table1_trains_and_is_then_done(tmp_path: Path) -> None:
    command = ["reproduce", "table1", "--configs", str(CONFIGS), "--rows",
               "transformer,sinkhorn-8", "--out", str(tmp_path), "--device", "cpu"]
    text = output(*command)
    assert "table1/smoke/sinkhorn-8/seed1 started (2 of 2)" in text
    assert "Table 1: sorting" in text and "49.24" in text and "scale smoke, 12 steps" in text
    found = json.loads((tmp_path / "table1.smoke.json").read_text())
    assert [row["name"] for row in found["rows"]][:2] == ["Transformer", "Local(32)"]
    cell = found["rows"][0]["cells"][2]
    assert cell["paper"] == 45.69 and cell["seeds"] == [cell["value"]] and cell["steps"] == 12
    assert cell["data"].startswith("generated") and cell["leaks"] is False
    assert cell["seconds"] > 0 and cell["tokens_per_second"] > 0 and cell["peak_memory"] > 0
    assert (tmp_path / cell["run"] / "output.log").exists()
    assert found["rows"][1]["cells"][2]["value"] is None
    # Done, by its run folders and without them.
    assert "started" not in output(*command)
    shutil.rmtree(tmp_path / "table1")
    assert "started" not in output(*command)
    assert json.loads(output(*command, "--json")) == found


def test_published_tables_are_read_as_done(tmp_path: Path) -> None:
    """Table 7 without MultiNLI, which nobody trained: what is there is shown."""
    for name in ("table5", "table7"):
        shutil.copy(CONFIGS.parent / "docs/results" / f"{name}.small.json", tmp_path)
        said = run("reproduce", name, "--scale", "small", "--out", str(tmp_path), "--data",
                   str(tmp_path), "--device", "cpu")
        assert said.returncode == 0, said.stderr
        assert not (tmp_path / name).exists()
        assert "Sinkhorn(" in said.stdout
    assert "multinli_1.0" in said.stdout + said.stderr


def test_another_configuration_is_another_run(tmp_path: Path) -> None:
    configs = write_table(tmp_path, FULL | SINKHORN)
    output(*words(tmp_path))
    before = cells(tmp_path)
    (configs / "mine" / "full.ini").write_text("include = common.ini\n[attention]\nkind = local\n")
    done = run(*words(tmp_path))
    assert done.returncode == 1
    assert "full/seed1: holds a run of another configuration; remove it" in done.stdout
    shutil.rmtree(tmp_path / "out" / "mine" / "smoke" / "full")
    assert "mine/smoke/full/seed1 started (1 of 1)" in output(*words(tmp_path))
    after = cells(tmp_path)
    assert after["full"]["config_hash"] != before["full"]["config_hash"]
    assert after["sinkhorn"] == before["sinkhorn"]


def test_interrupted_and_resumed(tmp_path: Path) -> None:
    write_table(tmp_path, SINKHORN, steps=3000)
    folder = tmp_path / "out" / "mine" / "smoke" / "sinkhorn" / "seed1"
    process = subprocess.Popen([PROGRAM, *words(tmp_path)], text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while "step 4/" not in (folder / "output.log").read_text() if (
            folder / "output.log").exists() else True:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "the same command goes on from there" in said
    assert json.loads((folder / "result.json").read_text())["finished"] is False
    assert list((folder / "checkpoints").glob("step-*.safetensors"))
    text = output(*words(tmp_path))
    assert "mine/smoke/sinkhorn/seed1 resumed (1 of 1)" in text
    assert cells(tmp_path)["sinkhorn"]["steps"] == 3000


def test_seeds_and_several_at_once(tmp_path: Path) -> None:
    write_table(tmp_path, FULL | SINKHORN)
    output(*words(tmp_path))
    one = cells(tmp_path)["full"]
    shutil.rmtree(tmp_path / "out" / "mine")  # the results file remembers the first seed
    text = output(*words(tmp_path, "--seeds", "2", "--jobs", "2"))
    assert "(2 of 2)" in text and "mean of 2 seeds" in text
    two = cells(tmp_path)["full"]
    assert two["seeds"][0] == one["value"] and len(two["seeds"]) == 2
    assert abs(two["value"] - sum(two["seeds"]) / 2) < 1e-9


def test_tune_picks_and_says_so(tmp_path: Path) -> None:
    write_table(tmp_path, FULL | SINKHORN, steps=8)
    text = output(*words(tmp_path, "--tune", "--jobs", "2"))
    assert "Sinkhorn: picked temperature" in text
    other = cells(tmp_path, "mine.smoke.tuned")["full"]  # nothing to tune, and still a row
    assert other["value"] is not None and "tuned" not in other
    cell = cells(tmp_path, "mine.smoke.tuned")["sinkhorn"]
    assert cell["tuned"]["temperature"] in (0.25, 0.5, 0.75, 1.0)
    assert cell["tuned"]["iterations"] in (2, 5, 10, 20)
    assert cell["steps"] == 8
    shutil.rmtree(tmp_path / "out" / "mine")
    assert "started" not in output(*words(tmp_path, "--tune", "--rows", "sinkhorn"))
    # Another seed is trained with what was picked, without trying again.
    text = output(*words(tmp_path, "--tune", "--rows", "sinkhorn", "--seeds", "2"))
    assert "tuned-seed2 started (1 of 1)" in text


def test_tune_never_sees_what_is_reported(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name, count in (("train", 300), ("dev", 8)):  # no test file: dev serves for it
        (data / f"{name}.tsv").write_text("".join(
            f"{'yes' if n % 3 else 'no'}\t{'x' * (n % 3)}{n}\n" for n in range(count)))
    configs = write_table(tmp_path, SINKHORN, steps=8)
    task = (f'[task]\nname = "classify"\ndata = "{data}"\ntokens = "bytes"\nlength = 16\n'
            f'cache = "{tmp_path / "cache"}"\n')
    common = configs / "mine" / "common.ini"
    common.write_text(task + COMMON.split("sort_test_size = 16\n")[1].replace(
        "warmup = 2", "warmup = 4") + "steps = 8\n")
    table = configs / "mine" / "table.json"
    table.write_text(table.read_text().replace("exact_match", "accuracy"))
    output(*words(tmp_path, "--tune", "--jobs", "2"))
    row = tmp_path / "out" / "mine" / "smoke" / "sinkhorn"
    trials = list((row / "tune").iterdir())
    assert len(trials) == 7  # two grids of four that share one
    for trial in trials:
        note = json.loads((trial / "result.json").read_text())["data"]
        assert "valid (held out of training), 8 test" in note, note
        config = (trial / "config.ini").read_text()
        assert 'valid = "train"' in config and "warmup = 1\n" in config and "steps = 2\n" in config
    note = json.loads((row / "tuned-seed1" / "result.json").read_text())["data"]
    assert "300 train, 8 valid, 8 test examples; test is the validation split" in note, note


def test_a_row_that_fails_leaves_the_others(tmp_path: Path) -> None:
    write_table(tmp_path, {"bad": "[attention]\nsort_net = linear\nmax_blocks = 1\n"} | FULL)
    done = run(*words(tmp_path))
    assert done.returncode == 1, done.stderr
    assert "failed: mine/smoke/bad/seed1: sinkhorn: " in done.stdout
    assert "max_blocks" in done.stdout and "output.log" in done.stdout
    assert cells(tmp_path)["bad"]["value"] is None
    assert cells(tmp_path)["full"]["value"] is not None


def test_a_trial_that_fails_is_named_and_nothing_is_called_tuned(tmp_path: Path) -> None:
    write_table(tmp_path, {"bad": "[attention]\nsort_net = linear\nmax_blocks = 1\n"} | FULL)
    done = run(*words(tmp_path, "--tune", "--jobs", "2"))
    assert done.returncode == 1, done.stderr
    end = done.stdout.split("Mine (temperature")[-1]
    assert end.count("failed: mine/smoke/bad/tune/") == 8 and end.count("output.log") == 8
    assert "failed: Bad: no trial gave a figure to pick by; it is not trained" in end
    assert cells(tmp_path, "mine.smoke.tuned")["bad"]["value"] is None
    assert cells(tmp_path, "mine.smoke.tuned")["full"]["value"] is not None


def test_a_row_that_is_killed_or_cannot_begin_leaves_the_others(tmp_path: Path) -> None:
    write_table(tmp_path, {"slow": "[train]\nsave_every = 5\n", "blocked": ""} | FULL, steps=3000)
    place = tmp_path / "out" / "mine" / "smoke"
    place.mkdir(parents=True)
    (place / "blocked").write_text("a file where a folder should be")
    full = tmp_path / "configs" / "mine" / "full.ini"
    full.write_text(full.read_text() + "[train]\nsteps = 4\n")
    process = subprocess.Popen([PROGRAM, *words(tmp_path, "--jobs", "1")], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    log = place / "slow" / "seed1" / "output.log"
    deadline = time.monotonic() + 60
    while not log.exists() or "step 4/" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]
    os.kill(int(child), signal.SIGKILL)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    end = said.split("best of its column")[-1]
    assert "slow/seed1: killed by signal 9 (out of memory?)" in end and str(log) in end
    assert "failed: " in end and str(place / "blocked") in end
    assert cells(tmp_path)["full"]["value"] is not None


def test_a_row_that_another_process_trains(tmp_path: Path) -> None:
    write_table(tmp_path, FULL | SINKHORN)
    log = tmp_path / "out" / "mine" / "smoke" / "full" / "seed1" / "output.log"
    log.parent.mkdir(parents=True)
    with open(log, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = run(*words(tmp_path))
    assert done.returncode == 1
    assert ("failed: mine/smoke/full/seed1: in use by another process; wait for it or stop it; see "
            f"{log}\n") in done.stdout
    assert log.read_text() == "", "its output is the other's alone"
    assert cells(tmp_path)["sinkhorn"]["value"] is not None
    output(*words(tmp_path))
    assert cells(tmp_path)["full"]["value"] is not None


def test_what_is_not_finite_is_shown_and_not_ranked(tmp_path: Path) -> None:
    write_table(tmp_path, FULL | SINKHORN)
    output(*words(tmp_path))
    for row, word in (("full", "Infinity"), ("sinkhorn", "NaN")):
        log = tmp_path / "out" / "mine" / "smoke" / row / "seed1" / "log.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        lines[-1]["test"]["exact_match"] = word
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "out" / "mine.smoke.json").unlink()
    text = output(*words(tmp_path))
    assert " inf a" in text and " nan a" in text and "best of its column" not in text
    assert cells(tmp_path)["full"]["value"] == "Infinity"
    assert cells(tmp_path)["sinkhorn"]["seeds"] == ["NaN"]
    shutil.rmtree(tmp_path / "out" / "mine")
    assert "started" not in output(*words(tmp_path)), "it is done, though not finite"
    page = tmp_path / "page.html"
    output("report", tmp_path / "out", "-o", page)
    assert ">inf</td>" in page.read_text() and ">nan</td>" in page.read_text()


def test_the_future_that_leaks_is_marked(tmp_path: Path) -> None:
    leak = "[attention]\nkind = sinkhorn\n[decoder]\ncolumns = full\n"
    write_table(tmp_path, {"leak": leak} | FULL)
    text = output(*words(tmp_path))
    assert "leaks the future" in text
    assert cells(tmp_path)["leak"]["leaks"] is True


def test_half_written_files(tmp_path: Path) -> None:
    write_table(tmp_path, FULL)
    folder = tmp_path / "out" / "mine" / "smoke" / "full" / "seed1"
    folder.mkdir(parents=True)
    (folder / "log.jsonl").write_text('{"step": 2')
    done = run(*words(tmp_path))
    assert done.returncode == 1
    assert "seed1: holds half a run, without its config.ini; remove the folder" in done.stdout
    shutil.rmtree(folder)
    output(*words(tmp_path))
    file = tmp_path / "out" / "mine.smoke.json"
    whole = file.read_text()
    file.write_text(whole[:100])
    assert refusal(*words(tmp_path), code=1) == (
        f"{file}: is not a whole results file; remove it to have it made anew from the runs")
    file.unlink()
    assert "started" not in output(*words(tmp_path))
    assert json.loads(file.read_text()) == json.loads(whole)


def test_table3_is_the_published_rows(tmp_path: Path) -> None:
    text = output("reproduce", "table3", "--out", str(tmp_path), "--configs", str(CONFIGS))
    assert "Mesh-TensorFlow, 4.9B" in text and "24.00" in text
    found = json.loads((tmp_path / "table3.smoke.json").read_text())
    assert [row["cells"][0]["value"] for row in found["rows"]] == [None] * 7
    page = tmp_path / "page.html"
    output("report", tmp_path, "-o", page)
    assert "Mesh-TensorFlow, 4.9B" in page.read_text() and "24.00" in page.read_text()
    # Whatever big run exists stands beside them.
    big = {"value": 29.5, "paper": 27.34, "seeds": [29.5], "steps": 300000, "scale": "full",
           "data": "LM1B", "leaks": False, "run": "table2/full/mixture.big/seed1", "seconds": 1.0,
           "tokens_per_second": 1.0, "peak_memory": 1, "config_hash": "x"}
    (tmp_path / "table2.full.json").write_text(json.dumps({
        "table": "table2", "title": "t", "scale": "full", "commit": "", "device": "",
        "columns": [{"name": "big, perplexity", "figure": "perplexity", "better": "low",
                     "digits": 2}],
        "rows": [{"id": "mixture", "name": "Mixture", "role": "paper", "cells": [big]}]}))
    text = output("reproduce", "table3", "--out", str(tmp_path), "--configs", str(CONFIGS))
    assert "29.50 a" in text and "scale full, 300,000 steps" in text
    assert json.loads((tmp_path / "table3.smoke.json").read_text())["rows"][-1]["cells"][0][
        "value"] == 29.5


def test_memory_is_computed_and_measured(tmp_path: Path) -> None:
    folder = tmp_path / "configs" / "memory"
    folder.mkdir(parents=True)
    table = json.loads((CONFIGS / "memory" / "table.json").read_text())
    table["rows"] = [row for row in table["rows"] if row["shape"] == {"length": 2048, "block": 64}]
    (folder / "table.json").write_text(json.dumps(table))
    output(*words(tmp_path, name="memory"))
    found = results(tmp_path, "memory.smoke")
    values = {column["figure"]: cell["value"] for column, cell in
              zip(found["columns"], found["rows"][0]["cells"])}
    assert abs(values["one_block"] - 819.2) < 0.1
    assert values["memory_scores"] > 4 * values["memory_sinkhorn"] > 0
