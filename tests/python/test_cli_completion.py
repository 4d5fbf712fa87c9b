"""Completion scripts: valid for their shells, and right where the shell is there to be asked."""

from __future__ import annotations

import os
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


def asked(shell: str, script: str, folder: Path) -> list[str]:
    done = subprocess.run(shell.split(), input=script, capture_output=True, text=True, check=True,
                          timeout=60, cwd=folder, env=os.environ | {"HOME": str(folder)})
    assert done.stderr == ""
    return [line.split("\t")[0] for line in done.stdout.splitlines() if line]


def completed(shell: str, line: str, folder: Path) -> list[str]:
    """What a shell offers for the last word of a line, in an empty folder."""
    script = output("completion", shell)
    parts = line.split(" ")
    if shell == "fish":
        return asked("fish --no-config", script + f"complete -C '{line}'\n", folder)
    words = " ".join(f"'{word}'" for word in parts)
    if shell == "bash":
        return asked("bash --norc", script + f"COMP_WORDS=({words}); COMP_CWORD={len(parts) - 1}\n"
                     + "_sinkhorn\nprintf '%s\\n' \"${COMPREPLY[@]}\"\n", folder)
    # What zsh's own completion would be handed, and what it does with it: keep what fits.
    stubs = "compdef() {}; _files() {}; compadd() { shift; print -rl -- \"$@\"; }\n"
    offered = asked("zsh -f", stubs + script + f"words=({words}); CURRENT={len(parts)}; _sinkhorn\n",
                    folder)
    return [word for word in offered if word.startswith(parts[-1])]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
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
def test_shells_complete(shell: str, line: str, expected: list[str], tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here to ask")
    if shell == "fish" and not line.split(" ")[-1].startswith("-"):
        expected = [word for word in expected if not word.startswith("-")]  # offered after a dash
    assert sorted(completed(shell, line, tmp_path)) == sorted(expected)


def test_another_shell_is_refused() -> None:
    assert (refusal("completion", "ksh")
            == 'completion: "ksh" is not one of bash, zsh, fish')
