"""`sinkhorn serve` under load: full queues, clients that leave, time limits, signals."""

from __future__ import annotations

import json
import math
import select
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cli_program import run
from serve_program import ENDLESS, HEAD, Server, Stream
from serve_runs import folder, long_run, slow, text_run  # noqa: F401

safetensors = pytest.importorskip("safetensors")
save_file = pytest.importorskip("safetensors.torch").save_file


def test_a_full_queue_is_said_so(slow: Server) -> None:
    running = Stream(slow, **ENDLESS)
    next(running.events())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(slow.post, "/v1/completions", prompt="two", max_tokens=3, seed=1)
        slow.wait_until(lambda health: health["waiting"] == 1)
        status, headers, body = slow.ask("POST", "/v1/completions", b"{}",
                                         **{"Content-Type": "application/json"})
        assert status == 429 and int(headers["Retry-After"]) >= 1
        assert json.loads(body)["error"]["type"] == "rate_limit_error"
        # The page and the matrices are there meanwhile.
        assert slow.ask("GET", "/")[0] == 200
        assert slow.post("/v1/sorting", text="one two three")[0] == 200
        assert slow.health()["active"] == 1
        running.close()
        status, answer = waiting.result()
        assert status == 200 and answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slot(slow: Server, stream: bool) -> None:
    # To the end it would take far longer than the test waits.
    body = json.dumps(ENDLESS | {"stream": stream, "n": 30}).encode()
    with socket.create_connection((slow.host, slow.port), timeout=30) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        slow.wait_until(lambda health: health["active"] == 1)
    slow.wait_until(lambda health: health["active"] == 0)
    assert slow.complete(prompt="two", max_tokens=3)["usage"]["total_tokens"] <= 6


def test_the_time_limit_ends_what_runs_and_what_waits(long_run: Path) -> None:
    started = Server(long_run, "--slots", 1, "--timeout", 1, "--max-tokens-limit", 16000)
    try:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(started.post, "/v1/completions", **ENDLESS)
            started.wait_until(lambda health: health["active"] == 1)
            second = pool.submit(started.post, "/v1/completions", n=2, **ENDLESS)
            status, answer = first.result()
            assert status == 200
            [choice] = answer["choices"]
            assert choice["finish_reason"] == "timeout" and choice["text"]
            status, answer = second.result()
            if status == 200:  # it began in what was left of its second
                assert {c["finish_reason"] for c in answer["choices"]} == {"timeout"}
            else:
                assert status == 503 and answer["error"]["code"] == "timeout"
        assert started.text(prompt="two", max_tokens=3) is not None
    finally:
        assert started.end() == (128 + signal.SIGTERM, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_in_the_middle_of_a_stream(long_run: Path, number: int) -> None:
    started = Server(long_run, "--slots", 1, "--max-tokens-limit", 16000)
    stream = Stream(started, **ENDLESS)
    events = stream.events()
    next(events)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(started.post, "/v1/completions", prompt="two", max_tokens=3)
        started.wait_until(lambda health: health["waiting"] == 1)
        ended = pool.submit(started.end, number)
        status, answer = waiting.result()
        assert status == 503 and answer["error"]["code"] == "ending"
        reasons = [event["choices"][0]["finish_reason"] for event in events]
        assert reasons[-1] in ("interrupted", "length")
        assert ended.result() == (128 + number, "")


@pytest.mark.parametrize("stream", [True, False])
def test_a_model_that_fails_is_told_and_the_server_goes_on(text_run: Path, tmp_path: Path,
                                                           stream: bool) -> None:
    assert run("export", text_run, tmp_path / "broken").returncode == 0
    path = tmp_path / "broken" / "model.safetensors"
    with safetensors.safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        metadata = file.metadata()
    broken = {name: torch.full_like(tensor, math.nan) if tensor.is_floating_point() else tensor
              for name, tensor in tensors.items()}
    save_file(broken, path, metadata)
    config = tmp_path / "broken" / "config.json"
    unchecked = json.loads(config.read_text())
    unchecked.pop("crc32", None)
    config.write_text(json.dumps(unchecked))
    started = Server(tmp_path / "broken")
    try:
        for _ in range(3):
            status, answer = started.post("/v1/completions", prompt="one", stream=stream)
            assert status == 500
            assert answer["error"]["code"] == "model_failed"
            assert "are not numbers" in answer["error"]["message"]
        assert started.health()["active"] == 0
    finally:
        assert started.end() == (128 + signal.SIGTERM, "")


def test_half_sent_requests_do_not_hold_up_others(slow: Server) -> None:
    waiting = []
    try:
        for _ in range(60):
            waiting.append(socket.create_connection((slow.host, slow.port), timeout=30))
            waiting[-1].sendall(HEAD + b"Content-Length: 100\r\n\r\n{\"prompt\": ")
        assert slow.complete(prompt="two", max_tokens=3)["usage"]["completion_tokens"] == 3
        given_up = select.select(waiting, [], [], 0)[0]
        assert len(given_up) < len(waiting)  # it did not wait for all of these
    finally:
        for connection in waiting:
            connection.close()


def test_an_idle_connection_does_not_hold_the_end_up(text_run: Path) -> None:
    started = Server(text_run)
    with socket.create_connection((started.host, started.port)):
        begun = time.monotonic()
        assert started.end() == (128 + signal.SIGTERM, "")
        assert time.monotonic() - begun < 20
