"""Under torch.autocast the operators compute what they compute without it, to the bit."""

from __future__ import annotations

import pytest
import torch

from marks import on_devices
from support import randn

ops = torch.ops.sinkhorn
B, H, L, BLOCK = 2, 2, 40, 8
OTHER = {torch.float32: torch.bfloat16, torch.float16: torch.bfloat16,
         torch.bfloat16: torch.float16}  # what autocast would cast to


def inputs(op: str, width: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    n = L // BLOCK
    if op == "pool":
        shapes = [(B, L, width)]
    elif op == "balance":
        shapes = [(B, H, n, n)]
    else:
        shapes = [(B, H, L, width)] * 3 + [(B, H, n, n)]
    tensors = [randn(*shape, seed=s, dtype=dtype, device=device) for s, shape in enumerate(shapes)]
    if len(tensors) > 1:
        tensors[3] = tensors[3].float().softmax(-1)
    return [x.requires_grad_() for x in tensors]


def call(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    if op == "pool":
        return ops.pool(*tensors, BLOCK, "mean", False)
    if op == "balance":
        return ops.balance(*tensors, 3, 0.75)
    return getattr(ops, op)(*tensors, BLOCK, *([2] if op == "sortcut" else []))


@on_devices
@pytest.mark.parametrize("dtype", OTHER, ids=str)
@pytest.mark.parametrize("width", [16, 136])  # on CUDA Torch's operations compute the wider one
@pytest.mark.parametrize("op", ["pool", "balance", "attention", "sortcut"])
def test_the_same_bits(op, width, dtype, device):
    tensors = inputs(op, width, dtype, device)

    def results() -> list[torch.Tensor]:
        out = call(op, tensors)
        return [out, *torch.autograd.grad(out.float().square().sum(), tensors)]

    plain = results()
    with torch.autocast(device, dtype=OTHER[dtype]):
        cast = results()
    for x, y in zip(plain, cast, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


@on_devices
def test_a_library_product_inside_is_not_cast(device):
    x, weight = randn(6, 8, seed=1, device=device).float(), randn(4, 8, seed=2, device=device).float()
    plain = ops.linear(x, weight)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(ops.linear(x, weight), plain)


def test_compiled():
    tensors = inputs("attention", 16, torch.float32, "cpu")
    compiled = torch.compile(lambda *t: call("attention", list(t)), fullgraph=True,
                             backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(*tensors), call("attention", tensors))
