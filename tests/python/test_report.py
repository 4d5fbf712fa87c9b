"""`sinkhorn report`: what it finds, what it leaves out and says so, and the page in a browser."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from cli_program import output, refusal, run
from train_program import SMALL, classify_task, sort_task, text_task, train

HOSTILE = "<script>alert('x')</script>"
PHONE = 390  # CSS pixels


def cell(value: float | None, paper: float | None = None, **more: Any) -> dict[str, Any]:
    return {"value": value, "paper": paper, "seeds": [value] if value is not None else [],
            "steps": 1000, "data": "stand-in: generated", "leaks": False, "run": "",
            "seconds": 36.1, "tokens_per_second": 1.2e6, "peak_memory": 123456789} | more


def table(**more: Any) -> dict[str, Any]:
    """Two columns, a control, and a row that leaks and would be best."""
    rows = [
        {"name": "Transformer", "role": "paper", "cells": [cell(12.3, 45.69), cell(1.5, 0.42)]},
        {"name": "Sinkhorn (32)", "role": "paper",
         "cells": [cell(40.25, 69.14, seeds=[40.0, 40.5]), cell(0.75, 0.03, steps=2000)]},
        {"name": "Window control", "role": "control", "cells": [cell(30.5), cell(None)]},
        {"name": "Literal", "role": "literal",
         "cells": [cell(99.9, leaks=True), cell(0.01, leaks=True)]},
    ]
    columns = [{"name": "exact match", "figure": "exact_match", "better": "high", "digits": 2},
               {"name": "edit distance", "figure": "edit_distance", "better": "low", "digits": 3}]
    return {"table": "table1", "title": "Table 1: sorting", "scale": "small", "commit": "abc1234",
            "device": "a machine", "columns": columns, "rows": rows} | more


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny runs of the three kinds of model, one with a hostile name, and a table of results."""
    folder = tmp_path_factory.mktemp("runs")
    data = tmp_path_factory.mktemp("data")
    (folder / "sort").mkdir()
    steps = {"train.steps": 12, "train.log_every": 2, "train.eval_every": 4}
    train(folder / "sort" / "sinkhorn", sort_task(**steps))
    train(folder / "sort" / "full", sort_task(**steps, **{"attention.kind": "full"}))
    texts = text_task(data / "text", **steps, **{"task.length": 160})
    (data / "text" / "text.txt").write_text(f"one {HOSTILE} & two\n" * 200)
    train(folder / "text <b>&amp;", texts)
    train(folder / "classify", classify_task(data / "classify", **steps))
    (folder / "table1.json").write_text(json.dumps(table()))
    (folder / "other.json").write_text('{"some": "other file"}')
    return folder


@pytest.fixture(scope="module")
def page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    assert output("report", runs, "-o", path) == f"{path}\n"
    return path


def texts_of(browser: Browser, selector: str) -> list[str]:
    return browser.run(f"[...document.querySelectorAll({json.dumps(selector)})]"
                       ".map(e => e.textContent)")


def test_an_export_has_nothing_to_show(runs: Path, tmp_path: Path) -> None:
    export = tmp_path / "export"
    output("export", runs / "sort" / "full", export)
    says = f"{export}: an export, which has no curves; name the run's folder"
    done = run("report", runs / "sort" / "full", export, "-o", tmp_path / "page.html")
    assert (done.returncode, done.stderr) == (0, f"sinkhorn: {says}\n")
    assert "an export, which has no curves" in (tmp_path / "page.html").read_text()


def test_the_page_stands_alone(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r'(src|href)="(?!data:|#)', text)
    assert "url(" not in text and "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert not list(page.parent.glob("*.tmp*")) and len(list(page.parent.iterdir())) == 1


def test_text_is_escaped(page: Path) -> None:
    text = page.read_text()
    assert text.count("<script>") == 1, "only the page's own"
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; two" in text
    assert "text &lt;b&gt;&amp;amp;" in text


def test_no_complaints_and_no_requests(browser: Browser, page: Path) -> None:
    for dark in (False, True):
        browser.open(page, dark=dark)
        assert browser.complaints() == []
        assert [url for url in browser.requests() if not url.startswith("data:")] == [
            page.resolve().as_uri()]


