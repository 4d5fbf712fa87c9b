"""A server of this build as a child process, and a plain client of it."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, Iterator
from urllib.parse import urlsplit

import pytest
from cli_program import PROGRAM


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
ENDLESS: dict[str, Any] = {"prompt": "one ", "max_tokens": 16000, "ignore_end": True}


class Server:
    def __init__(self, run: Path, *words: Any) -> None:
        self.process = subprocess.Popen(
            [PROGRAM, "serve", run, "--port", "0", *map(str, words)], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        if not self.address:
            said = self.end()[1]
            if "this build has no server" in said:
                pytest.skip(said)
            raise AssertionError(said)
        self.host, self.port = urlsplit(self.address).hostname, urlsplit(self.address).port

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) \
            -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def post(self, path: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        status, _, body = self.ask("POST", path, json.dumps(fields).encode(),
                                   **{"Content-Type": "application/json"})
        return status, json.loads(body)

    def complete(self, **fields: Any) -> dict[str, Any]:
        status, answer = self.post("/v1/completions", **fields)
        assert status == 200, answer
        return answer

    def text(self, **fields: Any) -> str:
        [choice] = self.complete(**fields)["choices"]
        return choice["text"]

    def health(self) -> dict[str, Any]:
        status, _, body = self.ask("GET", "/health")
        assert status == 200
        return json.loads(body)

    def wait_until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        end = time.monotonic() + 30
        while not holds(self.health()):
            assert time.monotonic() < end, self.health()
            time.sleep(0.02)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """The exit code and what was said on stderr."""
        self.process.send_signal(number)
        try:
            _, said = self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, said = self.process.communicate()
        return self.process.returncode, said


class Stream:
    """A streamed completion that is being read."""

    def __init__(self, server: Server, **fields: Any) -> None:
        self.connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
        self.connection.request("POST", "/v1/completions", json.dumps(fields | {"stream": True}),
                                {"Content-Type": "application/json"})
        self.answer = self.connection.getresponse()

    def events(self) -> Iterator[dict[str, Any]]:
        """Up to [DONE]."""
        assert self.answer.status == 200, self.answer.read()
        for line in self.answer:
            if line == b"\n":
                continue
            assert line.startswith(b"data: "), line
            if line == b"data: [DONE]\n":
                assert self.answer.read() == b"\n"
                self.close()
                return
            yield json.loads(line.removeprefix(b"data: "))
        raise AssertionError("the stream ended without [DONE]")

    def close(self) -> None:
        self.answer.close()
        self.connection.close()
