"""What `eval` says of a run, found again in Python: by an export of the same checkpoint in float64,
from data that the test makes or reads itself, a row at a time and without pads."""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from cli_program import output
from train_program import Settings, sort_task, text_task, train

import sinkhorn
from sinkhorn.models import Model

EXACT = 1e-7  # relative: positions are rounded to float32 in Python
LONGEST, SYMBOLS, LISTS = 22, 6, 40  # of sorting
LENGTH = 64  # of a row of text
WORDS = "one two three four five six seven".split()
END = 2
Row = tuple[int, ...]


def evaluated(run: Path, *words: str) -> dict[str, Any]:
    return json.loads(output("eval", run, "--json", "--train.precision", "float64", *words))


def model_of(run: Path, out: Path) -> Model:
    output("export", run, out, "--checkpoint", "newest")
    export = sinkhorn.load_export(out)
    export.config["train"]["precision"] = "float64"
    return sinkhorn.load_model(export).double()


def mix(x: int) -> int:
    """The finaliser of SplitMix64."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def drawn(example: int) -> Row:
    """A list of the test split as a model reads it. Drawn again, since no file holds it."""
    state = mix(mix(0x50727 + 2) + example)

    def below(bound: int) -> int:
        nonlocal state
        state += 0x9E3779B97F4A7C15
        return (mix(state) >> 32) * bound >> 32

    return (*(3 + below(SYMBOLS) for _ in range(below(LONGEST) + 1)), END)


@functools.cache
def edits(a: Row, b: Row) -> int:
    """Fewest tokens to insert, delete or replace."""
    if not a or not b:
        return len(a) + len(b)
    return min(edits(a[1:], b) + 1, edits(a, b[1:]) + 1, edits(a[1:], b[1:]) + (a[0] != b[0]))


def greedy(model: Model, ids: torch.Tensor, most: int) -> Row:
    """Everything computed again for every token."""
    said: Row = ()
    while len(said) < most and END not in said:
        said += (model(ids, torch.tensor([[*said, 0]]))[0, -1].argmax().item(),)
    return said


KINDS: dict[str, Settings] = {
    "strict": {}, "inclusive": {"attention.window": 0, "decoder.causal": "inclusive"},
    "leaking": {"decoder.columns": "full"}}


@pytest.mark.parametrize("kind", KINDS)
def test_figures_of_lists(tmp_path: Path, kind: str) -> None:
    train(tmp_path / "run", sort_task(**{
        "task.sort_symbols": SYMBOLS, "task.sort_train_max": LONGEST, "train.steps": 150,
        "task.sort_test_max": LONGEST, "task.sort_test_size": LISTS, **KINDS[kind]}))
    model = model_of(tmp_path / "run", tmp_path / "out")
    lists = sorted(map(drawn, range(LISTS)), key=len)
    for n in (0, LISTS // 2, LISTS - 1):  # they are the program's
        seen = output("inspect", tmp_path / "run", "--json", f"--example={n}", "--out", tmp_path)
        assert json.loads(seen)["input"] == " ".join(str(token - 3) for token in lists[n][:-1])
    nats = right = exact = forced_edits = greedy_edits = 0
    for row in lists:
        target = (*sorted(row[:-1]), END)
        ids, targets = torch.tensor([row]), torch.tensor([target])
        logits = model(ids, targets)[0]
        nats += F.cross_entropy(logits, targets[0], reduction="sum").item()
        forced = tuple(logits.argmax(1).tolist())
        right += sum(said == token for said, token in zip(forced, target, strict=True))
        exact += forced == target
        forced_edits += edits(forced, target)
        # Rows have room for 16 at least, and 8 more: as far as the model reaches.
        greedy_edits += edits(greedy(model, ids, LONGEST + 1), target)
    tokens = sum(map(len, lists))
    assert 0 < exact < LISTS and forced_edits != greedy_edits
    found = evaluated(tmp_path / "run", "--train.greedy", "true")
    assert (found["rows"], found["tokens"]) == (LISTS, tokens)
    assert found["figures"] == pytest.approx({
        "exact_match": 100 * exact / LISTS, "loss": nats / tokens,
        "token_accuracy": 100 * right / tokens, "edit_distance_forced": forced_edits / tokens,
        "edit_distance_greedy": greedy_edits / tokens}, rel=EXACT)


def text_run(folder: Path, **more: Any) -> tuple[Path, list[bytes]]:
    """A run on words between spaces of every kind, and its test split's items: a file each, which
    stays whole, since it is shorter than a two-hundredth of all."""
    rng = random.Random(5)

    def text(count: int) -> bytes:
        spaces = rng.choices((" ", "  ", "\n", "\t"), (5, 1, 1, 1), k=count)
        return "".join(WORDS[i % 7] + space for i, space in enumerate(spaces)).encode()

    data = folder / "texts"
    (data / "test").mkdir(parents=True)
    (data / "train.txt").write_bytes(text(30000))
    items = [text(count) for count in (130, 40, 1, 128, 90, 133, 131, 7, 110, 127, 120, 129)]
    for n, item in enumerate(items):
        (data / "test" / f"{n:02}.txt").write_bytes(item)
    train(folder / "run", text_task(folder / "data") | more | {
        "task.data": data, "task.length": LENGTH, "train.steps": 60})
    return folder / "run", items


def stream_of(items: list[list[int]]) -> list[int]:
    """What a language model reads: an end token behind each item, one that begins before all."""
    return [1, *(token for item in items for token in (*item, END))]


def rows_of(stream: list[int]) -> range:
    return range(0, len(stream) - 1, LENGTH)  # where they begin


def read(model: Model, stream: list[int], begins: Iterable[int]) -> tuple[float, int, int]:
    """Nats, right tokens and all tokens of the rows that begin there."""
    nats, right, tokens = 0.0, 0, 0
    for begin in begins:
        row = torch.tensor(stream[begin:begin + LENGTH + 1])
        logits = model(row[None, :-1])[0]
        nats += F.cross_entropy(logits, row[1:], reduction="sum").item()
        right += (logits.argmax(1) == row[1:]).sum().item()
        tokens += len(row) - 1
    return nats, right, tokens


def test_figures_of_bytes(tmp_path: Path) -> None:
    """The last row is a short one."""
    run, items = text_run(tmp_path)
    stream = stream_of([[byte + 3 for byte in item] for item in items])
    nats, right, tokens = read(model_of(run, tmp_path / "out"), stream, rows_of(stream))
    assert tokens == sum(len(item) + 1 for item in items) and tokens % LENGTH > 0
    found = evaluated(run)
    assert (found["rows"], found["tokens"]) == (len(rows_of(stream)), tokens)
    assert found["figures"] == pytest.approx({
        "bits_per_byte": nats / math.log(2) / tokens, "loss": nats / tokens,
        "token_accuracy": 100 * right / tokens}, rel=EXACT)


class Pieces(NamedTuple):
    run: Path
    model: Model
    items: list[bytes]
    ids: list[list[int]]  # of each item


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Pieces:
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("pieces")
    run, items = text_run(folder, **{"task.tokens": "pieces", "task.vocab": 320})
    model = model_of(run, folder / "out")
    tokenizer = sentencepiece.SentencePieceProcessor(str(folder / "out" / "tokenizer.model"))
    return Pieces(run, model, items, [tokenizer.encode(f" {item.decode()}") for item in items])


def words_of(item: bytes) -> int:
    return len(item.split()) + 1  # and the end


def test_figures_of_pieces(pieces: Pieces) -> None:
    stream = stream_of(pieces.ids)
    nats, right, tokens = read(pieces.model, stream, rows_of(stream))
    words = sum(map(words_of, pieces.items))
    found = evaluated(pieces.run)
    assert (found["rows"], found["tokens"]) == (len(rows_of(stream)), tokens)
    assert found["figures"] == pytest.approx({
        "perplexity": math.exp(nats / words), "loss": nats / tokens,
        "token_perplexity": math.exp(nats / tokens),
        "token_accuracy": 100 * right / tokens}, rel=EXACT)


@pytest.mark.parametrize("batches", [1, 2, 4])
def test_perplexity_of_a_part_of_a_split(pieces: Pieces, batches: int) -> None:
    """Its words are those of the rows that were read, whatever items end in them."""
    stream, rows = stream_of(pieces.ids), 2
    groups = [rows_of(stream)[i:i + rows] for i in range(0, len(rows_of(stream)), rows)]
    shares = [words_of(item) / (len(ids) + 1) for item, ids in zip(pieces.items, pieces.ids)
              for _ in range(len(ids) + 1)]  # of each token, in words
    taken = [begin for n in range(batches)  # evenly spread
             for begin in groups[(2 * n + 1) * len(groups) // (2 * batches)]]
    nats, _, tokens = read(pieces.model, stream, taken)
    words = sum(sum(shares[begin:begin + LENGTH]) for begin in taken)
    found = evaluated(pieces.run, f"--train.batch={rows}", f"--train.eval_batches={batches}")
    assert (found["rows"], found["tokens"]) == (len(taken), tokens)
    assert found["figures"]["loss"] == pytest.approx(nats / tokens, rel=EXACT)
    assert found["figures"]["perplexity"] == pytest.approx(math.exp(nats / words), rel=0.1)
