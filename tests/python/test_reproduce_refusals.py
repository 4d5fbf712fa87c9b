"""`sinkhorn reproduce`: what cannot be meant is refused at once, in one line."""

from __future__ import annotations

from pathlib import Path

from cli_program import CONFIGS, refusal


def test_commands_that_cannot_be_meant(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path), "--configs", str(CONFIGS)]
    said = refusal("reproduce", "tabel1", *out)
    assert said.startswith('"tabel1" is not one of ') and said.endswith("did you mean table1?")
    assert "table1 has no row" in refusal("reproduce", "table1", "--rows", "sinkhorn", *out)
    assert ('study has no variant "colours"; it has recall, characters, reviews, documents, films, '
            "pixels or sort"
            in refusal("reproduce", "study", "--variants", "colours", *out))
    assert refusal("reproduce", "study", "--variants", "recall", "--tune", *out) == (
        "--tune: the rows of study differ by temperature or iterations, which tuning would make one")
    assert refusal("reproduce", "table1", "--scale", "tiny", *out) == (
        '--scale: "tiny" is not one of smoke, small, full')
    assert refusal("reproduce", "table1", "--preset", "x", *out) == (
        '--preset: "x" is not one of default, paper')
    assert refusal("reproduce", "table4", "--data", str(tmp_path), *out) == (
        f"{tmp_path}: table4 needs 1-billion-word-language-modeling-benchmark-r13output (published "
        "at https://www.statmt.org/lm-benchmark/); give the folder that holds it with --data DIR")
    assert "aclImdb (published at" in refusal("reproduce", "table6", "--data", str(tmp_path), *out)
    assert "holds no table" in refusal("reproduce", "table1", "--configs", str(tmp_path))


def test_a_device_that_is_none_is_refused_at_once(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out"), "--configs", str(CONFIGS)]
    for name, device in (("table1", "banana"), ("table3", "cudax"), ("memory", "cuda:"),
                         ("table1", "cuda:1x")):
        assert refusal("reproduce", name, "--device", device, *out) == (
            f"--device '{device}'; expected auto, cpu, cuda or cuda:N")
    assert "CUDA device" in refusal("reproduce", "table1", "--device", "cuda:99", *out, code=1)
    assert list(tmp_path.iterdir()) == []


def test_options_that_only_a_training_heeds(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out"), "--configs", str(CONFIGS)]
    for name, *option in (("memory", "--rows", "x"), ("memory", "--variants", "x"),
                          ("memory", "--seeds", "2"), ("memory", "--tune"), ("table3", "--tune")):
        assert refusal("reproduce", name, *option, *out) == (
            f"{option[0]}: {name} trains nothing that it could apply to; leave it out")
    assert list(tmp_path.iterdir()) == []


def test_an_out_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    configs = ["--configs", str(CONFIGS), "--device", "cpu"]
    for name in ("table1", "table3", "memory"):
        assert refusal("reproduce", name, "--out", str(file), *configs) == (
            f"--out: {file} is a file; name a folder")
        assert refusal("reproduce", name, "--out", "/proc/nowhere", *configs, code=1) == (
            "--out: /proc/nowhere cannot be written: No such file or directory; name another folder")
    assert refusal("reproduce", "table1", "--out", str(file / "in" / "it"), *configs) == (
        f"--out: {file} is a file; name a folder")


def test_a_probe_of_nothing(tmp_path: Path) -> None:
    for probe in ("sinkhorn:0:0", "sinkhorn:8:0", "sinkhorn:-1:4", "sinkhorn:8x:4", "sinkhorn:8"):
        assert refusal("reproduce", "memory", "--probe", probe) == (
            f'--probe: "{probe}" is not KIND:LENGTH:BLOCK, numbers at least 1')
    assert "is not one of scores, fused" in refusal("reproduce", "memory", "--device", "cpu",
                                                    "--probe", "banana:8:4")
