"""A small table of one's own for `sinkhorn reproduce`, and what it left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COMMON = """
[task]
name = "sort"
sort_symbols = 8
sort_train_max = 12
sort_test_max = 12
sort_train_size = 500
sort_test_size = 16

[model]
layers = 1
width = 16
ff_width = 32
heads = 2

[attention]
block = 4

[optimizer]
warmup = 2

[train]
device = "cpu"
threads = 1
batch = 8
log_every = 2
eval_every = 0
"""


def write_table(folder: Path, rows: dict[str, str], steps: int = 4) -> Path:
    """A folder of tables with one of these rows: id, and the text of its file."""
    place = folder / "configs" / "mine"
    place.mkdir(parents=True)
    (place / "common.ini").write_text(COMMON + f"steps = {steps}\n")
    for name, text in rows.items():
        (place / f"{name}.ini").write_text(f"include = common.ini\n{text}")
    (place / "table.json").write_text(json.dumps({
        "title": "Mine",
        "columns": [{"name": "exact match %", "figure": "exact_match", "better": "high",
                     "digits": 2}],
        "rows": [{"name": name.title(), "config": f"{name}.ini", "paper": [12.5]}
                 for name in rows]}))
    return folder / "configs"


SINKHORN = {"sinkhorn": "[attention]\nkind = sinkhorn\n"}
FULL = {"full": "[attention]\nkind = full\n"}


def words(folder: Path, *more: str, name: str = "mine") -> list[str]:
    return ["reproduce", name, "--configs", str(folder / "configs"), "--out",
            str(folder / "out"), "--device", "cpu", *more]


def results(folder: Path, name: str = "mine.smoke") -> dict[str, Any]:
    return json.loads((folder / "out" / f"{name}.json").read_text())


def cells(folder: Path, name: str = "mine.smoke") -> dict[str, dict[str, Any]]:
    return {row["id"]: row["cells"][0] for row in results(folder, name)["rows"]}
