"""The page of `sinkhorn serve` in a browser."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from browser import Browser
from serve_program import Server
from serve_runs import folder, long_run, server, slow, text_run  # noqa: F401


def wait_for(browser: Browser, script: str) -> Any:
    end = time.monotonic() + 30
    while not (value := browser.run(script)):
        assert time.monotonic() < end, (script, browser.run("document.body.innerText"))
        time.sleep(0.05)
    return value


def type_into(browser: Browser, name: str, text: str) -> None:
    browser.run(f"(e => {{ e.value = {json.dumps(text)}; "
                f"e.dispatchEvent(new Event('input', {{bubbles: true}})); }})"
                f"(document.getElementById({json.dumps(name)}))")


def press(browser: Browser, name: str) -> None:
    browser.run(f"document.getElementById({json.dumps(name)}).click()")


def text_of(browser: Browser, name: str) -> str:
    return browser.run(f"document.getElementById({json.dumps(name)}).textContent")


def test_the_page_writes_and_sorts(server: Server, browser: Browser, tmp_path: Path) -> None:
    browser.open(server.address)
    type_into(browser, "prompt", "one two three four ")
    type_into(browser, "seed", "4")
    type_into(browser, "max_tokens", "30")
    press(browser, "go")
    wait_for(browser, "document.getElementById('status').textContent.startsWith('done: ')")
    assert text_of(browser, "given") == "one two three four "
    assert text_of(browser, "made") == server.text(prompt="one two three four ", seed=4,
                                                   max_tokens=30)
    wait_for(browser, "document.querySelectorAll('#layers svg.map image').length === 2")
    assert "the text typed: 5 blocks of 4 tokens" in text_of(browser, "sorted")
    titles = browser.run("[...document.querySelectorAll('#layers title')].map(e => e.textContent)")
    assert len(titles) == 10 and any("reads block" in title for title in titles)
    press(browser, "whole")
    wait_for(browser, "document.getElementById('sorted').textContent.startsWith('typed and')")
    assert browser.complaints() == []
    assert all(url.startswith((server.address, "data:")) for url in browser.requests())
    browser.picture(tmp_path / "page.png")


def test_the_page_shows_text_as_text(server: Server, browser: Browser) -> None:
    browser.open(server.address, dark=True, width=390)
    hostile = "<img src=x onerror=alert(1)>"
    type_into(browser, "prompt", hostile)
    type_into(browser, "max_tokens", "3")
    press(browser, "go")
    wait_for(browser, "document.getElementById('status').textContent.startsWith('done: ')")
    wait_for(browser, "document.querySelectorAll('#layers svg').length === 2")
    assert text_of(browser, "given") == hostile
    assert browser.run("document.querySelectorAll('main img').length") == 0
    assert browser.run("document.documentElement.scrollWidth <= 390")
    assert browser.complaints() == []
    type_into(browser, "top_p", "7")
    press(browser, "go")
    wait_for(browser, "document.getElementById('status').className === 'wrong'")
    assert "top_p is 7" in text_of(browser, "status")


def test_the_page_stops(slow: Server, browser: Browser) -> None:
    browser.open(slow.address)
    type_into(browser, "prompt", "one ")
    type_into(browser, "max_tokens", "16000")
    type_into(browser, "temperature", "0")
    press(browser, "go")
    wait_for(browser, "document.getElementById('made').textContent.length > 0")
    press(browser, "halt")
    wait_for(browser, "document.getElementById('status').textContent === 'stopped'")
    slow.wait_until(lambda health: health["active"] == 0)
    assert browser.complaints() == []
