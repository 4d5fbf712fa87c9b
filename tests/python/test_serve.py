"""`sinkhorn serve` with a real client: completions, streams, batching, and what is refused."""

from __future__ import annotations

import json
import random
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cli_program import objects, output, refusal, run
from serve_program import HEAD, Server, Stream
from serve_runs import folder, server, text_run  # noqa: F401
from train_program import sort_task, train


def generated(run_folder: Path, *words: Any) -> list[dict[str, Any]]:
    return objects(output("generate", run_folder, "--json", *map(str, words)))


# ------------------------------------------------------------------------------- completions

def test_a_completion_is_what_generate_says(server: Server, text_run: Path) -> None:
    for more, words in (({}, []), ({"temperature": 0}, ["--temperature", 0]),
                        ({"top_k": 3, "temperature": 1.5}, ["--top-k", 3, "--temperature", 1.5]),
                        ({"top_p": 0.6}, ["--top-p", 0.6]), ({"stop": "our"}, ["--stop", "our"]),
                        ({"repetition_penalty": 1.5}, ["--repetition-penalty", 1.5]),
                        ({"ignore_end": True}, ["--ignore-end"])):
        answer = server.complete(prompt="one two ", seed=7, max_tokens=30, **more)
        [expected] = generated(text_run, "--prompt", "one two ", "--seed", 7, "--max-tokens", 30,
                               *words)
        [choice] = answer["choices"]
        assert choice["text"] == expected["text"]
        assert choice["finish_reason"] == expected["stop"]
        assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": len(expected["ids"]),
                                   "total_tokens": 8 + len(expected["ids"])}


def test_the_objects_are_openai_s(server: Server) -> None:
    answer = server.complete(model="text", prompt="one", max_tokens=2, temperature=0)
    assert list(answer) == ["id", "object", "created", "model", "choices", "usage"]
    assert answer["object"] == "text_completion" and answer["model"] == "text"
    assert answer["id"].startswith("cmpl-") and abs(answer["created"] - time.time()) < 60
    assert answer["choices"][0] == {"text": " t", "index": 0, "logprobs": None,
                                    "finish_reason": "length"}
    status, _, body = server.ask("GET", "/v1/models")
    assert status == 200
    [model] = json.loads(body)["data"]
    assert abs(model.pop("created") - time.time()) < 600
    assert model == {"id": "text", "object": "model", "owned_by": "sinkhorn"}
    assert server.health()["status"] == "ok"


def test_several_prompts_and_choices(server: Server, text_run: Path) -> None:
    prompts = ["one ", "two three "]
    answer = server.complete(prompt=prompts, n=3, seed=3, max_tokens=12, echo=True)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    expected = [prompt + one["text"] for prompt in prompts for one in generated(
        text_run, "--prompt", prompt, "--samples", 3, "--seed", 3, "--max-tokens", 12)]
    assert texts == expected
    assert answer["usage"]["prompt_tokens"] == 4 + 10


def test_no_prompt_and_no_seed(server: Server, text_run: Path) -> None:
    [expected] = generated(text_run, "--seed", 5, "--max-tokens", 20)
    assert server.text(seed=5, max_tokens=20) == expected["text"]
    texts = {server.text(prompt="o", max_tokens=20, temperature=2) for _ in range(4)}
    assert len(texts) > 1


def test_a_stream_is_the_text(server: Server) -> None:
    for more in ({}, {"stop": ["thr", "fi"]}, {"temperature": 2.5}, {"n": 2, "echo": True}):
        fields: dict[str, Any] = {"prompt": "one ", "seed": 11, "max_tokens": 40} | more
        whole = server.complete(**fields)
        texts, ends = [""] * len(whole["choices"]), [None] * len(whole["choices"])
        stream = Stream(server, **fields, stream_options={"include_usage": True})
        assert stream.answer.getheader("Content-Type") == "text/event-stream"
        usage = None
        for event in stream.events():
            assert event["object"] == "text_completion"
            for choice in event["choices"]:
                assert ends[choice["index"]] is None
                texts[choice["index"]] += choice["text"]
                ends[choice["index"]] = choice["finish_reason"]
            usage = event.get("usage")
        assert texts == [choice["text"] for choice in whole["choices"]]
        assert ends == [choice["finish_reason"] for choice in whole["choices"]]
        assert usage == whole["usage"]


