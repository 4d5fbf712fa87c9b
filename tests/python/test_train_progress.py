"""What training shows: a line that renews itself on a terminal, whole lines elsewhere, and how many
parameters there are."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import statistics
import struct
import subprocess
import termios
from pathlib import Path

import pytest
from cli_program import PROGRAM
from train_program import (SMALL, Settings, check_checkpoint, checkpoints, classify_task, command,
                           losses, sort_task, start, text_task, train)

UNITS = {"k": 1e3, "M": 1e6, "G": 1e9}
RENEW = "\r\033[K"
STEPS: Settings = {"train.steps": 30, "train.log_every": 5, "train.eval_every": 10}
PROGRESS = re.compile(r"step (?P<step>\d+)/\d+  loss (?P<loss>\d+\.\d{4})  rate \S+  "
                      r"(?P<speed>\d+(\.\d\d)?[kMG]?) tokens/s  "
                      r"(?P<left>\d+m[0-5]\d|\d+h[0-5]\d)[sm] left")


class Terminal:
    """A training whose output goes to a terminal."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.shown = ""
        self.end, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        self.process = subprocess.Popen([PROGRAM, *command(folder, settings)], stdout=theirs,
                                        stderr=subprocess.PIPE, text=True)
        os.close(theirs)

    def read(self) -> bool:
        """A bit more of what is shown; false at the end."""
        try:
            more = os.read(self.end, 1 << 16).decode()
        except OSError:  # how Linux says that nobody writes any more
            more = ""
        self.shown += more
        return more != ""

    def finish(self) -> tuple[int, str]:
        """The exit code and standard error; what was shown ends with a whole line."""
        while self.read():
            pass
        os.close(self.end)
        _, said = self.process.communicate(timeout=60)
        assert self.shown.endswith("\r\n"), self.shown
        assert not re.sub(re.escape(RENEW) + r"|\r\n|[ -~]", "", self.shown)
        return self.process.returncode, said

    def states(self) -> list[list[str]]:
        """Of every line, what stood there one after the other."""
        return [line.split(RENEW) for line in self.shown.split("\r\n")[:-1]]


def number(shown: str) -> float:
    """Of 950, 1.25k, 12k, 51M."""
    return float(shown.strip("kMG")) * UNITS.get(shown[-1], 1)


def screen(shown: str, columns: int) -> list[str]:
    """The rows of a terminal that wraps lines. Only what begins a row anew moves back in it."""
    rows = [""]
    for part in re.findall(r"\r\n|\r\033\[K|[ -~]", shown):
        if part == RENEW:
            rows[-1] = ""
        elif part == "\r\n" or len(rows[-1]) == columns:
            rows.append("" if part == "\r\n" else part)
        else:
            rows[-1] += part
    return rows


def reports(lines: list[str]) -> list[re.Match[str]]:
    """Of a training of STEPS, all of them."""
    found = [PROGRESS.fullmatch(line) for line in lines if re.match(r"step \d+/", line)]
    assert [one[0].split("  ")[0] for one in found] == [f"step {n}/30" for n in range(5, 31, 5)]
    return found


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Terminal]:
    folder = tmp_path_factory.mktemp("shown") / "run"
    terminal = Terminal(folder, sort_task(**STEPS))
    assert terminal.finish() == (0, "")
    return folder, terminal


def test_the_line_renews_itself(shown: tuple[Path, Terminal]) -> None:
    folder, terminal = shown
    lines = terminal.states()
    seen = reports([state for line in lines for state in line])
    assert [found["loss"] for found in seen] == [f"{loss:.4f}" for loss in losses(folder)]
    assert seen[-1]["left"] == "0m00"
    assert not [line[-1] for line in lines if PROGRESS.fullmatch(line[-1])], "left to stand"
    assert sum(len(line) > 1 for line in lines) == 4, "preparing, and before each evaluation"


@pytest.mark.parametrize("columns", [80, 200])
def test_nothing_of_a_renewed_line_stays(shown: tuple[Path, Terminal], columns: int) -> None:
    """On a narrow terminal too, where a line that is longer than a row cannot be taken back."""
    _, terminal = shown
    lines = "".join(line[-1] + "\r\n" for line in terminal.states())
    assert screen(terminal.shown, columns) == screen(lines, columns)


