"""`sinkhorn generate` on tiny runs: texts, images, lists and answers; what is refused, and how."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_program import PROGRAM, objects, output, refusal, run
from train_program import SMALL, Settings, classify_task, sort_task, text_task, train

IMAGE = 3 * 32 * 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("generate")


def trained(folder: Path, name: str, settings: Settings, steps: int) -> Path:
    train(folder / name, settings | {"train.steps": steps})
    return folder / name


@pytest.fixture(scope="module")
def text_run(folder: Path) -> Path:
    """Bytes of words that follow from one another."""
    return trained(folder, "text", text_task(folder / "data", **{"task.length": 64}), 500)


@pytest.fixture(scope="module")
def pieces_run(folder: Path) -> Path:
    lines = [f"the naïve café № {n} opens at {n % 24} o'clock — ☃ {n * n}\n" for n in range(300)]
    data = folder / "pieces.txt"
    data.write_text("".join(lines))
    return trained(folder, "pieces", text_task(folder / "data") | {
        "task.data": data, "task.tokens": "pieces", "task.vocab": 320, "task.length": 64}, 30)


@pytest.fixture(scope="module")
def sort_run(folder: Path) -> Path:
    return trained(folder, "sort", sort_task(), 20)


def write_images(path: Path, count: int, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    with open(path, "wb") as file:
        for label in range(count):
            file.write(bytes([label % 10]))
            file.write(bytes(torch.randint(0, 256, (IMAGE,), generator=gen).tolist()))


@pytest.fixture(scope="module")
def pixels_run(folder: Path) -> Path:
    data = folder / "cifar-10-batches-bin"
    data.mkdir()
    for name, count in (("data_batch_1", 30), ("test_batch", 2)):
        write_images(data / f"{name}.bin", count, seed=count)
    return trained(folder, "pixels", SMALL | {
        "task.name": "pixels", "task.data": data, "task.cache": folder / "cache",
        "model.width": 8, "model.ff_width": 8, "attention.block": 128, "train.batch": 1,
        "train.eval_batches": 1, "train.test_batches": 1}, 2)


@pytest.fixture(scope="module")
def recall_run(folder: Path) -> Path:
    return trained(folder, "recall", SMALL | {
        "task.name": "recall", "task.length": 32, "task.recall_pairs": 2, "task.recall_keys": 4,
        "task.recall_values": 4, "task.recall_fillers": 3, "task.recall_test_size": 8}, 10)


def samples(run_folder: Path, *words: Any) -> list[dict[str, Any]]:
    return objects(output("generate", run_folder, "--json", *map(str, words)))


def byte_text(ids: list[int]) -> str:
    return bytes(i - 3 for i in ids if i >= 3).decode(errors="replace")


# ------------------------------------------------------------------------------------- texts

def test_json_tells_all_of_a_sample(text_run: Path) -> None:
    found = samples(text_run, "--prompt", "one two ", "--samples", 3, "--max-tokens", 20)
    assert len(found) == 3
    for one in found:
        assert list(one) == ["prompt", "text", "ids", "log_probability", "stop"]
        assert one["prompt"] == "one two "
        assert one["text"] == byte_text(one["ids"])
        assert one["log_probability"] < 0
        assert one["stop"] == ("stop" if one["ids"][-1] == 2 else "length")
        assert len(one["ids"]) == 20 or one["stop"] == "stop"
    assert found[0]["text"] != found[1]["text"]


def test_the_same_seed_is_the_same_text(text_run: Path) -> None:
    words = ["--prompt", "one", "--max-tokens", 30]
    one = samples(text_run, *words)[0]
    assert samples(text_run, *words)[0] == one
    assert samples(text_run, *words, "--samples", 3)[0]["ids"] == one["ids"]
    assert samples(text_run, *words, "--seed", 2)[0]["ids"] != one["ids"]
    greedy = samples(text_run, *words, "--temperature", 0, "--samples", 2)
    assert greedy[0] == greedy[1]
    assert samples(text_run, *words, "--top-k", 1, "--seed", 5)[0]["ids"] == greedy[0]["ids"]
    assert samples(text_run, *words, "--top-p", 1e-9)[0]["ids"] == greedy[0]["ids"]


@pytest.mark.parametrize("which", ["text_run", "pieces_run"])
def test_a_stream_is_the_text(which: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(which)
    for seed in (1, 2):
        words = ["generate", folder, "--prompt", "the ", "--temperature", "2", "--seed", str(seed)]
        text = output(*words)
        assert output(*words, "--stream") == text
        assert samples(folder, *words[2:])[0]["text"] == text.removesuffix("\n")


def test_a_learned_text_goes_on(text_run: Path) -> None:
    text = output("generate", text_run, "--prompt", "one two ", "--temperature", "0",
                  "--max-tokens", "6")
    assert text == "three \n"


def test_samples_without_json_are_set_apart(text_run: Path) -> None:
    words = ["--prompt", "one ", "--samples", "2", "--max-tokens", "8", "--top-k", "2"]
    first, second = samples(text_run, *words)
    assert output("generate", text_run, *words) == f"{first['text']}\n\n{second['text']}\n"


def test_no_prompt_begins_as_the_data_does(text_run: Path) -> None:
    # Words begin a text there, nothing else does.
    found = samples(text_run, "--max-tokens", 3, "--top-k", 3, "--samples", 8)
    assert all(one["prompt"] == "" for one in found)
    assert sum(one["text"][:1] in "otfs" for one in found) >= 6, found


def test_a_prompt_from_a_file_and_from_standard_input(text_run: Path, tmp_path: Path) -> None:
    words = ["--max-tokens", "10", "--json"]
    expected = output("generate", text_run, "--prompt", "one two", *words)
    file = tmp_path / "prompt.txt"
    file.write_text("one two\n")  # the last line end is the editor's
    assert output("generate", text_run, "--prompt-file", file, *words) == expected
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())  # a byte order mark is no text
    assert output("generate", text_run, "--prompt-file", file, *words) == expected
    done = subprocess.run([PROGRAM, "generate", text_run, "-", *words], input="one two\n",
                          capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", expected)


def test_a_stop_text_ends_before_itself(text_run: Path) -> None:
    words = ["--prompt", "one ", "--temperature", 0, "--max-tokens", 25]
    free = samples(text_run, *words)[0]
    assert "three" in free["text"]
    cut = samples(text_run, *words, "--stop", "nowhere", "--stop", "hre", "--stop", "hree")[0]
    assert cut["text"] == free["text"][:free["text"].index("hree")]
    assert cut["stop"] == "stop"
    assert free["ids"][:len(cut["ids"])] == cut["ids"]
    streamed = output("generate", text_run, *map(str, words), "--stop", "hree", "--stream")
    assert streamed == cut["text"] + "\n"


def test_the_end_of_a_text_can_be_ignored(text_run: Path) -> None:
    words = ["--prompt", "one two", "--temperature", 1.5, "--max-tokens", 60, "--samples", 12]
    plain, on = samples(text_run, *words), samples(text_run, *words, "--ignore-end")
    assert any(one["stop"] == "stop" for one in plain)
    for one, longer in zip(plain, on, strict=True):
        assert longer["stop"] == "length"
        assert longer["ids"][:len(one["ids"])] == one["ids"]


def test_beams(text_run: Path) -> None:
    words = ["--prompt", "one two ", "--max-tokens", 6, "--beams", 4]
    best = samples(text_run, *words, "--samples", 4, "--length-penalty", 0)
    assert len(best) == 4
    chances = [one["log_probability"] for one in best]
    assert chances == sorted(chances, reverse=True)
    greedy = samples(text_run, *words[:4], "--temperature", 0)[0]
    assert best[0]["log_probability"] >= greedy["log_probability"] - 1e-4
    assert samples(text_run, *words)[0]["text"] == "three "


def test_beams_end_before_a_stop(text_run: Path, pieces_run: Path) -> None:
    words = ["--prompt", "one two ", "--max-tokens", 12, "--beams", 4]
    free = samples(text_run, *words)[0]
    assert free["text"].startswith("three four")
    found = samples(text_run, *words, "--stop", "e f", "--samples", 4)
    # Its tokens are those of the text and of the stop.
    assert (found[0]["text"], found[0]["stop"]) == ("thre", "stop")
    assert byte_text(found[0]["ids"]) == "three f"
    assert found[0]["ids"] == free["ids"][:7]
    for one in found:
        assert "e f" not in one["text"]
        assert byte_text(one["ids"]) in (one["text"], one["text"] + "e f")  # the end token is none
    # A text that no stop comes up in is the text without one, also of pieces.
    assert samples(text_run, *words, "--stop", "zzz")[0] == free
    words = ["--prompt", "the", "--max-tokens", 20, "--beams", 3, "--samples", 3]
    free = samples(pieces_run, *words)
    assert samples(pieces_run, *words, "--stop", "zzz") == free
    for one in samples(pieces_run, *words, "--stop", " "):
        assert " " not in one["text"]


def test_bf16_and_a_repetition_penalty_run(text_run: Path) -> None:
    words = ["--prompt", "one two ", "--temperature", 0, "--max-tokens", 6]
    assert samples(text_run, *words, "--precision", "bf16")[0]["text"] == "three "
    # So strong a penalty lets nothing come twice while there is something new.
    ids = samples(text_run, *words, "--repetition-penalty", 1e6)[0]["ids"]
    assert len(set(ids)) == len(ids) and not set(byte_text(ids)) & set("one two ")


def test_text_ends_at_the_capacity(text_run: Path) -> None:
    found = samples(text_run, "--prompt", "one", "--max-tokens", 500, "--ignore-end")[0]
    assert found["stop"] == "length"
    assert len(found["ids"]) == 64 - 4 + 1  # the last token need not be read


def test_an_interrupted_text_is_kept(text_run: Path) -> None:
    # The prompt never ends: what is asked for before the signal is all there is.
    process = subprocess.Popen([PROGRAM, "generate", text_run, "--samples", "3000", "--json",
                                "--ignore-end", "--max-tokens", "60"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None and not catches_sigint(status):
        os.sched_yield()
    process.send_signal(signal.SIGINT)
    text, errors = process.communicate(timeout=120)
    assert errors == ""
    assert process.returncode == 128 + signal.SIGINT
    lines = objects(text)
    assert len(lines) == 3000
    assert {line["stop"] for line in lines} == {"interrupted"}
    assert all(1 <= len(line["ids"]) < 60 for line in lines)


def catches_sigint(status: Path) -> bool:
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return False
    caught = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")]
    return bool(caught and caught[0] >> (signal.SIGINT - 1) & 1)


# ---------------------------------------------------------------- lists, answers, images

def test_a_list_is_sorted_by_its_model(sort_run: Path) -> None:
    found = samples(sort_run, "--prompt", "5 3 1 3")[0]
    assert found["prompt"] == "5 3 1 3"
    assert all(0 <= int(word) < 16 for word in found["text"].split())
    assert output("generate", sort_run, "--prompt", "5 3 1 3") == found["text"] + "\n"
    assert output("generate", sort_run, "--prompt", "5 3 1 3", "--stream") == found["text"] + "\n"
    beams = samples(sort_run, "--prompt", "5 3 1 3", "--beams", 3, "--samples", 3)
    assert len(beams) == 3


def test_an_answer_is_one_token(recall_run: Path) -> None:
    found = samples(recall_run, "--prompt", "k1 v2 f0 f1 k3 v0 f0 f2 k1")[0]
    assert len(found["ids"]) == 1
    assert found["text"][0] in "fkv"


def read_png(path: Path) -> tuple[int, int, list[bytes]]:
    """Rows of an RGB PNG without interlacing."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    position, packed = 8, b""
    while position < len(data):
        size, kind = struct.unpack(">I4s", data[position:position + 8])
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack(">IIBB", data[position + 8:position + 18])
            assert (depth, colour) == (8, 2)
        if kind == b"IDAT":
            packed += data[position + 8:position + 8 + size]
        position += size + 12
    raw, rows, above = zlib.decompress(packed), [], bytes(3 * width)
    for y in range(height):
        kind, line = raw[y * (3 * width + 1)], bytearray(raw[y * (3 * width + 1) + 1:][:3 * width])
        for i, value in enumerate(line):
            left, up = line[i - 3] if i >= 3 else 0, above[i]
            corner = above[i - 3] if i >= 3 else 0
            nearest = min((abs(left + up - corner - v), n) for n, v in enumerate((left, up, corner)))
            guess = (0, left, up, (left + up) // 2, (left, up, corner)[nearest[1]])[kind]
            line[i] = (value + guess) % 256
        rows.append(bytes(line))
        above = rows[-1]
    return width, height, rows


def tile(rows: list[bytes], column: int) -> bytes:
    return b"".join(row[3 * 34 * column:][:96] for row in rows)


def write_png(path: Path, side: int, values: bytes) -> None:
    raw = b"".join(b"\0" + values[i:i + 3 * side] for i in range(0, len(values), 3 * side))
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)),
              (b"IDAT", zlib.compress(raw)), (b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks))