def test_concurrent_requests_are_answered_as_if_alone(server: Server) -> None:
    """16 at once in 2 slots, each with options of its own."""
    requests: list[dict[str, Any]] = [
        {"prompt": ["one ", "five six seven ", "t"][i % 3], "seed": i, "max_tokens": 10 + 2 * i}
        | [{}, {"top_k": 4}, {"temperature": 0}, {"top_p": 0.9, "repetition_penalty": 1.2},
           {"temperature": 1.7}][i % 5] for i in range(16)]
    alone = [server.text(**request) for request in requests]
    assert len(set(alone)) > 8
    for _ in range(2):
        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(lambda r: server.text(**r), requests)) == alone


def test_the_sorting_matrices_are_inspect_s(server: Server, text_run: Path,
                                            tmp_path: Path) -> None:
    text = "one two three four five"
    status, found = server.post("/v1/sorting", text=text, values=True)
    assert status == 200
    expected = json.loads(output("inspect", text_run, "--text", text, "--json", "--out", tmp_path))
    assert found["block"] == 4
    # Behind the token that begins a text, as it is read before it is continued.
    assert found["blocks"] == ["one", *(text[i:i + 4] for i in range(3, len(text), 4))]
    assert expected["input"] == text
    heads = [head for layer in found["layers"] for head in layer["heads"]]
    assert len(heads) == len(expected["sorts"]) == 2
    for head, sort in zip(heads, expected["sorts"], strict=True):
        assert head["values"] == pytest.approx(sort["r"], abs=1e-6)
        assert len(head["sources"]) == 6
    assert "values" not in server.post("/v1/sorting", text=text)[1]["layers"][0]["heads"][0]
    assert server.post("/v1/sorting", text="")[0] == 400
    assert server.post("/v1/sorting", text=3)[0] == 400


# ------------------------------------------------------------------------------- OpenAI's client

def openai_client(server: Server, strict: bool) -> Any:
    """strict: an answer without the fields and types of the published interface is an error."""
    openai = pytest.importorskip("openai")
    http_client = openai.DefaultHttpxClient(trust_env=False)  # no proxy between
    return openai.OpenAI(base_url=f"{server.address}v1", api_key="any", max_retries=0,
                         http_client=http_client, _strict_response_validation=strict)


def test_openai_s_client_completes(server: Server) -> None:
    fields: dict[str, Any] = {"prompt": ["one two ", "five "], "n": 2, "seed": 3, "max_tokens": 12}
    expected = server.complete(**fields, top_k=5)
    with openai_client(server, strict=True) as client:
        assert [model.id for model in client.models.list()] == ["text"]
        answer = client.completions.create(model="text", **fields, extra_body={"top_k": 5})
    assert [choice.text for choice in answer.choices] == [
        choice["text"] for choice in expected["choices"]]
    assert {choice.finish_reason for choice in answer.choices} <= {"stop", "length"}
    assert answer.usage.total_tokens == expected["usage"]["total_tokens"]


def test_openai_s_client_streams(server: Server) -> None:
    fields: dict[str, Any] = {"model": "text", "prompt": "one two ", "seed": 3, "max_tokens": 20}
    # The client's types leave out that a text which goes on has no finish_reason yet.
    with openai_client(server, strict=False) as client:
        *parts, last = client.completions.create(**fields, stream=True,
                                                 stream_options={"include_usage": True})
    assert "".join(part.choices[0].text for part in parts) == server.text(**fields)
    reasons = [part.choices[0].finish_reason for part in parts]
    assert len(reasons) > 2 and set(reasons[:-1]) == {None} and reasons[-1] in ("stop", "length")
    assert last.choices == [] and 0 < last.usage.completion_tokens <= 20


