"""What training holds in memory of a text: a bounded part, however long the text is."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from train_program import SMALL, start

MEGABYTE = 1 << 20
LINE = "a sentence of which there are very many , one a line .\n"


def lm1b(folder: Path, megabytes: int) -> Path:
    """A folder in LM1B's layout."""
    root = folder / "1-billion-word-language-modeling-benchmark-r13output"
    training = root / "training-monolingual.tokenized.shuffled"
    heldout = root / "heldout-monolingual.tokenized.shuffled"
    for part in (training, heldout):
        part.mkdir(parents=True)
    lines = LINE * (MEGABYTE // len(LINE))
    with (training / "news.en-00001-of-00100").open("w") as file:
        for _ in range(megabytes):
            file.write(lines)
    for shard in (0, 1):
        (heldout / f"news.en.heldout-0000{shard}-of-00050").write_text(LINE * 4)
    return root


def most_memory(process: subprocess.Popen[str]) -> int:
    """Bytes of its own: pages of files that are mapped can be given back at any time."""
    most = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        own = [int(line.split()[1]) for line in status if line.startswith("RssAnon:")]
        most = max([most, *own])
        time.sleep(0.01)
    return most * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("tokens", ["bytes", "pieces"])  # pieces are trained on a sample of it
def test_a_text_is_never_held(tokens: str, tmp_path: Path) -> None:
    found = []
    for megabytes in (16, 96):  # the tokens of eight are held while they are written down
        folder = tmp_path / str(megabytes)
        process = start(folder / "run", SMALL | {
            "task.name": "lm", "task.data": lm1b(folder, megabytes), "task.tokens": tokens,
            "task.vocab": 300, "task.cache": folder / "cache", "task.length": 64,
            "train.batch": 2, "train.steps": 3})
        found.append(most_memory(process))
        assert process.returncode == 0, process.stderr.read()
    assert abs(found[1] - found[0]) < 48 * MEGABYTE, found
