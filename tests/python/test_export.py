"""`sinkhorn export`: one file and its description, which the program reads back; what is refused."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import zlib
from pathlib import Path

import pytest
import torch
from cli_program import PROGRAM, output, refusal
from export_program import HALF, config_of, evaluated, export_runs
from train_program import figures, tensors, text_task, train

import sinkhorn

TASKS = ["sort", "text", "classify"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_runs(tmp_path_factory.mktemp("runs"), *TASKS)


@pytest.fixture
def exported(runs: Path, tmp_path: Path) -> Path:
    """An export to spoil."""
    return Path(shutil.copytree(runs / "classify.float32", tmp_path / "exported"))


@pytest.mark.parametrize("option", ["--train.steps", "--train.device", "--task.name", "--task.length"])
def test_options_that_an_export_would_not_keep_are_not_known(runs: Path, tmp_path: Path,
                                                             option: str) -> None:
    said = refusal("export", runs / "text", tmp_path / "out", option, "4")
    assert said.startswith(f"unknown option {option}")


@pytest.mark.parametrize("task", TASKS)
def test_eval_of_an_export_is_that_of_the_checkpoint(runs: Path, task: str) -> None:
    truth = evaluated(runs / task, "--checkpoint", "newest")
    found = evaluated(runs / f"{task}.float32")
    assert found["checkpoint"] == str(runs / f"{task}.float32" / "model.safetensors")
    for key in ("step", "figures", "rows", "tokens", "data"):
        assert found[key] == truth[key], key


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("dtype", HALF)
def test_half_exports_are_within_rounding(runs: Path, task: str, dtype: str) -> None:
    truth, found = (evaluated(runs / f"{task}.{t}") for t in ("float32", dtype))
    assert found["figures"]["loss"] == pytest.approx(truth["figures"]["loss"], rel=1e-2)
    assert found["figures"]["loss"] != truth["figures"]["loss"]
    # The rounded weights in float32 arithmetic are another, smaller, departure.
    wide = evaluated(runs / f"{task}.{dtype}", "--train.precision", "float32")
    assert wide["figures"]["loss"] == pytest.approx(truth["figures"]["loss"], rel=1e-2)
    assert wide["figures"]["loss"] not in (found["figures"]["loss"], truth["figures"]["loss"])


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("dtype", HALF)
def test_matrices_are_half_and_vectors_are_not(runs: Path, task: str, dtype: str) -> None:
    wide = tensors(runs / f"{task}.float32" / "model.safetensors")
    for name, tensor in tensors(runs / f"{task}.{dtype}" / "model.safetensors").items():
        assert tensor.dtype == (HALF[dtype] if tensor.dim() > 1 else torch.float32), name
        assert torch.equal(tensor, wide[name].to(tensor.dtype)), name


def test_files_and_description(runs: Path) -> None:
    folder = runs / "classify.bf16"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    config = config_of(folder)
    state = tensors(folder / "model.safetensors")
    assert config["format"] == "sinkhorn export 1" and config["dtype"] == "bf16"
    assert config["commit"] and config["version"]
    assert config["parameters"] == sum(tensor.numel() for tensor in state.values())
    assert config["info"]["labels"] == ["no", "yes"] and config["info"]["classes"] == 2
    assert config["info"]["vocab"] == 259 and config["info"]["model"] == "classifier"
    assert config["task"]["tokens"] == "bytes" and config["model"]["max_length"] == 24
    assert config["encoder"]["columns"] == "none" and config["encoder"]["max_blocks"] == 6
    lines = [json.loads(line) for line in (runs / "classify" / "log.jsonl").read_text().splitlines()]
    (valid,) = [line["valid"] for line in lines
                if "valid" in line and line["step"] == config["step"]]
    assert config["figures"]["valid"] == valid
    assert config["step"] == max(line["step"] for line in lines)


def test_last_checkpoint_and_an_export_of_an_export(runs: Path, tmp_path: Path) -> None:
    said = json.loads(output("export", runs / "sort", tmp_path / "last", "--checkpoint", "newest",
                             "--json"))
    assert said["step"] == config_of(tmp_path / "last")["step"] == 60
    assert evaluated(tmp_path / "last")["figures"] == figures(runs / "sort", "test")
    output("export", runs / "sort.float32", tmp_path / "again", "--dtype", "bf16")
    first, second = (folder / "model.safetensors" for folder in (runs / "sort.bf16",
                                                                 tmp_path / "again"))
    assert first.read_bytes() == second.read_bytes()
    assert config_of(tmp_path / "again") == config_of(runs / "sort.bf16")


def test_the_wide_export_of_a_half_one_computes_wide(runs: Path, tmp_path: Path) -> None:
    assert config_of(runs / "sort.bf16")["train"]["precision"] == "bf16"
    output("export", runs / "sort.bf16", tmp_path / "wide")
    config = config_of(tmp_path / "wide")
    assert config["dtype"] == config["train"]["precision"] == "float32"
    wide = evaluated(runs / "sort.bf16", "--train.precision", "float32")
    assert evaluated(tmp_path / "wide")["figures"] == wide["figures"]


def test_an_export_needs_no_data_to_read_a_text(runs: Path, tmp_path: Path) -> None:
    words = ("--json", "--text", "three four five", "--out", tmp_path / "pictures")
    truth = json.loads(output("inspect", runs / "text", "--checkpoint", "newest", *words))
    moved = Path(shutil.copytree(runs / "text.float32", tmp_path / "moved"))
    config = config_of(moved)
    config["task"]["data"] = str(tmp_path / "gone")
    (moved / "config.json").write_text(json.dumps(config))
    found = json.loads(output("inspect", moved, *words))
    assert found["sorts"] == truth["sorts"] and found["input"] == truth["input"]
    assert "gone" in refusal("eval", moved, code=1)


def test_pieces_take_their_tokenizer_along(tmp_path: Path) -> None:
    settings = text_task(tmp_path / "data", **{"task.tokens": "pieces", "task.vocab": 300,
                                               "train.steps": 2})
    train(tmp_path / "run", settings)
    output("export", tmp_path / "run", tmp_path / "out")
    tokenizer = tmp_path / "out" / "tokenizer.model"
    assert tokenizer.read_bytes() == (tmp_path / "run" / "tokenizer.model").read_bytes()
    shutil.rmtree(tmp_path / "data" / "cache")
    assert evaluated(tmp_path / "out")["figures"] == figures(tmp_path / "run", "test")
    flipped(tokenizer)
    check_refused(tmp_path / "out", f"{tokenizer}: ", "CRC-32")
    unchecked = Path(shutil.copytree(tmp_path / "out", tmp_path / "unchecked"))
    spoil(unchecked, "crc32", None)
    for folder in (tmp_path / "out", unchecked):
        (folder / "tokenizer.model").unlink()
        said = refusal("eval", folder, code=1)
        assert said == f"{folder / 'tokenizer.model'}: is missing; copy the export again"
    with pytest.raises(ValueError, match="tokenizer.model: missing"):
        sinkhorn.load_export(tmp_path / "out")
    assert sinkhorn.load_export(unchecked).state  # Python has no use for it


# ---- What is refused


def flipped(path: Path, place: int = -1) -> Path:
    """The file with one bit of a byte another; where that lies from the end of the file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    return path