def test_openai_s_client_is_told_what_is_wrong(server: Server) -> None:
    openai = pytest.importorskip("openai")
    with openai_client(server, strict=True) as client:
        with pytest.raises(openai.BadRequestError, match="it must be 0") as said:
            client.completions.create(model="text", prompt="one", temperature=-1)
        assert (said.value.status_code, said.value.param) == (400, "temperature")
        with pytest.raises(openai.BadRequestError, match="logprobs is not supported"):
            client.completions.create(model="text", prompt="one", logprobs=2, stream=True)
        with pytest.raises(openai.NotFoundError, match="there is no model 'other'") as missing:
            client.completions.create(model="other", prompt="one")
        assert missing.value.code == "model_not_found"


# ------------------------------------------------------------------------------- refusals

@pytest.mark.parametrize(("fields", "param", "message"), [
    ({"prompt": "x" * 64}, "prompt", "the prompt has 64 tokens; this model reads at most 63"),
    ({"prompt": ""}, "prompt", "the prompt is empty; leave it out to begin as the training data does"),
    ({"prompt": 3}, "prompt", "prompt is of the type number"),
    ({"prompt": []}, "prompt", "prompt is an empty array"),
    ({"prompt": ["a", 3]}, "prompt", "prompt has an entry of the type number"),
    ({"prompt": ["a"] * 100}, "prompt", "prompt has 100 entries"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be from 1 to 4096"),
    ({"max_tokens": 5000}, "max_tokens", "max_tokens is 5000; it must be from 1 to 4096"),
    ({"max_tokens": 4.0}, "max_tokens", "max_tokens must be an integer from 1 to 4096"),
    ({"max_tokens": -1}, "max_tokens", "max_tokens must be an integer from 1 to 4096"),
    ({"max_tokens": "9"}, "max_tokens", "max_tokens is of the type string"),
    ({"n": 33}, "n", "n is 33; it must be from 1 to 32"),
    ({"n": 32, "prompt": ["a"] * 3}, "n", "n times the prompts is 96"),
    ({"temperature": -1}, "temperature", "temperature is -1; it must be 0 (greedy) or more"),
    ({"temperature": True}, "temperature", "temperature is of the type boolean"),
    ({"top_p": 0}, "top_p", "top_p is 0; it must be above 0 and at most 1"),
    ({"top_k": -2}, "top_k", "top_k must be an integer"),
    ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty is 0; it must be above 0"),
    ({"seed": -1}, "seed", "seed must be an integer from 0"),
    ({"seed": 10 ** 30}, "seed", "seed must be an integer from 0"),
    ({"stop": ""}, "stop", "stop is empty"),
    ({"stop": [["a"]]}, "stop", "stop has an entry of the type array"),
    ({"stream": "yes"}, "stream", "stream is of the type string"),
    ({"stream_options": {"x": True}}, "stream_options", "stream_options has the unknown field x"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage",
     "stream_options.include_usage is of the type number"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "logit_bias is not supported"),
    ({"suffix": "end"}, "suffix", "suffix is not supported"),
    ({"logprobs": 3}, "logprobs", "logprobs is not supported"),
    ({"presence_penalty": 0.5}, "presence_penalty", "presence_penalty is not supported"),
    ({"best_of": 4}, "best_of", "best_of is not supported"),
    ({"colour": "red"}, "colour", "colour is not a known field"),
])
def test_requests_that_cannot_be_meant(server: Server, fields: dict[str, Any], param: str,
                                       message: str) -> None:
    status, answer = server.post("/v1/completions", **fields)
    assert status == 400, answer
    error = answer["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"].startswith(message), error
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param


def test_values_that_change_nothing_are_taken(server: Server) -> None:
    fields = {"prompt": "one", "seed": 1, "max_tokens": 5}
    text = server.text(**fields)
    assert server.text(**fields, logprobs=None, presence_penalty=0, frequency_penalty=0.0,
                       best_of=1, user="me", suffix=None) == text
    assert server.text(**fields, logit_bias={}, stop=[], suffix="",
                       stream_options={"include_usage": None}) == text
    body = json.dumps(fields).encode()
    for kind in ("Application/JSON", "application/json ; charset=utf-8", "APPLICATION/JSON;x=y"):
        status, _, answer = server.ask("POST", "/v1/completions", body, **{"Content-Type": kind})
        assert status == 200 and json.loads(answer)["choices"][0]["text"] == text


def test_places_and_senders_that_are_refused(server: Server) -> None:
    def error(status: int, *words: Any, **headers: str) -> str:
        found, _, body = server.ask(*words, **headers)
        assert found == status, body
        return json.loads(body)["error"]["message"]

    assert "there is no GET /nowhere here" in error(404, "GET", "/nowhere")
    assert "there is no POST /v1 here" in error(404, "POST", "/v1", b"{}")
    for method, path, allowed in (("POST", "/", "GET"), ("DELETE", "/v1/models", "GET"),
                                  ("GET", "/v1/sorting", "POST"),
                                  ("PUT", "/v1/completions", "POST")):
        assert error(405, method, path) == f"{path} takes {allowed}, not {method}"
        assert server.ask(method, path)[1]["Allow"] == allowed
    assert "must be application/json" in error(415, "POST", "/v1/completions", b"{}",
                                               **{"Content-Type": "text/plain"})
    assert "is compressed" in error(415, "POST", "/v1/completions", b"{}", **{
        "Content-Type": "application/json", "Content-Encoding": "gzip"})
    assert "'evil.example'" in error(403, "GET", "/", None, Host="evil.example:80")
    assert "'127.evil.example'" in error(403, "GET", "/", None, Host="127.evil.example")
    status, answer = server.post("/v1/completions", model="another")
    assert status == 404 and answer["error"]["code"] == "model_not_found"


def test_a_body_that_is_too_long(text_run: Path) -> None:
    started = Server(text_run, "--slots", 1, "--max-request-bytes", 1000)
    try:
        status, answer = started.post("/v1/completions", prompt="x" * 2000)
        assert status == 413
        assert "at most 1000 bytes" in answer["error"]["message"]
        assert started.text(prompt="one", max_tokens=3)
    finally:
        assert started.end() == (128 + signal.SIGTERM, "")


def mutated(gen: random.Random) -> bytes:
    body = bytearray(json.dumps({"prompt": "one \u2603", "max_tokens": 4, "temperature": 0.5,
                                 "stop": ["x"], "stream": False, "seed": 3}).encode())
    for _ in range(gen.randint(1, 6)):
        kind, place = gen.randrange(4), gen.randrange(len(body))
        if kind == 0:
            body[place] = gen.randrange(256)
        elif kind == 1:
            del body[place:place + gen.randint(1, 9)]
        elif kind == 2:
            body[place:place] = gen.choice([b"NaN", b"1e999", b"\xff\xfe", b"[[[[", b'"\\ud800"',
                                            b"-", b"null", b"{}", b"\0", b"Infinity"])
        else:
            body[place:] = body[:place]
        if not body:
            body = bytearray(b"{")
    return bytes(body)


def raw(server: Server, data: bytes, more: bool = False) -> bytes:
    """What comes back for bytes that need not be HTTP; more: the client does not end its side."""
    with socket.create_connection((server.host, server.port), timeout=30) as connection:
        try:
            connection.sendall(data)
            if not more:
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
            return answer
        except ConnectionResetError:
            return b""


def test_200_broken_bodies_do_not_stop_the_server(server: Server) -> None:
    gen = random.Random(5)
    refused = 0
    for _ in range(200):
        status, _, body = server.ask("POST", "/v1/completions", mutated(gen),
                                     **{"Content-Type": "application/json"})
        assert status in (200, 400), (status, body)
        refused += status == 400
        assert ("error" in json.loads(body)) == (status == 400)
    assert refused > 150
    assert server.text(prompt="one two ", temperature=0, max_tokens=6) == "three "


@pytest.mark.parametrize("data", [
    b"", b"\r\n\r\n", b"hello\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
    b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
    b"GET /" + b"x" * 20000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 20000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X%d: y\r\n" % i for i in range(2000)),
    b"GET /%zz%00%ff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nRange: bytes=5-1,,-\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nRange: bytes=99999-\r\n\r\n",
    b"BREW / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    HEAD + b"\r\n{}",
    HEAD + b"Content-Length: 100\r\n\r\n{\"prompt\": ",
    HEAD + b"Content-Length: -5\r\n\r\n{}",
    HEAD + b"Content-Length: banana\r\n\r\n{}",
    HEAD + b"Content-Length: 99999999999999999999\r\n\r\n{}",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n"
    b"Content-Type: multipart/form-data\r\n\r\nabcd",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n"
    b"Content-Type: multipart/form-data; boundary=x\r\n\r\nabcd",
])
def test_bytes_that_are_not_a_request(server: Server, data: bytes) -> None:
    answer = raw(server, data)
    if answer.startswith(b"HTTP/1.1 2"):
        assert data.startswith(b"GET"), answer
    elif answer:
        assert answer.startswith(b"HTTP/1.1 4"), answer
    assert server.text(prompt="one two ", temperature=0, max_tokens=6) == "three "


# ------------------------------------------------------------------------------- commands

def test_commands_that_cannot_be_meant(text_run: Path, folder: Path, server: Server) -> None:
    train(folder / "sort", sort_task() | {"train.steps": 2})
    assert refusal("serve", folder / "sort") == (
        "a model of the task sort makes no text; serve takes runs of lm and text")
    assert "cannot listen there" in refusal("serve", text_run, "--port", str(server.port), code=1)
    for host in ("no such host", "nope.invalid"):
        said = refusal("serve", text_run, "--host", host, code=1)
        assert said.startswith(f"--host {host}: the name cannot be resolved: "), said
        assert "Success" not in said
    assert "--port" in refusal("serve", text_run, "--port", "70000")
    assert "--slots" in refusal("serve", text_run, "--slots", "0")
    assert "--timeout" in refusal("serve", text_run, "--timeout", "0")
    assert refusal("serve", text_run, "--timeout", "nan") == "--timeout: nan is not a number"
    for option in ("--max-tokens-limit", "--max-request-bytes"):
        assert refusal("serve", text_run, option, "0") == f"{option}: 0 is not 1 or more"
    for option in ("--task.name", "--task.length", "--train.steps", "--train.run"):
        said = refusal("serve", text_run, option, "4")
        assert said.startswith(f"unknown option {option}"), said
    assert "not the folder of a run" in refusal("serve", folder)


def test_other_machines_are_let_in_by_choice_alone(text_run: Path) -> None:
    started = Server(text_run, "--host", "0.0.0.0")
    started.host = "127.0.0.1"
    assert started.ask("GET", "/health", None, Host="some.name:80")[0] == 200
    code, said = started.end()
    assert code == 128 + signal.SIGTERM
    assert said == ("sinkhorn: whoever can reach 0.0.0.0 can use this model: there is no "
                    "password\n")


def test_an_export_is_served(text_run: Path, server: Server, tmp_path: Path) -> None:
    assert run("export", text_run, tmp_path / "text", "--checkpoint", "newest").returncode == 0
    started = Server(tmp_path / "text", "--precision", "float32")
    try:
        words = {"prompt": "one two ", "temperature": 0, "max_tokens": 12}
        assert started.text(**words) == server.text(**words)
    finally:
        started.end()
