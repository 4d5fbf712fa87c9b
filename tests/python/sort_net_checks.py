"""Checks of what a sort network is made of between pool and balance (block_logits, add_gumbel, pools in
float32), for any device; fused_checks.py runs them.

On the GPU a kernel serves networks of few blocks, up to 256 rows, and the library's products others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_values import Values, compare, gradients, leaves
from support import num_blocks, randn

ops = torch.ops.sinkhorn
HALVES = (torch.bfloat16, torch.float16)

# batch, blocks, width, heads, columns of the network
NETWORKS = [(8, 8, 128, 4, 8), (1, 1, 1, 1, 1), (3, 5, 33, 2, 7), (2, 4, 130, 3, 4), (37, 6, 40, 2, 16),
            (16, 16, 64, 1, 16), (40, 8, 48, 2, 8), (0, 3, 8, 2, 4)]


def _draws(shape: tuple[int, ...], device: str) -> Tensor:
    gen = torch.Generator().manual_seed(5)
    draws = torch.empty(shape).exponential_(generator=gen)
    if draws.numel() > 0:
        draws.view(-1)[0] = 0.0
    return draws.to(device)


def _gumbel(draws: Tensor) -> Tensor:
    return -draws.clamp_min(1e-30).log()


def _eager(pooled: Tensor, weight: Tensor, bias: Tensor, heads: int, draws: Tensor | None) -> Tensor:
    batch, blocks, _ = pooled.shape
    y = F.linear(pooled, weight, bias).view(batch, blocks, heads, weight.shape[0] // heads)
    y = y.transpose(1, 2)[..., :blocks]
    return y if draws is None else y + _gumbel(draws.to(y.dtype))


def _values(function, inputs: Values) -> Values:
    y = function(**inputs)
    return {"logits": y.detach()} | gradients([y], inputs)


def networks(device: str) -> None:
    for batch, blocks, width, heads, columns in NETWORKS:
        tensors = {"pooled": randn(batch, blocks, width, seed=1, dtype=torch.float32, device=device),
                   "weight": randn(heads * columns, width, seed=2, dtype=torch.float32, device=device),
                   "bias": randn(heads * columns, seed=3, dtype=torch.float32, device=device)}
        for draws in (None, _draws((batch, heads, blocks, blocks), device)):
            def fused(**inputs):
                return ops.block_logits(**inputs, heads=heads, draws=draws)

            def eager(**inputs):
                return _eager(**inputs, heads=heads, draws=draws)

            found = _values(fused, leaves(tensors))
            why = f"block_logits {(batch, blocks, width, heads, columns)} {draws is not None}"
            compare(found, _values(eager, leaves(tensors)),
                    _values(eager, leaves(tensors, torch.float64)), why)
            again = _values(fused, leaves(tensors))
            assert all(torch.equal(found[k], again[k]) for k in found), f"{why}: repeated"
            with torch.no_grad():
                assert torch.equal(fused(**tensors), found["logits"]), why
            unread = found["gradient of weight"].view(heads, columns, width)[:, blocks:]
            assert unread.count_nonzero() == 0, why


def networks_of_any_strides(device: str) -> None:
    pooled = randn(4, 24, 6, seed=1, dtype=torch.float32, device=device).transpose(1, 2)
    weight = randn(24, 12, seed=2, dtype=torch.float32, device=device).t()
    bias = randn(24, seed=3, dtype=torch.float32, device=device)[::2]
    draws = _draws((6, 6, 4, 2), device).permute(2, 3, 0, 1)
    found, plain = (ops.block_logits(f(pooled), f(weight), f(bias), 2, f(draws))
                    for f in (lambda x: x, Tensor.contiguous))
    assert torch.equal(found, plain)


def noise_on_logits(device: str) -> None:
    for shape in [(8, 4, 8, 8), (1, 1, 1, 1), (3, 2, 37, 37), (0, 2, 3, 3)]:
        logits = randn(*shape, seed=1, dtype=torch.float32, device=device)
        draws = _draws(shape, device)
        for x in (logits, logits.transpose(1, 2).contiguous().transpose(1, 2), logits.mT):
            leaf = x.detach().requires_grad_()
            y = ops.add_gumbel(leaf, draws)
            assert y.isfinite().all()
            torch.testing.assert_close(y.detach(), x + _gumbel(draws), rtol=1e-6, atol=1e-6)
            weights = randn(*shape, seed=2, dtype=torch.float32, device=device)
            assert torch.equal(torch.autograd.grad(y, leaf, weights)[0], weights)


def pools_in_float32(device: str) -> None:
    """What the plain operator gives, handed on in float32; and gradients of float32."""
    shapes = [(8, 512, 128, 64), (2, 40, 16, 7), (1, 5, 3, 9), (3, 530, 33, 16), (2, 1100, 24, 64),
              (2, 250, 40, 16)]
    kinds = [("mean", True), ("sum", True), ("recent", True), ("mean", False)]
    for batch, length, width, block in shapes:
        x = randn(batch, length, width, seed=1, dtype=torch.float32, device=device)
        for masked in (False, True):
            mask = None
            if masked:
                mask = randn(batch, length, seed=4, dtype=torch.float32, device=device) > -0.5
            for mode, causal in kinds:
                for dtype in HALVES:
                    half = x.to(dtype)
                    wide = ops.pool_wide(half, block, mode, causal, mask)
                    assert wide.dtype == torch.float32
                    assert torch.equal(wide, ops.pool_fwd(half, block, mode, causal, mask).float())
                    grad = randn(batch, num_blocks(length, block), width, seed=2,
                                 dtype=torch.float32, device=device)
                    args = (mask, block, [mode], [causal])
                    exact = ops.pool_spread(half.double(), [grad.double()], *args)
                    compare({"gradient": ops.pool_spread(half, [grad], *args)},
                            {"gradient": ops.pool_spread(half, [grad.to(dtype)], *args)},
                            {"gradient": exact}, f"pool_spread {dtype} {mode} {causal} {masked}")


CHECKS = [networks, networks_of_any_strides, noise_on_logits, pools_in_float32]