def check_refused(folder: Path, *says: str) -> None:
    """By every reader, with all of this in its one line."""
    for words in (["eval", folder], ["inspect", folder, "--text", "x"], ["export", folder, "/none"]):
        said = refusal(*words, code=1)
        assert all(part in said for part in says), said
    for read in (sinkhorn.load_export, sinkhorn.load_model):
        with pytest.raises(ValueError) as refused:
            read(folder)
        assert all(part in str(refused.value) for part in says), refused.value


@pytest.mark.parametrize("place", [-1, -5000, 20])
def test_a_flipped_bit_is_refused(exported: Path, place: int) -> None:
    path = flipped(exported / "model.safetensors", place)
    check_refused(exported, f"{path}: ", "CRC-32", config_of(exported)["crc32"][path.name])


def test_the_check_can_be_left_out(exported: Path) -> None:
    path = flipped(exported / "model.safetensors")
    sinkhorn.load_model(exported, verify=False)
    assert sinkhorn.load_export(exported, verify=False).state
    spoil(exported, "crc32", None)  # as older exports are
    sinkhorn.load_model(exported)
    output("eval", exported)
    for crc32 in ({}, 3):
        spoil(exported, "crc32", crc32)
        check_refused(exported, f"{exported / 'config.json'}: crc32 ", path.name)