def test_the_last_line_is_whole_however_training_ends(tmp_path: Path) -> None:
    forever = sort_task(**{"train.steps": 10**6, "train.log_every": 1})
    stopped = Terminal(tmp_path / "stopped", forever)
    while len(re.findall("step [0-9]+/", stopped.shown)) < 3:
        assert stopped.read()
    stopped.process.send_signal(signal.SIGINT)
    assert stopped.finish() == (128 + signal.SIGINT, "")
    ((*_, progress), (last,)) = stopped.states()[-2:]
    assert PROGRESS.fullmatch(progress)
    assert re.fullmatch(r"stopped at step \d+, saved; continue with --resume", last)
    explodes = {"optimizer.rate": 1e18, "optimizer.clip": 0, "optimizer.warmup": 0}
    failing = Terminal(tmp_path / "failing", forever | explodes)
    code, said = failing.finish()
    assert code == 1 and re.fullmatch(r"sinkhorn: step \d+: .*\n", said)
    missing = Terminal(tmp_path / "missing", SMALL | {"task.name": "text", "task.data": "missing"})
    code, said = missing.finish()
    assert code == 1 and re.fullmatch(r"sinkhorn: .*missing: no such file.*\n", said)


def test_whole_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    process = start(tmp_path / "run", sort_task(**STEPS))
    chunks = list(iter(lambda: os.read(process.stdout.fileno(), 1 << 16).decode(), ""))
    assert process.communicate(timeout=60)[1] == "" and process.returncode == 0
    assert all(chunk.endswith("\n") for chunk in chunks), chunks
    said = "".join(chunks)
    assert not re.search(r"[^ -~\n]", said)
    speeds = [number(found["speed"]) for found in reports(said.splitlines())]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["tokens_per_second"] == pytest.approx(statistics.median_high(speeds), rel=0.05)


def test_the_time_left_is_the_rest_at_this_speed(tmp_path: Path) -> None:
    """Where every step has the same tokens."""
    settings = text_task(tmp_path / "data", **{"train.steps": 10**6, "train.log_every": 20})
    process = start(tmp_path / "run", settings)
    lines = [process.stdout.readline() for _ in range(8)]
    process.terminate()
    process.communicate(timeout=60)
    seen = [PROGRESS.match(line) for line in lines if re.match(r"step \d+/", line)]
    assert len(seen) >= 4
    for found in seen:
        large, small = map(int, re.split("[hm]", found["left"]))
        seconds = (60 * large + small) * (60 if "h" in found["left"] else 1)
        tokens = (10**6 - int(found["step"])) * settings["train.batch"] * settings["task.length"]
        assert number(found["speed"]) * seconds == pytest.approx(tokens, rel=0.06), found[0]


def parameters(folder: Path, settings: Settings) -> int:
    """Of a new model: as printed, as in result.json, and as its checkpoint holds them."""
    said = train(folder, settings | {"train.steps": 0})
    shown = re.search(r": (\S+) parameters on cpu, step 0 of 0$", said, re.MULTILINE)[1]
    (path,) = checkpoints(folder)
    count = sum(tensor.numel() for name, tensor in check_checkpoint(path).items()
                if name.startswith("model/"))
    assert count == json.loads((folder / "result.json").read_text())["parameters"]
    places = len(shown.strip("kMG").partition(".")[2])
    assert f"{count / UNITS.get(shown[-1], 1):.{places}f}" == shown.strip("kMG")
    return count


def test_parameters_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    parameters(tmp_path / "sort", sort_task())
    parameters(tmp_path / "classify", classify_task(tmp_path / "words"))
    text = text_task(tmp_path / "text")
    tied, untied = (parameters(tmp_path / tied, text | {"model.tied": tied})
                    for tied in ("true", "false"))
    vocab = json.loads((tmp_path / "true" / "task.json").read_text())["info"]["vocab"]
    assert untied - tied == vocab * SMALL["model.width"]


def test_the_papers_language_model_has_about_50_million(tmp_path: Path) -> None:
    """With as many tokens as there, untied, and its sort network: a column a block and head."""
    count = parameters(tmp_path / "run", {
        "task.name": "recall", "task.length": 256, "task.recall_fillers": 32000 - 131,
        "task.recall_test_size": 1, "model.size": "lm_base", "attention.preset": "prefix",
        "optimizer.name": "adafactor", "train.device": "cpu"})
    width, ff_width, heads, blocks = 512, 2048, 8, 256 // 64
    norm = 2 * width
    layer = (norm + 4 * width**2 + heads * (width + 1) * blocks
             + norm + 2 * width * ff_width + ff_width + width)
    assert count == 2 * 32000 * width + 6 * layer + norm
    assert count == pytest.approx(50e6, rel=0.05)
