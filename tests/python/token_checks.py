"""Checks of what a layer does with the gradients of its tokens, for any device: pools spread onto a
gradient, sums over rows, and attention's gradients side by side. test_tokens.py runs them under pytest;
`python token_checks.py` runs them on a GPU without it."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

import fused_checks
from fused_checks import TYPES, compare
from support import num_blocks, randn

ops = torch.ops.sinkhorn

# --- pools -------------------------------------------------------------------------------------------

POOL_SHAPES = [(2, 64, 32, 8), (3, 37, 24, 5), (1, 3, 8, 7), (2, 9, 7, 1), (2, 130, 264, 64),
               (1, 1100, 16, 16), (2, 1, 16, 4)]  # B, L, E, block
KINDS = [[("mean", False)], [("sum", True)], [("mean", True)], [("recent", True)],
         [("recent", True), ("mean", False)], [("mean", True), ("sum", False)],
         [("sum", True), ("mean", True)]]


def _real(batch: int, length: int, device: str) -> Tensor:
    """Some pads in the midst, many at the end, one row without any token."""
    mask = torch.rand(batch, length, generator=torch.Generator().manual_seed(5)) < 0.7
    mask[0, length // 2:] = False
    if batch > 2:
        mask[2] = False
    return mask.to(device)


def _spread(onto: Tensor, grads: list[Tensor], mask: Tensor | None, block: int,
            kinds: list[tuple[str, bool]]) -> Tensor:
    return ops.pool_spread(onto, grads, mask, block, [m for m, _ in kinds], [c for _, c in kinds])


def _one_by_one(onto: Tensor, grads: list[Tensor], mask: Tensor | None, block: int,
                kinds: list[tuple[str, bool]]) -> Tensor:
    for grad, (mode, causal) in zip(grads, kinds):
        onto = onto + ops.pool_bwd(grad, mask, onto.shape[1], block, mode, causal)
    return onto


def pools_spread_onto_a_gradient(device: str) -> None:
    for batch, length, width, block in POOL_SHAPES:
        for masked in (False, True):
            mask = _real(batch, length, device) if masked else None
            for kinds in KINDS:
                wide = [randn(batch, length, width, seed=1, device=device)]
                wide += [randn(batch, num_blocks(length, block), width, seed=2 + i, device=device)
                         for i in range(len(kinds))]
                truth = _one_by_one(wide[0], wide[1:], mask, block, kinds)
                torch.testing.assert_close(_spread(wide[0], wide[1:], mask, block, kinds), truth,
                                           rtol=1e-12, atol=1e-12)
                for dtype in TYPES:
                    onto, *grads = (x.to(dtype) for x in wide)
                    found = _spread(onto, grads, mask, block, kinds)
                    eager = _one_by_one(onto, grads, mask, block, kinds)
                    exact = _one_by_one(onto.double(), [g.double() for g in grads], mask, block, kinds)
                    compare({"gradient": found}, {"gradient": eager}, {"gradient": exact},
                            f"pool_spread {dtype} {(batch, length, width, block)} {kinds} {masked}")
                    assert torch.equal(found, _spread(onto, grads, mask, block, kinds)), "repeated"


def pools_spread_onto_any_strides(device: str) -> None:
    kinds = [("recent", True), ("mean", False)]
    whole = randn(2, 33, 50, seed=1, dtype=torch.bfloat16, device=device)
    pools = [randn(16, 5, 2, seed=2 + i, dtype=torch.bfloat16, device=device).permute(2, 1, 0)
             for i in range(2)]
    for onto in (whole[..., 1:17], whole[..., ::3][..., :16], whole[:, :, 32:48],
                 whole[:1, :, :16].expand(2, 33, 16), whole[:, :, 16:32].transpose(0, 1)
                 .contiguous().transpose(0, 1)):
        plain = _spread(onto.contiguous(), [g.contiguous() for g in pools], None, 7, kinds)
        assert torch.equal(_spread(onto, pools, None, 7, kinds), plain)


def masked_tokens_keep_their_gradient(device: str) -> None:
    """Nothing of a pool reaches them, not even NaN; no other token notices what they hold."""
    mask = _real(2, 40, device)
    onto = randn(2, 40, 16, seed=1, dtype=torch.float32, device=device)
    onto[~mask] = torch.nan
    bad = torch.full((2, 5, 16), torch.nan, device=device)
    for kinds in ([("mean", False)], [("mean", True), ("mean", False)]):
        found = _spread(onto, [bad] * len(kinds), mask, 8, kinds)
        assert torch.equal(found[~mask].isnan(), onto[~mask].isnan())
        clean = _spread(onto.nan_to_num(3.0), [bad] * len(kinds), mask, 8, kinds)
        assert torch.equal(clean[~mask], torch.full_like(clean[~mask], 3.0))
        fine = [randn(2, 5, 16, seed=3, dtype=torch.float32, device=device)] * len(kinds)
        assert _spread(onto, fine, mask, 8, kinds)[mask].isfinite().all()


# --- sums over rows ----------------------------------------------------------------------------------


def biases_sum_over_many_rows(device: str) -> None:
    for rows, width in [(1, 8), (63, 16), (65, 264), (1031, 512), (40000, 8), (70001, 24)]:
        for dtype in TYPES:
            x = torch.zeros(rows, 8, dtype=dtype, device=device)
            weight = torch.zeros(width, 8, device=device)
            bias = torch.zeros(width, device=device, requires_grad=True)
            grad = randn(rows, width, seed=rows, dtype=dtype, device=device)

            def sums() -> Tensor:
                return torch.autograd.grad(ops.linear(x, weight, bias), bias, grad)[0]

            exact = grad.double().sum(0)
            error = (sums().double() - exact).abs().max().item()
            assert error <= 1e-5 * rows**0.5 + (0.01 if dtype == torch.float32 else 0.0), error
            assert sums().dtype == torch.float32 and torch.equal(sums(), sums()), "repeated"


# --- attention ---------------------------------------------------------------------------------------


def _thirds(packed: Tensor, heads: int) -> list[Tensor]:
    batch, length, width = packed.shape
    return [x.view(batch, length, heads, width // heads // 3).transpose(1, 2)
            for x in packed.split(width // 3, 2)]


def attention_packs_gradients(device: str) -> None:
    """Of thirds of one tensor they are thirds of one tensor, with the values that others have."""
    for length, heads, width, block in [(64, 2, 64, 16), (37, 3, 8, 8), (130, 2, 12, 64)]:
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            for sorted_, masked in ((False, False), (True, False), (True, True)):
                packed = randn(2, length, 3 * heads * width, seed=1, dtype=dtype, device=device)
                blocks = num_blocks(length, block)
                wide = dtype if dtype == torch.float64 else torch.float32
                sort = randn(2, heads, blocks, blocks, seed=2, dtype=wide, device=device).softmax(-1)
                mask = _real(2, length, device) if masked else None
                weight = randn(2, heads, length, width, seed=3, dtype=dtype, device=device)

                def grads(parts: list[Tensor]) -> tuple[Tensor, ...]:
                    leaves = [x.detach().requires_grad_() for x in parts]
                    out = ops.attention(*leaves, sort if sorted_ else None, block, "none", "concat",
                                        0 if sorted_ else 1, mask)
                    return torch.autograd.grad(out, leaves, weight)

                found = grads(_thirds(packed, heads))
                apart = grads([x.clone(memory_format=torch.contiguous_format)
                               for x in _thirds(packed, heads)])
                part = heads * width
                assert [g.storage_offset() for g in found] == [0, part, 2 * part]
                assert all(g.stride() == (length * 3 * part, width, 3 * part, 1) for g in found)
                assert len({g.untyped_storage().data_ptr() for g in found}) == 1
                for ours, theirs in zip(found, apart):
                    close = 1e-12 if dtype == torch.float64 else 0.0  # made of library products
                    torch.testing.assert_close(ours, theirs, rtol=close, atol=close)
                assert all(g.is_contiguous() for g in apart)
                tied = grads([*_thirds(packed, heads)[:2], _thirds(packed, heads)[1]])
                assert tied[1].untyped_storage().data_ptr() != tied[2].untyped_storage().data_ptr()


CHECKS = [pools_spread_onto_a_gradient, pools_spread_onto_any_strides,
          masked_tokens_keep_their_gradient, biases_sum_over_many_rows, attention_packs_gradients]

if __name__ == "__main__":
    sys.exit(fused_checks.run(CHECKS))