@pytest.mark.parametrize(("key", "value", "says"), [
    ("info.vocab", 400, "info.vocab is 400, but embedding.weight of model.safetensors has 259 rows"),
    ("info.classes", 3, "info.classes is 3, but output.weight of model.safetensors has 2 rows"),
    ("info.max_length", 12, "info.max_length is 12, but task.length is 24"),
    ("model.max_length", 16, "info.max_length is 24, but model.max_length is 16"),
    ("dtype", "bf16", "dtype is bf16, but embedding.weight of model.safetensors has type"),
    ("dtype", "int4", "dtype is missing or not one of float32, bf16, fp16"),
    ("dtype", None, "dtype is missing or not one of float32, bf16, fp16"),
])
def test_a_description_of_another_model_is_refused(exported: Path, key: str, value: object,
                                                   says: str) -> None:
    check_refused(spoil(exported, key, value), f"{exported / 'config.json'}: {says}")


def export_refusal(*words: str | Path, code: int = 2) -> str:
    return refusal("export", *words, code=code)


def test_what_is_no_run(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "empty").mkdir()
    assert export_refusal(tmp_path / "empty", out).startswith(
        f"{tmp_path / 'empty'}: not the folder of a run")
    assert export_refusal(tmp_path / "none", out).startswith(f"{tmp_path / 'none'}: not the folder")
    half = tmp_path / "half"  # begun, and nothing saved yet
    half.mkdir()
    shutil.copy(runs / "sort" / "config.ini", half)
    assert export_refusal(half, out, code=1) == f"{half}: has no newest checkpoint yet"
    assert export_refusal(half, out, "--checkpoint", "best",
                          code=1) == f"{half}: has no best checkpoint yet"
    assert not out.exists()


def test_words_that_are_unknown(runs: Path, tmp_path: Path) -> None:
    assert export_refusal(runs / "sort", tmp_path / "out", "--dtype", "int8") == \
        '--dtype: "int8" is not one of float32, bf16, fp16'
    assert export_refusal(runs / "sort", tmp_path / "out", "--checkpoint", "worst") == \
        '--checkpoint: "worst" is not one of newest, best'
    assert not (tmp_path / "out").exists()


