"""`--help` says what happens without an option, and the defaults it shows are the true ones."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from cli_program import COMMANDS, output, refusal

COLUMN = 30  # where descriptions begin
# How a description says what happens without its option, where no default is shown.
WITHOUT = re.compile(r"\b(default:? |empty: |none: |if not given|in place of |required\b|"
                     r"without (it|one|them)\b)")


class Option(NamedTuple):
    names: list[str]
    value: str  # with its default and whether it is required; empty: a flag
    says: str

    @property
    def name(self) -> str:
        return self.names[-1]

    @property
    def default(self) -> str:
        """Versions of CLI11 write it as =x or [x]; a range is [0 - 9]."""
        found = re.search(r"=(.+)$|\[(?!\d\S* - )([^]]+)\]$", self.value)
        return (found[1] or found[2]) if found else ""


def options(text: str) -> list[Option]:
    """A description stands behind its option, or below it where that is long."""
    found = []
    lines = text.splitlines()
    for line, below in zip(lines, [*lines[1:], ""]):
        if not line.startswith("  -"):
            continue
        is_long = below.startswith(" " * COLUMN)
        head, says = (line, below) if is_long else (line[:COLUMN], line[COLUMN:])
        names, _, value = head.strip().partition(" ")
        value = re.sub(r"\b(Excludes|Needs): .*", "", value)
        found.append(Option(names.split(","), value.strip(), says.strip()))
    return found


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    return {name: output(*words, "--help") for name, words in COMMANDS.items()}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_says_what_happens_without_it(helps: dict[str, str], command: str) -> None:
    silent = [f"{option.name} {option.value}: {option.says}" for option in options(helps[command])
              if option.value and not option.default and "REQUIRED" not in option.value
              and not WITHOUT.search(option.says)]
    assert not silent, "\n".join([f"{command}:", *silent])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_described_once(helps: dict[str, str], command: str) -> None:
    found = options(helps[command])
    assert found[0] == Option(["-h", "--help"], "", "Print this help message and exit")
    names = [name for option in found for name in option.names]
    assert len(names) == len(set(names)) == len(re.findall(r"^  (?=-)|(?<=,)--", helps[command],
                                                           re.MULTILINE))
    assert all(option.says for option in found)


def test_required_is_what_cannot_be_left_out(helps: dict[str, str], tmp_path: Path) -> None:
    required = {f"{command} {option.name}" for command, text in helps.items()
                for option in options(text) if "REQUIRED" in option.value}
    assert required == {"tokenizer train --out"}
    text = tmp_path / "text.txt"
    text.touch()
    assert refusal("tokenizer", "train", text) == "--out is required"


def test_the_defaults_of_training_are_those_shown(helps: dict[str, str], tmp_path: Path) -> None:
    """As an empty configuration resolves; of [attention], as the decoder's does."""
    empty = tmp_path / "empty.ini"
    empty.touch()
    config = configparser.ConfigParser(interpolation=None)
    config.read_string(output("train", empty, "--dry-run"))
    unresolved = set()
    for option in options(helps["train"]):
        section, _, key = option.name.removeprefix("--").partition(".")
        if not key:
            continue
        values = config["decoder" if section == "attention" else section]
        if key not in values:
            unresolved.add(option.name)
        elif option.default:
            assert values[key].strip('"') == option.default, option.name
    assert unresolved == {"--model.size", "--attention.preset"}, "these stand for other keys"
