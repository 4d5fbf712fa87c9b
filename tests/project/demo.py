"""`make demo` in a few steps: four models, a table of them, a report; and nothing is trained twice."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

KINDS = ("sinkhorn", "local", "window", "full")


def demo(runs: Path) -> str:
    script, build = sys.argv[1:]
    done = subprocess.run([sys.executable, script, "--build", build, "--runs", runs, "--steps", "4"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def table(said: str) -> dict[str, list[float]]:
    rows = [re.match(r"(\w+) +([\d.]+) +([\d.]+) +([\d.]+)   \w", line)
            for line in said.splitlines()]
    return {row[1]: [float(x) for x in row.groups()[1:]] for row in rows if row}


with tempfile.TemporaryDirectory() as folder:
    runs = Path(folder) / "demo"
    said = demo(runs)
    assert tuple(table(said)) == KINDS, said
    for place, kind in enumerate(KINDS, 1):
        assert f"[{place}/4] {kind}: " in said
        assert f"{runs / kind}: " in said and "step 4" in said
    page = runs / "report.html"
    assert said.rstrip().endswith(str(page)) and page.stat().st_size > 20_000
    trained = {path: path.stat().st_mtime_ns for path in runs.rglob("*.safetensors")}
    again = demo(runs)
    assert table(again) == table(said) and "[1/4]" not in again
    assert trained == {path: path.stat().st_mtime_ns for path in runs.rglob("*.safetensors")}