def test_where_nothing_can_be_written(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in export_refusal(runs / "sort", tmp_path / "file")
    assert export_refusal(runs / "sort", tmp_path / "file" / "out", code=1).startswith(
        f"{tmp_path / 'file' / 'out'}: cannot make the folder: ")
    assert export_refusal(runs / "sort", "/proc/nowhere/out", code=1).startswith(
        "/proc/nowhere/out: cannot make the folder: ")


def test_other_things_are_not_overwritten(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    output("export", runs / "sort", out)  # an empty folder will do
    output("export", runs / "sort", out, "--dtype", "bf16")  # and so will an export
    assert config_of(out)["dtype"] == "bf16"
    (out / "notes.txt").write_text("mine")
    assert "--force" in export_refusal(runs / "sort", out)
    output("export", runs / "sort", out, "--force")
    assert config_of(out)["dtype"] == "float32"
    assert (out / "notes.txt").read_text() == "mine"
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"architectures": ["Other"]}')
    assert "--force" in export_refusal(runs / "sort", foreign)
    assert export_refusal(runs / "sort", runs / "text", "--force") == \
        f"{runs / 'text'}: holds a run; name another folder for the export"


def test_a_full_disk(runs: Path, tmp_path: Path) -> None:
    """Files end at 16 KiB: nothing is left behind, and an export that was there stays."""
    def fill_up() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, 16 << 10))

    def attempt(out: Path) -> None:
        done = subprocess.run([PROGRAM, "export", runs / "sort", out], capture_output=True,
                              text=True, preexec_fn=fill_up, check=False)
        assert done.returncode == 1
        assert "cannot write: File too large" in done.stderr and str(out) in done.stderr

    attempt(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    old = Path(shutil.copytree(runs / "sort.bf16", tmp_path / "old"))
    attempt(old)
    for name in ("config.json", "model.safetensors"):
        assert (old / name).read_bytes() == (runs / "sort.bf16" / name).read_bytes()
    assert len(list(old.iterdir())) == 2


def test_a_half_written_export_is_refused(exported: Path) -> None:
    (exported / "config.json").unlink()
    assert refusal("eval", exported).startswith(f"{exported}: not the folder of a run")
    with pytest.raises(ValueError, match="expected config.json"):
        sinkhorn.load_export(exported)


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_truncated_model_is_refused(exported: Path, size: int) -> None:
    path = exported / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert refusal("eval", exported, code=1).startswith(f"{path}: ")
    with pytest.raises(ValueError, match="model.safetensors"):
        sinkhorn.load_export(exported)


def test_the_model_of_another_export_is_refused(runs: Path, exported: Path) -> None:
    path = exported / "model.safetensors"
    shutil.copy(runs / "sort.float32" / "model.safetensors", path)
    assert refusal("eval", exported, code=1).startswith(f"{path}: ")
    shutil.copy(next((runs / "classify" / "checkpoints").glob("step-*")), path)
    assert refusal("eval", exported, code=1).startswith(f"{path}: is damaged or of another export")
    path.write_bytes(b"\x02" + bytes(7) + b"{}")
    spoil(exported, "crc32.model.safetensors", f"{zlib.crc32(path.read_bytes()):08x}")
    assert refusal("eval", exported, code=1).startswith(f"{path}: has no 'format'")


SPOILED = {
    "not json": lambda config: "{",
    "a list": lambda config: "[]",
    "foreign": lambda config: '{"model_type": "llama"}',
    "another version": lambda config: json.dumps(config | {"format": "sinkhorn export 99"}),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_foreign_description_is_refused(exported: Path, how: str) -> None:
    path = exported / "config.json"
    path.write_text(SPOILED[how](config_of(exported)))
    assert refusal("eval", exported).startswith(f"{path}: ")
    with pytest.raises(ValueError, match="config.json"):
        sinkhorn.load_export(exported)


@pytest.mark.parametrize(("key", "value", "says"), [
    ("model.layers", None, "model.layers is missing"),
    ("encoder", None, "encoder is missing"),
    ("encoder", 3, "encoder is missing or not an object"),
    ("encoder.kind", "telepathy", 'encoder.kind: "telepathy" is not one of'),
    ("model.layers", "two", 'model.layers: "two" is not a whole number'),
    ("model.layers", -2, "model.layers: -2 is out of range"),
    ("model.width", [32], "model.width: found array"),
    ("model.colour", "red", "model.colour: unknown"),
    ("task.name", "chess", 'task.name: "chess" is not one of'),
])
def test_a_spoiled_configuration_is_refused(exported: Path, key: str, value: object,
                                            says: str) -> None:
    assert says in refusal("eval", spoil(exported, key, value))


@pytest.mark.parametrize(("key", "value"), [
    ("info", None), ("info.vocab", None), ("info.vocab", -3), ("info.vocab", "many"),
    ("info.vocab", 1 << 40), ("info.labels", "no"), ("info.model", "oracle"), ("info.metric", 3)])
def test_a_spoiled_task_is_refused(exported: Path, key: str, value: object) -> None:
    assert "config.json: info" in refusal("eval", spoil(exported, key, value), code=1)


def test_sizes_that_do_not_fit_the_file_are_refused(exported: Path) -> None:
    assert "model.safetensors: " in refusal("eval", spoil(exported, "model.layers", 3), code=1)


def spoil(folder: Path, key: str, value: object) -> Path:
    """Sets a key of config.json, or takes it out where the value is None."""
    config = config_of(folder)
    section, dot, name = key.partition(".")
    place, name = (config[section], name) if dot else (config, section)
    if value is None:
        del place[name]
    else:
        place[name] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder
