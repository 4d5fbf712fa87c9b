"""An export in Python: mapped, and computing what the program computes."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cli_program import output
from export_program import HALF, config_of, evaluated, export_runs
from torch import Tensor
from train_program import SMALL, Settings, sort_task, tensors, train

import sinkhorn
from sinkhorn.models import SinkhornAttention


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_runs(tmp_path_factory.mktemp("runs"), "sort", "text", "classify")


def program_loss(folder: Path, *words: str) -> float:
    return evaluated(folder, *words)["figures"]["loss"]


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(ids.shape[1]) < lengths[:, None]


@pytest.mark.parametrize("dtype", ["float32", *HALF])
def test_a_classifier_in_python(runs: Path, dtype: str) -> None:
    folder = runs / f"classify.{dtype}"
    model = sinkhorn.load_model(folder)
    lines = [line.split("\t") for line in
             (runs / "classify_data" / "test.tsv").read_text().splitlines()]
    labels = torch.tensor([model.config["info"]["labels"].index(label) for label, _ in lines])
    ids, mask = padded([[byte + 3 for byte in text.encode()] + [2] for _, text in lines])
    loss = F.cross_entropy(model(ids, mask).float(), labels).item()
    assert loss == pytest.approx(program_loss(folder), rel=1e-5 if dtype == "float32" else 3e-3)


KINDS: dict[str, Settings] = {
    "default": {}, "inclusive": {"decoder.causal": "inclusive", "attention.window": 0},
    "strict": {"attention.window": 0, "attention.sort_net": "linear", "attention.pooling": "mean"},
    "paper": {"attention.preset": "paper"}, "windowed": {"attention.preset": "windowed"},
    "mixture": {"attention.kind": "mixture", "attention.sort_net": "mlp_relu"},
    "sparse": {"attention.kind": "sparse"}, "merged": {"attention.kind": "sparse",
                                                       "attention.merged": "on"},
    "window": {"attention.kind": "window"}, "full": {"attention.kind": "full"},
    "untied": {"model.tied": "off", "attention.tie_kv": "on", "attention.combine": "outputs"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_language_model_in_python(tmp_path: Path, kind: str) -> None:
    """Every way to attend, in two layers that were trained a little."""
    data = tmp_path / "data"
    data.mkdir()
    line = "A text of one line, which is all there is to it: 0123456789, the quick brown fox.\n"
    for name in ("train", "valid"):
        (data / f"{name}.txt").write_text(line)
    length = 24
    settings = SMALL | {"task.name": "text", "task.data": data, "task.tokens": "bytes",
                        "task.cache": tmp_path / "cache", "task.length": length,
                        "model.layers": 2, "train.steps": 5} | KINDS[kind]
    train(tmp_path / "run", settings)
    output("export", tmp_path / "run", tmp_path / "out", "--checkpoint", "newest")
    model = sinkhorn.load_model(tmp_path / "out")
    tokens = [1] + [byte + 3 for byte in line.encode()] + [2]
    rows = [tokens[i:i + length + 1] for i in range(0, len(tokens) - 1, length)]
    ids, mask = padded([row[:-1] for row in rows])
    targets, _ = padded([row[1:] for row in rows])
    loss = F.cross_entropy(model(ids, mask).flatten(0, 1), targets.flatten(), ignore_index=0)
    assert loss.item() == pytest.approx(program_loss(tmp_path / "out"), rel=1e-5)


@pytest.mark.parametrize("decoder", [False, True])
def test_one_sparse_head_is_block_local(decoder: bool) -> None:
    """Of pads, too, the module says what the operators say."""
    shared = {"tie_kv": False, "causal": "strict", "combine": "concat", "window": 0, "merged": False}
    local = SinkhornAttention(shared | {"kind": "local", "block": 4}, 8, 1, decoder)
    for parameter in local.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.shape[0]))
    sparse = SinkhornAttention(shared | {"kind": "sparse", "stride": 4, "summary": 2}, 8, 1, decoder)
    sparse.load_state_dict(local.state_dict())
    x = torch.randn(2, 11, 8, generator=torch.Generator().manual_seed(2))
    mask = torch.arange(11) < torch.tensor([[11], [5]])
    assert torch.equal(sparse(x, mask), local(x, mask))


def test_a_sequence_model_in_python(tmp_path: Path) -> None:
    # One symbol and lists of one: the test split is the same list over and over.
    train(tmp_path / "run", sort_task(**{"task.sort_symbols": 1, "task.sort_test_max": 1,
                                         "model.layers": 2, "train.steps": 3}))
    output("export", tmp_path / "run", tmp_path / "out", "--checkpoint", "newest")
    model = sinkhorn.load_model(tmp_path / "out")
    ids = torch.tensor([[3, 2]])
    loss = F.cross_entropy(model(ids, ids)[0], ids[0]).item()
    assert loss == pytest.approx(program_loss(tmp_path / "out"), rel=1e-5)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def example(kind: str, length: int) -> tuple[Tensor, ...]:
    """Arguments of a model: ids of tokens that all of them know, and what else it reads."""
    gen = torch.Generator().manual_seed(length)
    ids = torch.randint(3, 19, (2, length), generator=gen)
    mask = torch.arange(length) < torch.tensor([[length], [length - 5]])
    return {"sort": (ids, ids.sort(1).values, mask), "text": (ids,), "classify": (ids, mask)}[kind]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("kind", "dtype", "backend"), [
    ("text", "float32", "inductor"), ("text", "bf16", "aot_eager"), ("text", "fp16", "aot_eager"),
    ("sort", "float32", "aot_eager"), ("classify", "float32", "aot_eager")])
def test_a_compiled_model_says_the_same(runs: Path, kind: str, dtype: str, backend: str) -> None:
    model = sinkhorn.load_model(runs / f"{kind}.{dtype}")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    # The second time for any length. (What inductor compiles takes long.)
    for length in (16,) if backend == "inductor" else (16, 13):
        inputs = example(kind, length)
        expected = model(*inputs)
        found = compiled(*inputs)
        assert found.dtype == expected.dtype
        if backend == "inductor":  # which orders sums in its own way
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(found, expected)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_model_can_be_captured_whole(runs: Path) -> None:
    model, inputs = sinkhorn.load_model(runs / "text.float32"), example("text", 16)
    captured = torch.export.export(model, inputs).module()
    torch.testing.assert_close(captured(*inputs), model(*inputs))


def test_a_model_keeps_the_names_of_its_file(runs: Path) -> None:
    export = sinkhorn.load_export(runs / "sort.float32")
    model = sinkhorn.load_model(export)
    state = model.state_dict()
    assert state.keys() == export.state.keys()
    assert "decoder.0.ff.in.weight" in state
    for name, tensor in state.items():
        assert torch.equal(tensor, export.state[name]), name
    copy.deepcopy(model).load_state_dict(state)
    assert state.keys() == export.state.keys()  # as it was


def test_sorting_matrices_in_python(runs: Path, tmp_path: Path) -> None:
    """Of every layer, those behind cross-attention included."""
    folder = runs / "sort.float32"
    text = "5 3 11 2 7 7 0 14 9"
    found = json.loads(output("inspect", folder, "--json", "--text", text, "--out", tmp_path))
    model = sinkhorn.load_model(folder)
    sorts: list[Tensor] = []
    for layer in (*model.encoder.layers(), *model.decoder.layers()):
        layer.attention.register_forward_pre_hook(
            lambda module, inputs: sorts.append(module.sort(*inputs)[0]))
    symbols = [int(word) + 3 for word in text.split()]
    model(torch.tensor([symbols + [2]]), torch.tensor([sorted(symbols) + [2]]))
    for sort in found["sorts"]:
        place = sort["layer"] + (2 if sort["stack"] == "decoder" else 0)
        expected = torch.tensor(sort["r"]).view(sort["blocks"], sort["blocks"])
        torch.testing.assert_close(sorts[place][sort["head"]], expected, rtol=1e-4, atol=1e-5)
    assert len(found["sorts"]) == 4 * 2


def test_python_maps_the_file(runs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs / "sort.bf16", tmp_path / "out"))
    before = (folder / "model.safetensors").read_bytes()
    export = sinkhorn.load_export(folder)
    assert export.config == config_of(folder)
    truth = tensors(folder / "model.safetensors")
    assert export.state.keys() == truth.keys()
    for name, tensor in export.state.items():
        assert torch.equal(tensor, truth[name]), name
    model = sinkhorn.load_model(export)
    weight = export.state["embedding.weight"]
    assert model.embedding.weight.data_ptr() == weight.data_ptr()
    model.embedding.weight.add_(1)  # stays in this process
    assert not torch.equal(weight, truth["embedding.weight"])
    assert (folder / "model.safetensors").read_bytes() == before


def test_files_that_do_not_fit_together(runs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs / "sort.bf16", tmp_path / "out"))
    config = config_of(folder)
    (folder / "config.json").write_text(json.dumps(config | {"decoder": {}}))
    with pytest.raises(ValueError, match="config.json"):
        sinkhorn.load_model(folder)
    config["model"]["layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="model.safetensors"):
        sinkhorn.load_model(folder)


@pytest.mark.parametrize(("ids", "found"), [
    (torch.tensor([[3, 19]]), "19"), (torch.tensor([[-1, 3]]), "-1"),
    (torch.tensor([3, 4]), r"shape \[2\]"), (torch.zeros(1, 2, 3, dtype=torch.int64), "shape"),
    (torch.ones(1, 4), "torch.float32"), ([[3, 4]], "list")])
def test_ids_that_cannot_be_meant(runs: Path, ids: object, found: str) -> None:
    sound = torch.tensor([[3, 18]])
    model = sinkhorn.load_model(runs / "sort.float32")
    vocab = model.config["info"]["vocab"]
    assert vocab == 19
    says = f"found {found}.*; expected whole numbers from 0 to 18, of shape \\[batch, length\\]"
    with pytest.raises(ValueError, match=f"^ids: {says}"):
        model(ids, sound)
    with pytest.raises(ValueError, match=f"^targets: {says}"):
        model(sound, ids)
    classifier = sinkhorn.load_model(runs / "classify.float32")
    with pytest.raises(ValueError, match="^ids: found 259; expected whole numbers from 0 to 258"):
        classifier(torch.tensor([[259]]))
    model(sound, sound)
    model(sound.int(), sound.int())
