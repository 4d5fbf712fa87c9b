"""Completion scripts: valid for their shells, and right where bash can be asked."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from cli_program import output, refusal


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_valid(shell: str, tmp_path: Path) -> None:
    script = output("completion", shell)
    for word in ("tokenizer", "train.steps", "decoder.block", "attention.preset"):
        assert word in script
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here to ask")
    path = tmp_path / "script"
    path.write_text(script)
    subprocess.run([shell, "-n", str(path)], check=True, timeout=60)


def completed(line: str) -> list[str]:
    """What bash offers for the last word of a line."""
    words = " ".join(f"'{word}'" for word in line.split(" "))
    last = len(line.split(" ")) - 1
    script = (output("completion", "bash")
              + f"COMP_WORDS=({words}); COMP_CWORD={last}; _sinkhorn\n"
              + "printf '%s\\n' \"${COMPREPLY[@]}\"\n")
    done = subprocess.run(["bash", "--norc"], input=script, capture_output=True, text=True,
                          check=True, timeout=60)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sinkhorn tr", ["train"]),
        ("sinkhorn data ", ["check", "--help"]),
        ("sinkhorn data check s", ["sort", "sentiment"]),
        ("sinkhorn tokenizer t", ["train"]),
        ("sinkhorn tokenizer train --v", ["--vocab"]),
        ("sinkhorn train --train.ste", ["--train.steps"]),
        ("sinkhorn train x.ini --optimizer.name ada", ["adamw", "adam", "adafactor"]),
        ("sinkhorn train x.ini --train.steps ", []),
        ("sinkhorn eval --split ", ["valid", "test", "all"]),
        ("sinkhorn train train --dry", ["--dry-run"]),
        ("sinkhorn completion z", ["zsh"]),
    ],
)
def test_bash_completes(line: str, expected: list[str]) -> None:
    assert completed(line) == expected


def test_another_shell_is_refused() -> None:
    assert (refusal("completion", "ksh")
            == 'completion: "ksh" is not one of bash, zsh, fish')
