"""Full attention, trained by the program and by plain PyTorch from the same weights on the same
bytes: the losses stay together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from train_program import SMALL, Settings, checkpoints, losses, tensors, train

LAYERS, WIDTH, HEADS = 2, 32, 4
LENGTH, BATCH, STEPS, RATE = 40, 4, 20, 3e-3
LINE = "A text of one line, which training reads again and again: 012345678, the quick brown fox.\n"


def settings(folder: Path, steps: int) -> Settings:
    for name in ("train", "valid"):
        (folder / f"{name}.txt").write_text(LINE)
    return SMALL | {
        "task.name": "text", "task.data": folder, "task.tokens": "bytes", "task.length": LENGTH,
        "task.cache": folder.parent / "cache", "attention.kind": "full",
        "model.layers": LAYERS, "model.width": WIDTH, "model.heads": HEADS,
        "optimizer.rate": RATE, "optimizer.warmup": 0, "train.batch": BATCH, "train.steps": steps,
        "train.log_every": 1,
    }


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """The line's bytes + 3 and the end token 2, over and over, behind the begin token 1."""
    item = [byte + 3 for byte in LINE.encode()] + [2]
    stream = itertools.chain([1], itertools.cycle(item))
    previous = next(stream)
    while True:
        tokens = [previous, *itertools.islice(stream, BATCH * LENGTH)]
        previous = tokens[-1]
        yield (torch.tensor(tokens[:-1]).view(BATCH, LENGTH),
               torch.tensor(tokens[1:]).view(BATCH, LENGTH))


def positions() -> Tensor:
    half = WIDTH // 2
    rates = torch.exp(-math.log(10000) / (half - 1) * torch.arange(half, dtype=torch.float64))
    angles = torch.arange(LENGTH, dtype=torch.float64)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1).float()


def logits(p: dict[str, Tensor], ids: Tensor) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (WIDTH,), p[f"{name}.weight"], p[f"{name}.bias"], 1e-6)

    x = F.embedding(ids, p["embedding.weight"]) * math.sqrt(WIDTH) + positions()
    for layer in range(LAYERS):
        name = f"decoder.{layer}"
        qkv = F.linear(norm(x, f"{name}.attention_norm"), p[f"{name}.attention.qkv.weight"])
        q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.linear(y, p[f"{name}.attention.out.weight"])
        y = F.linear(norm(x, f"{name}.ff_norm"), p[f"{name}.ff.in.weight"], p[f"{name}.ff.in.bias"])
        x = x + F.linear(y.relu(), p[f"{name}.ff.out.weight"], p[f"{name}.ff.out.bias"])
    return F.linear(norm(x, "decoder.norm"), p["embedding.weight"])


def torch_losses(p: dict[str, Tensor]) -> list[float]:
    decayed = [t for name, t in p.items() if t.dim() > 1 and "embedding" not in name]
    others = [t for name, t in p.items() if t.dim() == 1 or "embedding" in name]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
        lr=RATE, betas=(0.9, 0.98), eps=1e-9)
    found = []
    for ids, targets in itertools.islice(batches(), STEPS):
        loss = F.cross_entropy(logits(p, ids).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(p.values()), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found


def test_loss_curve_of_full_attention(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    train(tmp_path / "initial", settings(data, steps=0))
    weights = {name.removeprefix("model/"): tensor.requires_grad_()
               for name, tensor in tensors(checkpoints(tmp_path / "initial")[-1]).items()
               if name.startswith("model/")}
    train(tmp_path / "run", settings(data, steps=STEPS))
    ours, theirs = losses(tmp_path / "run"), torch_losses(weights)
    assert len(ours) == STEPS
    assert ours[0] - ours[-1] > 1  # there is something to compare
    assert ours == pytest.approx(theirs, abs=1e-4)