def test_sections_as_rendered(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert texts_of(browser, "h2") == ["Tables", "Curves", "Speed and memory",
                                       "What is sorted where", "Samples"]
    assert texts_of(browser, "nav a") == ["Tables", "Curves", "Speed", "Sorting", "Samples"]
    assert "1 table, 4 runs" in browser.run("document.body.innerText")
    assert texts_of(browser, "aside") == []
    names = texts_of(browser, "#speed tbody th")
    assert names == ["classify", "sort/full", "sort/sinkhorn", "text <b>&amp;"]
    assert all("MiB" in text for text in texts_of(browser, "#speed td:nth-of-type(2)"))


def test_the_table_ranks_what_does_not_leak(browser: Browser, page: Path) -> None:
    browser.open(page)
    rows = browser.run("""[...document.querySelectorAll('table.results tbody tr')].map(
        r => [...r.children].map(c => c.textContent.trim()))""")
    notes = texts_of(browser, "#tables .notes li")
    marks = texts_of(browser, "table.results sup")

    def without_mark(text: str) -> str:
        return re.sub("[a-z]$", "", text)

    first = rows[0]
    rows = [[row[0], *map(without_mark, row[1:])] for row in rows]
    assert rows[0][:7] == ["Transformer", "12.30", "45.69", "−33.39", "1.500", "0.420", "+1.080"]
    assert rows[1][1:7] == ["40.25 ±0.35", "69.14", "−28.89", "0.750", "0.030", "+0.720"]
    assert rows[2][:3] == ["Window controlcontrol", "30.50", "–"]
    assert rows[3][0] == "Literalliteralleaks the future"
    # Each figure bears the letter of how it was trained.
    assert "1000 steps, stand-in: generated" in notes[0] and "2000 steps" in notes[1]
    assert first[1] == "12.30a" and set(marks) == set("abcdefgh"[:len(notes)])
    assert list(map(without_mark, texts_of(browser, "table.results .best"))) == [
        "40.25 ±0.35", "0.750"]
    assert "scale small" in texts_of(browser, "#tables p")[1]
    assert "36 s · 1.20M tokens/s · 118 MiB" in texts_of(browser, "#tables details td")[0]


def test_curves_have_axes_and_lines(browser: Browser, page: Path) -> None:
    browser.open(page)
    captions = texts_of(browser, "#curves figcaption")
    assert captions.count("training loss") == 3  # sort, text, classify
    assert "validation exact match, %" in captions
    charts = browser.run("""[...document.querySelectorAll('#curves .chart svg')].map(s => [
        s.querySelectorAll('.line path').length, s.querySelectorAll('.ticks text').length,
        [...s.querySelectorAll('.line path')].every(p => p.getTotalLength() > 50)])""")
    assert sorted(lines for lines, _, _ in charts)[-1] == 2  # both sorts in one chart
    assert all(ticks >= 6 and long for _, ticks, long in charts)
    assert any("step 12: " in text for text in texts_of(browser, "#curves circle title"))


def test_matrices_have_pictures_and_numbers(browser: Browser, page: Path) -> None:
    browser.open(page)
    rows = browser.run("""[...document.querySelectorAll('#sorting > .wide tbody tr')].map(
        r => [...r.children].map(c => c.textContent))""")
    assert [row[0] for row in rows] == ["classify", "sort/sinkhorn", "text <b>&amp;"]
    heads = {row[0]: int(row[1]) for row in rows}
    assert heads["sort/sinkhorn"] == 4 and heads["classify"] == 2  # both stacks; the encoder
    for row in rows:
        largest, entropy, own, newest, elsewhere = (float(t.rstrip("%")) for t in row[2:])
        assert 0 < largest <= 100 and entropy >= 0
        assert own + newest + elsewhere == pytest.approx(100, abs=0.2)
    pictures = browser.run("document.querySelectorAll('#sorting .map image').length")
    assert pictures == sum(heads.values())
    assert any("reads" in title for title in texts_of(browser, ".map title"))
    assert all("entropy" in text for text in texts_of(browser, ".maps figcaption"))
    assert texts_of(browser, ".sources tbody th")[:2] == ["0", "1"]


def test_samples_of_every_kind(browser: Browser, page: Path) -> None:
    browser.open(page)
    names = texts_of(browser, "#samples dt")
    assert len(texts_of(browser, "#samples dl")) == 4 * 3
    for name in ("input", "wanted", "text", "label", "beginning", "goes on, says the model"):
        assert name in names
    parts = browser.run("""[...document.querySelectorAll('#samples details')].map(
        d => [...d.querySelectorAll('dd')].map(e => e.textContent))""")
    read, wanted = parts[1][-3], parts[1][-2]  # sort/full, the longest
    assert sorted(map(int, read.split())) == list(map(int, wanted.split()))
    assert any(HOSTILE in text for text in parts[3])
    assert browser.run("document.querySelectorAll('main script').length") == 0


def test_light_dark_and_the_button(browser: Browser, page: Path) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    browser.open(page)
    light = browser.run(colour)
    browser.open(page, dark=True)
    dark = browser.run(colour)
    assert light != dark
    browser.run("document.getElementById('theme').click()")
    assert browser.run(colour) == light
    browser.run("document.getElementById('theme').click()")
    assert browser.run(colour) == dark


def test_a_phone_scrolls_one_way_only(browser: Browser, page: Path) -> None:
    browser.open(page, width=PHONE, height=844)
    browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.run("innerWidth") == PHONE
    assert browser.run("document.documentElement.scrollWidth") <= PHONE


def test_a_run_alone_and_without_opening_it(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "one.html"
    output("report", runs / "sort" / "sinkhorn", "--samples", "0", "--out", page)
    text = page.read_text()
    assert "1 run " in text and "training loss" in text
    assert 'id="sorting"' not in text and 'id="samples"' not in text


def test_runs_are_named_by_the_rows_of_their_table(runs: Path, tmp_path: Path) -> None:
    sort = runs / "sort" / "sinkhorn"
    for place in ("a.base/seed1", "b/seed1", "b/seed2", "b/tune/t0.5", "other"):
        shutil.copytree(sort, tmp_path / "table1" / place)
    config = tmp_path / "table1" / "other" / "config.ini"
    config.write_text(re.sub(r'(\[decoder\][^\[]*columns = )"\w+"', r'\1"full"',
                             config.read_text()))
    results = table()
    results["rows"][0]["cells"][0]["run"] = "table1/a.base/seed1"
    results["rows"][1]["cells"][0]["run"] = "table1/b/seed2"
    (tmp_path / "table1.small.json").write_text(json.dumps(results))
    page = tmp_path / "report.html"
    output("report", tmp_path, "-o", page, "--samples", "0")
    section = page.read_text().split('<section id="curves">')[1].split("</section>")[0]
    assert re.findall(r"<h3>(.*?)</h3>", section) == [
        "Table 1: sorting", "Table 1: sorting, trials", "sort: 16 symbols, lists of up to 15"]
    assert re.findall(r"</svg>([^<]+)</th>", section) == [
        "Transformer base", "Sinkhorn (32), seed1", "Sinkhorn (32), seed2",
        "Sinkhorn (32), tune/t0.5", "table1/other"]
    assert section.count("leaks the future") == 1
    assert section.index("leaks the future") > section.index("table1/other")


def test_what_cannot_be_read_is_said_and_left_out(runs: Path, tmp_path: Path) -> None:
    good = tmp_path / "good"
    shutil.copytree(runs / "sort" / "sinkhorn", good)
    with open(good / "log.jsonl", "a") as log:
        log.write('{"step": 14, "lo')
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "log.jsonl").write_text("")
    shutil.copytree(good, tmp_path / "unfinished")
    shutil.rmtree(tmp_path / "unfinished" / "checkpoints")
    (tmp_path / "unfinished" / "log.jsonl").write_text('{"step": 2, "loss": 3.0}\n')
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "reproduce.ini").write_text("")
    shutil.copytree(tmp_path / "unfinished", tmp_path / "new")
    (tmp_path / "new" / "log.jsonl").unlink()
    (tmp_path / "new" / "environment.json").write_text('{"cuda:0": 3')
    for file in (tmp_path / "new").glob("events*"):
        file.unlink()
    for name, end in (("cut", 200), ("odd", -1)):
        shutil.copytree(tmp_path / "unfinished", tmp_path / name)
        config = tmp_path / name / "config.ini"
        config.write_text(config.read_text()[:end] + ("" if end > 0 else "x"))
    (tmp_path / "cut.json").write_text('{"table": "table1", "rows": [')
    short = table()
    short["rows"][0]["cells"].pop()
    (tmp_path / "short.json").write_text(json.dumps(short))
    page = tmp_path / "report.html"
    done = run("report", tmp_path, "-o", page)
    assert done.returncode == 0, done.stderr
    lines = sorted(line.removeprefix("sinkhorn: ") for line in done.stderr.splitlines())
    config = (tmp_path / "odd" / "config.ini").read_text().splitlines()
    (odd,) = [number for number, line in enumerate(config, 1) if "falsex" in line]
    assert lines == sorted([
        f"{tmp_path}/cut.json: not JSON, or it breaks off; remove it, and `sinkhorn reproduce` "
        "makes it anew from its runs",
        f'{tmp_path}/short.json: row "Transformer" has 1 cells for 2 columns',
        f"{good}: log.jsonl: line {len((good / 'log.jsonl').read_text().splitlines())} "
        "cannot be read; left out",
        f"{tmp_path}/half: half a run, without its config.ini; train it again, or remove the folder",
        f"{tmp_path}/begun: half a run, without its config.ini; train it again, or remove the folder",
        f"{tmp_path}/cut/config.ini: breaks off; train it again, or remove the folder",
        f'{tmp_path}/odd/config.ini:{odd}: train.greedy: "falsex" is neither true nor false; cut '
        "off, or another version's; train it again, or remove the folder",
        f"{tmp_path}/new: no log.jsonl yet: no curves",
        f"{tmp_path}/new: has no newest checkpoint yet; no matrices and samples of it",
        f"{tmp_path}/unfinished: has no newest checkpoint yet; no matrices and samples of it",
    ]), done.stderr
    text = page.read_text()
    for line in lines:
        assert line.replace('"', "&quot;").replace("'", "&#39;") in text
    assert "2 runs" in text


