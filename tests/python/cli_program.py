"""Runs the program of this build as a user would."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import support

PROGRAM = support.BUILD / "sinkhorn"
CONFIGS = support.REPO / "configs"
COMMANDS = {
    "train": ["train"],
    "eval": ["eval"],
    "inspect": ["inspect"],
    "generate": ["generate"],
    "classify": ["classify"],
    "serve": ["serve"],
    "export": ["export"],
    "reproduce": ["reproduce"],
    "report": ["report"],
    "info": ["info"],
    "data check": ["data", "check"],
    "tokenizer train": ["tokenizer", "train"],
    "completion": ["completion"],
}


def run(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What it prints is given as it is: texts of models may hold line ends of every kind."""
    done = subprocess.run([str(PROGRAM), *map(str, words)], cwd=cwd, capture_output=True,
                          timeout=300, check=False)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(),
                                       done.stderr.decode())


def output(*words: str | Path) -> str:
    """What a command that must succeed prints."""
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def objects(text: str) -> list[dict[str, Any]]:
    """Of JSON lines. A text in one may hold what splitlines takes for the end of a line."""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def refusal(*words: str | Path, code: int = 2) -> str:
    """The one line of a command that must fail, without the program's name."""
    done = run(*words)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("sinkhorn: ")
    return lines[0].removeprefix("sinkhorn: ")
