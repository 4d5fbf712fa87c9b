"""`sinkhorn train --dry-run`: where a value comes from, and what is said about a wrong one."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest
from cli_program import CONFIGS, output, refusal

SORT = CONFIGS / "examples" / "sort.ini"


def resolved(*words: str | Path) -> configparser.ConfigParser:
    """The resolved configuration, read by a parser that is not ours."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(output("train", *words, "--dry-run"))
    return parser


def write(folder: Path, text: str) -> Path:
    path = folder / "x.ini"
    path.write_text(text)
    return path


def test_command_line_over_file_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "[train]\nsteps = 7\nbatch = 5\n")
    config = resolved(path, "--train.steps", "9")
    assert config["train"]["steps"] == "9"
    assert config["train"]["batch"] == "5"
    assert config["train"]["accumulate"] == "1"


def test_both_spellings_and_the_last_word(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    config = resolved("--train.steps=3", path, "--optimizer.rate", "2e-4", "--train.steps=4")
    assert config["train"]["steps"] == "4"
    assert float(config["optimizer"]["rate"]) == 2e-4


def test_the_order_of_keys_does_not_matter(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    keys = ["--attention.block=8", "--encoder.block=4", "--attention.preset=paper",
            "--model.size=base", "--model.layers=2"]
    expected = output("train", path, *keys, "--dry-run")
    assert output("train", "--dry-run", *reversed(keys), path) == expected
    config = resolved(path, *keys)
    assert config["encoder"]["block"] == "4"
    assert config["decoder"]["block"] == "8"
    assert config["decoder"]["combine"] == '"logits"'
    assert config["model"]["layers"] == "2"
    assert config["model"]["width"] == "512"
    assert config["optimizer"]["name"] == '"adam"'


# One of each folder; tests/cli reads all of them.
@pytest.mark.parametrize("path", {path.parent: path for path in sorted(CONFIGS.rglob("*.ini"))}.values(),
                         ids=lambda path: path.parent.name)
def test_the_resolved_configuration_reads_back(path: Path, tmp_path: Path) -> None:
    first = output("train", path, "--dry-run")
    again = write(tmp_path, first)
    assert output("train", again, "--dry-run") == first


def test_unknown_keys_suggest_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path, "[attention]\nblok = 3\n")
    assert (refusal("train", path)
            == f"{path}:2: unknown key attention.blok; did you mean attention.block?")
    assert (refusal("train", SORT, "--attention.blok", "3")
            == "unknown option --attention.blok; did you mean --attention.block?")
    assert (refusal("train", SORT, "--atention.block=3")
            == "unknown option --atention.block; did you mean --attention.block?")


def test_wrong_values(tmp_path: Path) -> None:
    path = write(tmp_path, "[train]\nsteps = many\n")
    assert refusal("train", path) == f'{path}:2: train.steps: "many" is not a whole number'
    assert (refusal("train", SORT, "--train.steps", "many")
            == 'train.steps: "many" is not a whole number')
    assert (refusal("train", SORT, "--train.steps", "-3")
            == "train.steps: -3 is out of range; expected at least 0")
    assert (refusal("train", SORT, "--optimizer.name", "sgd")
            == 'optimizer.name: "sgd" is not one of adamw, adam, adafactor')


def test_absurd_sizes_are_refused_at_once() -> None:
    for key, value, expected in (("model.layers", 10**6, "1 to 1000"),
                                 ("train.batch", 10**11, "1 to 1048576"),
                                 ("train.accumulate", 2**62, "1 to 1048576"),
                                 ("train.batch_tokens", 2**62, "0 to 1073741824"),
                                 ("model.width", 2**62, "1 to 1048576"),
                                 ("model.max_length", 2**62, "0 to 1073741824"),
                                 ("optimizer.rate", 1e300, "more than 0, at most 1e30"),
                                 ("train.threads", 10**5, "0 to 1024")):
        assert (refusal("train", SORT, f"--{key}", str(value))
                == f"{key}: {value} is out of range; expected {expected}")


def test_values_that_do_not_go_together(tmp_path: Path) -> None:
    assert "sortcut" in refusal("train", SORT, "--attention.kind", "sortcut")
    assert "evenly" in refusal("train", SORT, "--model.heads", "5")
    path = write(tmp_path, "[model]\nlayers = 3\nheads = 5\n")
    assert refusal("train", path) == (
        f"{path}:3: model.heads: 5 heads do not share model.width 128 evenly")
    assert refusal("train", write(tmp_path, "[attention]\nkind = sortcut\n")).startswith(
        f"{path}:2: attention.kind: sortcut cannot be used in a decoder: ")


def test_names_of_other_programs(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    for name, answer in (
            ("epochs", "; training is counted in steps: train.steps"),
            ("min_lr", "; optimizer.final_rate is a share of the peak rate"),
            ("nproc-per-node", "; a run is one process on one device: train.device"),
            ("optimizer", "; did you mean --optimizer.name?"),
            ("attention", "; did you mean --attention.kind?")):
        assert refusal("train", path, f"--{name}", "3") == f"unknown option --{name}{answer}"
    assert refusal("generate", tmp_path, "--epochs", "3") == "unknown option --epochs"


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"[task]\nname = \xff\0\n")
    assert refusal("train", path) == f"{path}: is no text; expected a configuration file"


def test_a_mark_of_utf8_before_the_first_section(tmp_path: Path) -> None:
    path = tmp_path / "marked.ini"
    path.write_bytes(b"\xef\xbb\xbf[model]\nlayers = 3\n")
    assert resolved(path)["model"]["layers"] == "3"


def test_data_in_place_of_a_configuration(tmp_path: Path) -> None:
    for text in ("Once upon a time, there was\na text.\n", "Once\tupon\n"):
        path = write(tmp_path, text)
        assert refusal("train", path) == (
            f'{path}:1: the line that begins with "Once" is no key = value; expected a configuration '
            "file, whose task.data names the data")


def test_lines_that_say_nothing(tmp_path: Path) -> None:
    for line in ("x", "a. " * 260, "model", "= 3"):
        said = refusal("train", write(tmp_path, f"[train]\nsteps = 3\n{line}\n"))
        assert "is no key = value; expected a configuration file" in said, said
    assert resolved(write(tmp_path, "# a\n\n ; b\n[train]\nsteps = 3  # c\n"))["train"]["steps"] == "3"


def test_a_value_is_never_cut(tmp_path: Path) -> None:
    for value in ('"/tmp/a b#c"', '"/tmp/a #b"', "/tmp/a#b"):
        path = write(tmp_path, f'[task]\nname = "text"\ndata = {value}\n')
        assert refusal("train", path) == (
            f"{path}:3: data: the value holds a #, which configurations cannot; a comment stands behind "
            "a space")
    for value, expected in (('"/tmp/a b"  # c "d"', "/tmp/a b"), ("it's  # no quote", "it's")):
        path = write(tmp_path, f'[task]\nname = "text"\ndata = {value}\n')
        assert resolved(path)["task"]["data"] == f'"{expected}"'


def test_keys_that_would_change_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    for task, key, why in (("text", "encoder.kind=full", "which has no encoder"),
                           ("classify", "decoder.block=8", "which has no decoder"),
                           ("text", "task.sort_symbols=8", "which is not sort"),
                           ("sort", "task.recall_pairs=8", "which is not recall"),
                           ("sort", "task.tokens=bytes", "which makes its data")):
        data = [] if task == "sort" else ["--task.data", tmp_path]
        assert refusal("train", path, "--task.name", task, *data, f"--{key}") == (
            f"--{key.split('=')[0]} changes nothing of the task {task}, {why}")
    shared = write(tmp_path, '[encoder]\nkind = "full"\n')  # files are
    assert resolved(shared, "--task.name=text", "--task.data", tmp_path)["encoder"]["kind"] == '"full"'


SORTING, ANY_NET = "sinkhorn, mixture or sortcut", "linear, linear_relu, mlp or mlp_relu"
LOCAL = "sinkhorn, mixture or window"
# Of the task sort, which has both stacks, the keys and what is said of the first.
IDLE = [
    (["attention.window=3", "attention.kind=full"], f"attention.kind is full, not {LOCAL}"),
    (["attention.window=2", "attention.kind=local"], f"attention.kind is local, not {LOCAL}"),
    (["attention.window=2", "encoder.kind=full", "decoder.kind=local"],
     f"encoder.kind is full, not {LOCAL}; decoder.kind is local, not {LOCAL}"),
    (["encoder.window=2", "encoder.kind=full"], f"encoder.kind is full, not {LOCAL}"),
    (["attention.window=0", "attention.kind=window"],
     "attention.kind is window, whose window is at least 1"),
    (["attention.max_blocks=3"], f"attention.sort_net is bilinear, not {ANY_NET}"),
    (["attention.max_blocks=3", "encoder.kind=full"],
     f"encoder.kind is full, not {SORTING}; decoder.sort_net is bilinear, not {ANY_NET}"),
    (["encoder.causal=strict"], "only decoders have a causal rule"),
    *((["attention." + key], "attention.kind is sinkhorn, not " + kind)
      for key, kind in (("budget=7", "sortcut"), ("stride=8", "sparse"), ("summary=4", "sparse"),
                        ("merged=on", "sparse"))),
    *((["optimizer." + key, "optimizer.name=adafactor"],
       "optimizer.name is adafactor, not adamw or adam")
      for key in ("beta1=0.8", "beta2=0.9", "epsilon=1e-8")),
    (["optimizer.beta1=0.8", "model.size=lm_base"], "optimizer.name is adafactor, not adamw or adam"),
    (["optimizer.weight_decay=0.1", "optimizer.name=adam"], "optimizer.name is adam, not adamw"),
    *((["optimizer.final_rate=0.1", "optimizer.schedule=" + schedule],
       f"optimizer.schedule is {schedule}, not linear or cosine")
      for schedule in ("constant", "noam", "rsqrt")),
]


@pytest.mark.parametrize(("keys", "why"), IDLE, ids=[keys[0] for keys, _ in IDLE])
def test_keys_that_nothing_would_look_at(keys: list[str], why: str, tmp_path: Path) -> None:
    words = [f"--{key}" for key in keys]
    key = words[0].split("=")[0]
    assert refusal("train", write(tmp_path, ""), *words) == f"{key} changes nothing: {why}"


def test_files_may_state_what_nothing_looks_at(tmp_path: Path) -> None:
    """They are shared by tasks, kinds and optimizers."""
    path = write(tmp_path, "[attention]\nkind = full\nwindow = 3\nstride = 8\npreset = windowed\n"
                           "[encoder]\ncausal = strict\n[optimizer]\nname = adafactor\nbeta1 = 0.8\n")
    assert resolved(path)["decoder"]["window"] == "3"
    assert resolved(path, "--attention.kind=sinkhorn")["encoder"]["window"] == "3"


@pytest.mark.parametrize("keys", [
    ["attention.window=3", "encoder.kind=full"],  # one stack looks at it
    ["attention.window=0", "encoder.kind=window"],
    ["attention.window=2", "attention.kind=window"],
    ["attention.window=2", "attention.kind=mixture"],
    ["attention.block=8", "attention.kind=local"],
    # Whoever compares kinds gives the same to all.
    ["attention.block=8", "attention.sort_net=mlp", "attention.gumbel=on", "attention.kind=full"],
    ["attention.preset=prefix", "attention.iterations=2", "attention.kind=window"],
    ["attention.max_blocks=99", "decoder.sort_net=mlp"],
    ["attention.sort_net=linear", "encoder.kind=sortcut", "decoder.kind=full"],
    ["encoder.budget=3", "encoder.kind=sortcut"],
    ["attention.budget=3", "encoder.kind=sortcut"],
    ["attention.stride=16", "attention.summary=4", "attention.merged=on", "attention.kind=sparse"],
    ["attention.causal=inclusive", "attention.window=0", "encoder.kind=full"],
    ["attention.tie_kv=on", "attention.kind=full"],
    ["attention.preset=paper", "encoder.kind=sortcut", "decoder.kind=full"],
    ["optimizer.beta1=0.8", "optimizer.beta2=0.9", "optimizer.epsilon=1e-8", "optimizer.name=adam"],
    ["optimizer.weight_decay=0"],
    ["optimizer.final_rate=0", "optimizer.schedule=linear"],
    ["optimizer.warmup=3", "optimizer.rate=0.5", "optimizer.clip=1", "optimizer.schedule=rsqrt",
     "optimizer.name=adafactor"],
], ids=lambda keys: keys[0])
def test_keys_that_something_looks_at(keys: list[str], tmp_path: Path) -> None:
    resolved(write(tmp_path, ""), *(f"--{key}" for key in keys))


def test_the_stacks_of_the_task_decide(tmp_path: Path) -> None:
    path, data = write(tmp_path, ""), ["--task.data", tmp_path]
    classify, text = (["--task.name", name, *data] for name in ("classify", "text"))
    resolved(path, *classify, "--attention.kind=sortcut", "--attention.budget=3", "--attention.block=8")
    assert refusal("train", path, *classify, "--attention.causal=strict") == (
        "--attention.causal changes nothing: only decoders have a causal rule")
    assert refusal("train", path, *classify, "--attention.window=1", "--attention.kind=sortcut") == (
        f"--attention.window changes nothing: attention.kind is sortcut, not {LOCAL}")
    encoder = write(tmp_path, "[encoder]\nkind = sparse\n")  # which a language model has not
    assert refusal("train", encoder, *text, "--attention.stride=8") == (
        "--attention.stride changes nothing: attention.kind is sinkhorn, not sparse")


# As docs, README.md and tools/demo write them.
@pytest.mark.parametrize("words", [
    ["study/recall.task.ini", "--attention.kind", "window", "--attention.window", "2"],
    ["study/recall.task.ini", "--attention.kind", "full"],
    *(["demo/sort.ini", "--attention.kind", kind] for kind in ("sinkhorn", "local", "full")),
    ["demo/sort.ini", "--attention.kind", "window", "--attention.window", "2"],
], ids=" ".join)
def test_commands_of_the_manual(words: list[str]) -> None:
    resolved(CONFIGS / words[0], *words[1:])


def test_a_key_without_its_value(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    assert refusal("train", path, "--train.greedy", "--train.run", "runs/q") == (
        "--train.greedy: expected a value, found --train.run")


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "none.ini"
    assert refusal("train", path) == f"{path}: cannot be read; expected a configuration file"
    assert refusal("train", tmp_path) == (
        f"{tmp_path}: is not the folder of a run; expected that, or a configuration file")
    assert refusal("train") == "CONFIG is required"