def test_nothing_to_show(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    expected = f"{tmp_path}: no run and no table of results that can be shown"
    assert refusal("report", tmp_path, "-o", page, code=1) == expected
    assert not page.exists()


def test_a_pipe_is_written_to_and_stays(runs: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True)
    try:
        output("report", runs / "sort" / "sinkhorn", "--samples", "0", "-o", pipe)
        assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]
        assert reader.communicate(timeout=60)[0].startswith("<!doctype html>")
    finally:
        reader.kill()  # it would wait for ever for a writer that does not come
        reader.wait()


def test_commands_that_cannot_be_meant(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert refusal("report", missing) == f"{missing}: no such file or folder"
    assert refusal("report") == "PLACE is required"
    assert refusal("report", tmp_path, "-o", missing / "page.html") == (
        f"{missing}: no such folder for the report; make it first")
    folder = tmp_path / "folder"
    folder.mkdir()
    assert refusal("report", tmp_path, "-o", folder) == (
        f"--out: {folder} is a folder; name the page's file")
    said = refusal("report", tmp_path, "-o", "/proc/page.html", code=1)
    assert said.startswith("/proc/page.html.") and "cannot open for writing" in said


def test_pixels_are_shown_as_pictures(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name, count in (("data_batch_1", 30), ("test_batch", 2)):
        (data / f"{name}.bin").write_bytes(b"".join(
            bytes([n % 10]) + bytes((n * 40 + i) % 256 for i in range(3072)) for n in range(count)))
    folder = tmp_path / "run"
    train(folder, SMALL | {"task.name": "pixels", "task.data": data, "task.cache": tmp_path / "cache",
                           "attention.block": 256, "train.steps": 1, "train.batch": 1,
                           "train.test_batches": 1, "train.eval_batches": 1})
    page = tmp_path / "page.html"
    output("report", folder, "-o", page, "--samples", "2")
    text = page.read_text()
    samples = text.split('id="samples"')[1]
    pictures = re.findall(r'<dd><img class="pixels" width="128" height="128"[^>]*'
                          r'src="data:image/png;base64,([^"]*)"', samples)
    assert len(pictures) == 4 and len(set(pictures)) == 4
    assert base64.b64decode(pictures[0]).startswith(b"\x89PNG")
    assert not re.search(r"\d+ \d+ \d+ \d+", re.sub(r"<[^>]*>", "", samples)), "no rows of numbers"
    assert '<span class="quiet">input:</span> <img class="pixels"' in text
