"""A text of one's own, trained on with next to nothing said, and then used: what training settled
by itself, tokens above all, the commands that come after settle alike, with the data or without."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_program import objects, output, refusal
from train_program import Settings, figures, train

PROMPT = "It was a dark"
TEXT = "".join(f"It was a dark and stormy night; {n * n} drops fell in it, not one more.\n"
               for n in range(60))


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def book(request: pytest.FixtureRequest,
         tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run, of the file book.txt beside it: of bytes, or of the pieces of a model that was named
    and is lost. What goes into the user's cache goes into another one."""
    folder = tmp_path_factory.mktemp(request.param)
    data, tokenizer = folder / "book.txt", folder / "named.model"
    data.write_text(TEXT)
    settings: Settings = {"task.name": "text", "task.data": data, "task.length": 64,
                          "train.steps": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        if request.param == "pieces":
            output("tokenizer", "train", data, "--out", tokenizer, "--vocab", "320")
            settings["task.tokenizer"] = tokenizer
        train(folder / "run", settings)
        tokenizer.unlink(missing_ok=True)
        yield folder / "run"


@pytest.fixture
def no_data(book: Path) -> Iterator[Path]:
    """The file is not there."""
    data = book.with_name("book.txt")
    data.unlink()
    yield data
    data.write_text(TEXT)


def evaluated(place: Path) -> dict[str, Any]:
    return json.loads(output("eval", place, "--json"))


def test_tokens_are_as_trained(book: Path) -> None:
    assert 'tokens = "auto"\n' in (book / "config.ini").read_text()
    assert (book / "tokenizer.model").exists() == book.parent.name.startswith("pieces")


def test_eval(book: Path) -> None:
    found = evaluated(book)["figures"]
    assert found == figures(book, "test")
    if book.parent.name.startswith("bytes"):
        assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))
    else:
        assert found["token_perplexity"] == pytest.approx(math.exp(found["loss"]))


def test_inspect(book: Path, no_data: Path, tmp_path: Path) -> None:
    found = json.loads(output("inspect", book, "--json", "--text", PROMPT, "--out", tmp_path))
    assert found["input"] == PROMPT
    assert found["sorts"]


def continued(place: Path) -> str:
    words = ["--prompt", PROMPT, "--temperature", "0", "--max-tokens", "6", "--json"]
    [sample] = objects(output("generate", place, *words))
    assert sample["prompt"] == PROMPT
    assert len(sample["ids"]) == 6 or sample["ids"][-1] == 2
    return sample["text"]


def test_generate(book: Path, no_data: Path) -> None:
    continued(book)


def test_an_export(book: Path, tmp_path: Path) -> None:
    output("export", book, tmp_path / "out")
    found, expected = evaluated(tmp_path / "out"), evaluated(book)
    assert (found["rows"], found["tokens"]) == (expected["rows"], expected["tokens"])
    assert found["figures"] == pytest.approx(expected["figures"])


def test_an_export_where_the_data_is_not(book: Path, no_data: Path, tmp_path: Path) -> None:
    output("export", book, tmp_path / "out")
    assert continued(tmp_path / "out") == continued(book)
    output("inspect", tmp_path / "out", "--text", PROMPT, "--out", tmp_path / "seen")
    for place in (book, tmp_path / "out"):
        assert refusal("eval", place, code=1).startswith(f"{no_data}: no such file")