def test_the_upper_half_of_an_image_is_completed(pixels_run: Path, tmp_path: Path) -> None:
    gen = torch.Generator().manual_seed(8)
    values = bytes(torch.randint(0, 256, (IMAGE,), generator=gen).tolist())
    write_png(tmp_path / "one.png", 32, values)
    planes = bytes([3]) + b"".join(values[colour::3] for colour in range(3))
    (tmp_path / "two.bin").write_bytes(bytes(3073) + planes)
    grids = []
    for name, more in (("one.png", []), ("two.bin", ["--image-index", "1"])):
        out = tmp_path / f"{name}.out.png"
        found = objects(output("generate", pixels_run, "--image", tmp_path / name, *more, "--json",
                               "--samples", "2", "--out", out))
        width, height, rows = read_png(out)
        assert (width, height) == (4 * 34 - 2, 32)
        assert tile(rows, 0) == values
        assert tile(rows, 1) == values[:IMAGE // 2] + bytes([128]) * (IMAGE // 2)
        for i, one in enumerate(found):
            assert len(one["ids"]) == IMAGE // 2
            assert tile(rows, 2 + i) == values[:IMAGE // 2] + bytes(v - 3 for v in one["ids"])
        assert found[0]["ids"] != found[1]["ids"]
        grids.append(rows)
    assert grids[0] == grids[1]


def test_images_are_drawn_into_a_grid(pixels_run: Path) -> None:
    assert output("generate", pixels_run, "--samples", "2") == f"{pixels_run / 'generate.png'}\n"
    width, height, rows = read_png(pixels_run / "generate.png")
    assert (width, height) == (2 * 34 - 2, 32)
    assert tile(rows, 0) != tile(rows, 1)


# ------------------------------------------------------------------------------------- refusals

def test_images_that_cannot_be_read(pixels_run: Path, tmp_path: Path) -> None:
    small, broken = tmp_path / "small.png", tmp_path / "broken.png"
    write_png(small, 8, bytes(192))
    broken.write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    assert "8 x 8 pixels; expected 32 x 32" in refusal("generate", pixels_run, "--image", small,
                                                       code=1)
    assert str(broken) in refusal("generate", pixels_run, "--image", broken, code=1)
    assert "missing.png" in refusal("generate", pixels_run, "--image", tmp_path / "missing.png",
                                    code=1)
    images = tmp_path / "images.bin"
    write_images(images, 2, seed=1)
    assert "--image-index is 2" in refusal("generate", pixels_run, "--image", images,
                                           "--image-index", "2")
    nowhere = tmp_path / "nowhere" / "x.png"
    assert "is not a folder" in refusal("generate", pixels_run, "--out", nowhere, code=1)
    assert "an image is made whole" in refusal("generate", pixels_run, "--max-tokens", "5")
    assert "for text" in refusal("generate", pixels_run, "--stream")


def test_lists_that_cannot_be_read(sort_run: Path, recall_run: Path) -> None:
    for words in ((), ("--prompt", "")):
        assert "needs a prompt: numbers to sort" in refusal("generate", sort_run, *words)
    assert "'16'; expected numbers from 0 to 15" in refusal("generate", sort_run, "--prompt",
                                                            "3 16")
    assert refusal("generate", sort_run, "--prompt", "  ") == "the prompt holds nothing to read"
    assert "17 tokens, its end included; this model reads at most 16" in refusal(
        "generate", sort_run, "--prompt", " ".join(["1"] * 16))
    assert "needs a prompt: pairs and a key" in refusal("generate", recall_run)
    assert "'x1'; expected" in refusal("generate", recall_run, "--prompt", "x1")


def test_runs_that_generate_nothing(folder: Path, tmp_path: Path) -> None:
    classifier = trained(folder, "classify", classify_task(folder / "classify-data"), 2)
    assert refusal("generate", classifier, "--prompt", "ab") == (
        f"{classifier}: a classifier generates nothing; see classify")
    leaking = trained(folder, "leaking", text_task(folder / "data") | {"decoder.columns": "full"}, 2)
    assert "columns 'full'" in refusal("generate", leaking, "--prompt", "ab")
    assert "not the folder of a run" in refusal("generate", tmp_path)
    assert run("generate").returncode == 2


def test_an_export_says_what_its_run_says(text_run: Path, pieces_run: Path,
                                          tmp_path: Path) -> None:
    for folder in (text_run, pieces_run):
        out = tmp_path / folder.name
        assert run("export", folder, out, "--checkpoint", "newest").returncode == 0
        words = ["--prompt", "one ", "--max-tokens", 20]
        [ours], [theirs] = samples(out, *words), samples(folder, *words)
        # A mapped file lies elsewhere in memory than a copy: sums may round differently.
        assert ours.pop("log_probability") == pytest.approx(theirs.pop("log_probability"), rel=1e-5)
        assert ours == theirs
