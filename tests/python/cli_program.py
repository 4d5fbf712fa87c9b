"""Runs the program of this build as a user would."""

from __future__ import annotations

import subprocess
from pathlib import Path

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
    return subprocess.run([str(PROGRAM), *map(str, words)], cwd=cwd, capture_output=True,
                          text=True, timeout=300, check=False)


def output(*words: str | Path) -> str:
    """What a command that must succeed prints."""
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def refusal(*words: str | Path, code: int = 2) -> str:
    """The one line of a command that must fail, without the program's name."""
    done = run(*words)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("sinkhorn: ")
    return lines[0].removeprefix("sinkhorn: ")
