"""The sorting matrices that `inspect` prints, in numbers and in colours, against the equations of
docs/spec.md in plain Python, fed with what an export of the same checkpoint reads."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_program import output
from literal import balance, pool
from support import num_blocks
from test_generate import read_png
from torch import Tensor
from train_program import Settings, classify_task, sort_task, train

import sinkhorn
from sinkhorn.models import SinkhornAttention

BLOCK, HEADS, LAYERS = 4, 2, 2
NEAR = {"rtol": 1e-4, "atol": 1e-5}
# Sharper than as trained so little, so that there is something to tell apart.
SHARP: Settings = {"model.layers": LAYERS, "train.steps": 30, "attention.temperature": 0.1}
KINDS: dict[str, Settings] = {
    "bilinear": {},
    "linear": {"attention.sort_net": "linear", "attention.columns": "auto",
               "attention.pooling": "mean", "attention.window": 0},
    "inclusive": {"attention.columns": "auto", "attention.pooling": "sum", "attention.window": 0,
                  "attention.temperature": 0.75, "decoder.causal": "inclusive"},
}


def run_of(folder: Path, task: str, kind: str) -> Path:
    """A run, with its export beside it."""
    settings = {"sort": lambda: sort_task(**{"task.sort_train_max": 22, "task.sort_test_max": 22}),
                "classify": lambda: classify_task(folder / "data")}[task]()
    train(folder / "run", settings | SHARP | KINDS[kind])
    output("export", folder / "run", folder / "out", "--checkpoint", "newest")
    return folder / "run"


def inspected(run: Path, *words: str | int | Path) -> dict[str, Any]:
    return json.loads(output("inspect", run, "--json", "--out", run / "seen", *map(str, words)))


def matrix(sort: dict[str, Any]) -> Tensor:  # [N, N], row = destination
    return torch.tensor(sort["r"], dtype=torch.float64).view(sort["blocks"], sort["blocks"])


def sorted_by_hand(module: SinkhornAttention, x: Tensor) -> Tensor:  # [1, L, E] -> [1, H, N, N]
    """Sections 2 and 3 of the specification."""
    a, net, decoder = module.attention, module.sort_net, module.decoder
    causal = a["causal"] if decoder else "none"
    x, weights = x.double(), {name: t.double() for name, t in net.named_parameters()}
    pooled = pool(x, BLOCK, a["pooling"], decoder)
    if a["sort_net"] == "linear":
        y = pooled @ weights["first.weight"].T + weights["first.bias"]
        logits = y.unflatten(2, (HEADS, -1)).transpose(1, 2)[..., :pooled.shape[1]]
    else:
        sources = pooled
        if causal == "strict":
            sources = pool(x, BLOCK, "sum" if a["pooling"] == "sum" else "mean", False)
        d, s = ((t @ weights[f"{name}.weight"].T).unflatten(2, (HEADS, -1)).transpose(1, 2)
                for t, name in ((pooled, "destination"), (sources, "source")))
        logits = d @ s.transpose(2, 3) / math.sqrt(d.shape[3])
    window = a["window"] if causal == "strict" else 0
    return balance(logits, a["iterations"], a["temperature"], causal, a["columns"], window)


def tokens_of(task: str, text: str) -> list[int]:
    return ([int(word) + 3 for word in text.split()] if task == "sort" else
            [byte + 3 for byte in text.encode()]) + [2]


def matrices_by_hand(task: str, export: Path, ids: list[int]) -> dict[tuple[str, int, int], Tensor]:
    model = sinkhorn.load_model(export)
    found: dict[tuple[str, int, int], Tensor] = {}
    for stack in ("encoder", "decoder")[:2 if task == "sort" else 1]:
        for place, layer in enumerate(getattr(model, stack).layers()):
            def keep(module: SinkhornAttention, inputs: tuple[Tensor, ...], stack: str = stack,
                     place: int = place) -> None:
                for head, r in enumerate(sorted_by_hand(module, inputs[0])[0]):
                    found[stack, place, head] = r
            layer.attention.register_forward_pre_hook(keep)
    targets = [[*sorted(ids[:-1]), ids[-1]]] if task == "sort" else []
    model(*(torch.tensor(rows) for rows in ([ids], targets) if rows))
    return found


def figures_by_hand(r: Tensor, window: int) -> dict[str, float]:
    """Means over the rows that read something, of shares of their sums."""
    rows = [(i, (row / row.sum()).tolist()) for i, row in enumerate(r) if row.sum() > 0]
    own = [row[i] for i, row in rows]
    newest = [row[i - window - 1] if i > window else 0 for i, row in rows]
    previous = [row[i - 1] if i > 0 else 0 for i, row in rows]
    each = {"own": own, "previous": previous, "newest": newest,
            "elsewhere": [1 - a - b for a, b in zip(own, newest)],
            "largest": [max(row) for _, row in rows],
            "entropy": [-math.fsum(p * math.log2(p) for p in row if p) for _, row in rows]}
    return {name: math.fsum(values) / len(rows) for name, values in each.items()}


@pytest.mark.parametrize(("task", "kind"), [
    ("sort", "bilinear"), ("sort", "linear"), ("sort", "inclusive"),
    ("classify", "bilinear"), ("classify", "linear")])
def test_matrices_and_figures(tmp_path: Path, task: str, kind: str) -> None:
    run, config = run_of(tmp_path, task, kind), sinkhorn.load_export(tmp_path / "out").config
    lengths = []
    for words in (["--example", 12], ["--example", 24], ["--example", 31],
                  ["--text", "5 3 11 2 7 7 0 14 9 1"]):
        found = inspected(run, *words)
        ids = tokens_of(task, found["input"])
        lengths.append(len(ids))
        expected = matrices_by_hand(task, tmp_path / "out", ids)
        assert [(s["stack"], s["layer"], s["head"]) for s in found["sorts"]] == list(expected)
        blocks = num_blocks(len(ids), BLOCK)
        for sort, by_hand in zip(found["sorts"], expected.values(), strict=True):
            r, a = matrix(sort), config[sort["stack"]]
            torch.testing.assert_close(r[:blocks, :blocks], by_hand, **NEAR)
            assert not r[blocks:].any() and not r[:, blocks:].any()  # pads are no blocks to read
            strict = sort["stack"] == "decoder" and a["causal"] == "strict"
            window = a["window"] if strict else 0
            figures = figures_by_hand(r, window)
            assert {name: sort[name] for name in figures} == pytest.approx(figures, abs=1e-6)
            assert sort["newest_distance"] == window + 1
    assert max(lengths) > 4 * BLOCK and sum(length % BLOCK > 0 for length in lengths) > 1


def test_what_is_printed_are_the_figures(tmp_path: Path) -> None:
    """The newest source with its distance: behind a window it is not the block before."""
    run = run_of(tmp_path, "sort", "bilinear")
    said = output("inspect", run, "--example", "31", "--out", run / "seen")
    lines = [line for line in said.splitlines() if " head " in line]
    sorts = inspected(run, "--example", 31)["sorts"]
    assert {sort["stack"]: sort["newest_distance"] for sort in sorts} == {"encoder": 1, "decoder": 2}
    back = {"encoder": "1 block", "decoder": "2 blocks"}
    assert lines == [
        f"{s['stack']} layer {s['layer']} head {s['head']}: {s['blocks']} blocks, "
        f"own {100 * s['own']:.1f}%, previous {100 * s['previous']:.1f}%, "
        f"newest source ({back[s['stack']]} back) {100 * s['newest']:.1f}%, "
        f"largest {100 * s['largest']:.1f}%, entropy {s['entropy']:.2f} bits" for s in sorts]


def test_examples_are_the_test_split_from_short_to_long(tmp_path: Path) -> None:
    run = run_of(tmp_path, "classify", "bilinear")
    lines = (tmp_path / "data" / "test.tsv").read_text().splitlines()
    texts = sorted((line.split("\t")[1] for line in lines), key=len)
    for example in (0, 7, len(texts) - 1):
        assert inspected(run, "--example", example)["input"] == texts[example]


@pytest.mark.parametrize("kind", ["bilinear", "linear"])
def test_pictures_show_the_matrices(tmp_path: Path, kind: str) -> None:
    """A picture a layer, its heads side by side on white; from top to bottom the destinations, from
    left to right the sources. Green rises all along the scale of colours, which is one for all."""
    found = inspected(run_of(tmp_path, "sort", kind), "--example", 31)
    blocks, gap = found["sorts"][0]["blocks"], 8
    side, painted = min(32, 256 // blocks), []
    for name in found["pictures"]:
        stack, layer = Path(name).stem.split("-layer")
        width, height, rows = read_png(Path(name))
        assert (width, height) == (HEADS * (blocks * side + gap) - gap, blocks * side)
        heads = [s for s in found["sorts"] if (s["stack"], s["layer"]) == (stack, int(layer))]
        assert len(heads) == HEADS
        left = 0
        for sort in heads:
            for i, row in enumerate(matrix(sort).tolist()):
                for j, share in enumerate(row):
                    begin = 3 * (left + j * side)
                    cell = {line[begin:begin + 3 * side] for line in rows[i * side:][:side]}
                    assert len(cell) == 1 and cell == {min(cell)[:3] * side}  # of one colour
                    painted.append((share, min(cell)[1]))
            left += blocks * side + gap
            assert all(set(line[3 * (left - gap):3 * left]) <= {255} for line in rows)
    assert len(painted) == len(found["sorts"]) * blocks**2
    painted.sort()
    greens = [green for _, green in painted]
    assert greens == sorted(greens)
    for share, green in painted:
        assert all(other > green for more, other in painted if more > share + 0.02)
    assert painted[0][0] == 0 and painted[-1][0] > 0.5  # there was something to see
