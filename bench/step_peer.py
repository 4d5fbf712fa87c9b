"""The peer of whole training steps: the program's language model with SDPA, as a good PyTorch user
would write it: bf16 autocast, fused AdamW, no dropout, output tied to the embedding."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    name: str
    size: str  # the program's model.size
    layers: int
    width: int
    ff_width: int
    heads: int
    batch: int
    length: int
    vocab: int
    block: int
    goal: float  # ours over the best peer
    steps: int  # timed at a time

    @property
    def tokens(self) -> int:
        return self.batch * self.length


BYTES = 259  # 256 and pad, begin, end
SIZES = [
    Size("tiny", "tiny", 2, 128, 512, 4, 8, 512, 8000, 64, 4.0, 400),
    Size("lm_base", "lm_base", 6, 512, 2048, 8, 128, 256, 32000, 64, 1.0, 40),
    Size("lm_big, 16 heads", "lm_big", 6, 2048, 8192, 16, 64, 256, 32000, 64, 1.0, 15),
    Size("characters", "base", 6, 512, 2048, 8, 32, 1024, BYTES, 64, 1.0, 60),
    Size("pixels", "base", 6, 512, 2048, 8, 8, 3072, BYTES, 256, 1.2, 60),
    Size("16k", "base", 6, 512, 2048, 8, 2, 16384, BYTES, 64, 2.0, 40),
    Size("64k", "base", 6, 512, 2048, 8, 1, 65536, BYTES, 64, 5.0, 15),
]


class Layer(nn.Module):
    def __init__(self, s: Size):
        super().__init__()
        self.heads = s.heads
        self.norms = nn.ModuleList(nn.LayerNorm(s.width, eps=1e-6) for _ in range(2))
        self.qkv = nn.Linear(s.width, 3 * s.width, bias=False)
        self.out = nn.Linear(s.width, s.width, bias=False)
        self.ff_in = nn.Linear(s.width, s.ff_width)
        self.ff_out = nn.Linear(s.ff_width, s.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2),
                                           v.transpose(1, 2), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.ff_out(F.relu(self.ff_in(self.norms[1](x))))


class LanguageModel(nn.Module):
    def __init__(self, s: Size):
        super().__init__()
        self.embedding = nn.Embedding(s.vocab, s.width)
        nn.init.normal_(self.embedding.weight, std=s.width**-0.5)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = nn.LayerNorm(s.width, eps=1e-6)
        half = s.width // 2
        rates = torch.exp(torch.arange(half) * (-math.log(10000.0) / max(half - 1, 1)))
        angles = torch.arange(s.length)[:, None] * rates
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], 1))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids) * self.embedding.embedding_dim**0.5 + self.positions
        for layer in self.layers:
            x = layer(x)
        scores = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten(), ignore_index=0)


def make_step(s: Size, mode: str | None, device: str) -> Callable[[], Tensor]:
    """mode: None for eager, or one of torch.compile's."""
    torch.manual_seed(1)
    model = LanguageModel(s).to(device)
    on_gpu = device == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), fused=True, capturable=on_gpu, betas=(0.9, 0.98), weight_decay=0.01,
        lr=torch.tensor(1e-3, device=device) if on_gpu else 1e-3)
    forward = model if mode is None else torch.compile(model, mode=mode, dynamic=False)
    batches = [torch.randint(3, s.vocab, (s.batch, s.length + 1), device=device) for _ in range(8)]
    count = 0

    def step() -> Tensor:
        nonlocal count
        ids = batches[count % len(batches)]
        count += 1
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = forward(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def tokens_per_second(s: Size, mode: str | None, device: str = "cuda", rounds: int = 3,
                      warm_up: int = 8) -> float:
    """The median of a few rounds of steps, each timed from an idle device to an idle device."""
    step = make_step(s, mode, device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(warm_up):
        loss = step()
    if not math.isfinite(loss.item()):
        raise RuntimeError(f"{s.name}: the peer's loss is {loss.item()}")
    speeds = []
    for _ in range(rounds):
        wait()
        begin = time.perf_counter()
        for _ in range(s.steps):
            step()
        wait()
        speeds.append(s.steps * s.tokens / (time.perf_counter() - begin))
    return statistics.median(speeds)
