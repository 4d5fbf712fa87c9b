"""Causality to the bit, and right padding that changes nothing.

Changed after t: queries, keys, values and mask bits of later tokens, and everything in `logits` or
`sort` that later tokens decide. Outputs 0..t must keep every bit.
"""

from __future__ import annotations

import pytest
import torch

from marks import on_devices
from support import allowed_for, layer, layer_weights, live_blocks, make_mask, make_sort
from support import num_blocks, randn

ops = torch.ops.sinkhorn
pytestmark = pytest.mark.each_form
on_types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
COLUMNS = ("prefix", "prior", "none")
RULES = [("strict", 0), ("strict", 1), ("strict", 2), ("inclusive", 0)]  # causal, window


def with_new_future(x: torch.Tensor, t: int, dim: int, seed: int,
                    size: float = 2.0) -> torch.Tensor:
    """A copy of x with other numbers (bits, for a mask) after index t of `dim`."""
    changed = x.clone()
    later = changed.narrow(dim, t + 1, x.shape[dim] - t - 1)
    new = size * randn(*later.shape, seed=seed, device=str(x.device))
    later.copy_(new > 0 if x.dtype == torch.bool else new)
    return changed


# Each operator -----------------------------------------------------------------------------------


@on_devices
@on_types
@pytest.mark.parametrize("mode", ["sum", "mean", "recent"])
def test_causal_pool_does_not_read_past_the_first_token_of_a_block(mode, dtype, device):
    for length, block in ((70, 8), (200, 64), (9, 1)):
        x = randn(2, length, 17, seed=1, dtype=dtype, device=device)
        mask = make_mask("holes", 2, length, block).to(device)
        before = ops.pool(x, block, mode, True, mask)
        for i in range(before.shape[1]):
            after = ops.pool(with_new_future(x, i * block, 1, i), block, mode, True,
                             with_new_future(mask, i * block, 1, i + 50))
            assert torch.equal(before[:, : i + 1], after[:, : i + 1]), f"row {i}, block {block}"


@on_devices
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("causal, window", RULES)
def test_rows_of_r_do_not_read_later_rows_or_their_block_mask(causal, window, columns, device):
    for n, rows in ((9, range(9)), (70, (0, 1, 15, 16, 33, 63, 64, 68))):
        logits = randn(2, 2, n, n, seed=1, dtype=torch.float32, device=device)
        live = randn(2, n, seed=2, device=device) > -1
        for iterations in (1, 5):
            options = (iterations, 0.75, causal, columns, window, None)
            before = ops.balance(logits, *options, live)
            for i in rows:
                future_rows = with_new_future(logits, i, 2, i, 30.0)
                future_columns = with_new_future(future_rows, i, 3, i + 50, 30.0)
                after = ops.balance(future_columns, *options, with_new_future(live, i, 1, i))
                assert torch.equal(before[:, :, : i + 1], after[:, :, : i + 1]), f"row {i} of {n}"


ATTENTION = [(causal, combine, window, True) for causal, window in RULES
             for combine in ("concat", "outputs")]
ATTENTION += [("inclusive", "logits", 0, True)]
ATTENTION += [("strict", "concat", window, False) for window in (0, 1, 2)]


@on_devices
@on_types
@pytest.mark.parametrize("causal, combine, window, with_sort", ATTENTION)
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "holes"])
def test_attention_outputs_do_not_read_later_tokens(
        causal, combine, window, with_sort, masked, dtype, device):
    for length, block, width, tokens in ((70, 8, 17, (0, 6, 7, 8, 20, 37, 63, 68)),
                                         (150, 64, 64, (0, 63, 64, 100, 148)),
                                         (9, 1, 4, range(8))):
        q, k, v = (randn(2, 2, length, width, seed=s, dtype=dtype, device=device)
                   for s in (1, 2, 3))
        mask = make_mask("holes", 2, length, block) if masked else None
        where = allowed_for(None, 2, length, block, causal, window)
        sort = make_sort(where, 2, torch.float32).to(device) if with_sort else None
        mask = mask.to(device) if masked else None
        before = ops.attention(q, k, v, sort, block, causal, combine, window, mask)
        for t in tokens:
            q2, k2, v2 = (with_new_future(x, t, 2, t + s) for s, x in enumerate((q, k, v)))
            sort2 = sort
            if with_sort:  # rows of later blocks are functions of later tokens
                sort2 = with_new_future(sort, t // block, 2, t).abs()
            all_real = torch.ones(2, length, dtype=torch.bool, device=device)
            mask2 = with_new_future(mask if masked else all_real, t, 1, t + 9)
            after = ops.attention(q2, k2, v2, sort2, block, causal, combine, window, mask2)
            assert torch.equal(before[:, :, : t + 1], after[:, :, : t + 1]), (
                f"outputs 0..{t} of {length}, block {block}")


# The composition ---------------------------------------------------------------------------------


@on_devices
@on_types
@pytest.mark.parametrize("pooling", ["mean", "sum", "recent"])
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("causal, window", RULES)
def test_pool_linear_balance_attention_is_causal_to_the_bit(
        causal, window, columns, pooling, dtype, device):
    length, block, heads = 41, 4, 2
    weights = layer_weights(12, heads, 8, 16, dtype=dtype, device=device)
    x = randn(2, length, 12, seed=3, dtype=dtype, device=device)
    mask = make_mask("right", 2, length, block).to(device)
    options = dict(causal=causal, columns=columns, pooling=pooling, window=window)
    before = layer(x, mask, weights, heads, block, **options)
    for t in (0, 3, 4, 10, 17, 32, 39):
        after = layer(with_new_future(x, t, 1, t), with_new_future(mask, t, 1, t + 7), weights,
                      heads, block, **options)
        assert torch.equal(before[:, :, : t + 1], after[:, :, : t + 1]), f"outputs 0..{t}"


@pytest.mark.parametrize("causal", ["strict", "inclusive"])
def test_the_composition_leaks_with_full_columns(causal):
    weights = layer_weights(12, 2, 8, 16)
    x = randn(2, 41, 12, seed=3, dtype=torch.float32)
    before, after = (layer(y, None, weights, 2, 4, causal, "full")
                     for y in (x, with_new_future(x, 35, 1, 5)))
    assert (before - after)[:, :, :36].abs().max() > 1e-3


# Right padding -----------------------------------------------------------------------------------

PADDED = [("none", "full", 0), ("none", "none", 1), ("strict", "prefix", 0), ("strict", "prior", 1),
          ("strict", "full", 0), ("inclusive", "prefix", 0), ("inclusive", "prior", 0)]


@on_devices
@pytest.mark.parametrize("causal, columns, window", PADDED)
@pytest.mark.parametrize("extra", [1, 2, 4, 19])
def test_extra_right_padding_leaves_real_outputs_of_the_composition_unchanged(
        causal, columns, window, extra, device):
    weights = layer_weights(12, 2, 8, 16, dtype=torch.float64, device=device)
    x = randn(2, 42, 12, seed=3, device=device)
    padded = torch.cat([x, randn(2, extra, 12, seed=4, device=device)], 1)
    mask = torch.arange(42 + extra, device=device).expand(2, -1) < 42
    options = dict(causal=causal, columns=columns, window=window)
    expected = layer(x, None, weights, 2, 4, **options)
    actual = layer(padded, mask, weights, 2, 4, **options)
    torch.testing.assert_close(actual[:, :, :42], expected, rtol=1e-10, atol=1e-12)
    assert (actual[:, :, 42:] == 0).all()


@on_devices
@pytest.mark.parametrize("causal, combine, window, with_sort",
                         [("none", "concat", 1, True), ("none", "logits", 0, True),
                          ("none", "outputs", 0, True), ("none", "concat", 2, False), *ATTENTION])
def test_extra_right_padding_leaves_real_attention_outputs_unchanged(
        causal, combine, window, with_sort, device):
    length, block = 21, 4
    n = num_blocks(length, block)
    plain = [randn(2, 2, length, 8, seed=s, device=device) for s in (1, 2, 3)]
    sort = None
    if with_sort:
        where = allowed_for(None, 2, length, block, causal, window)
        sort = make_sort(where, 2, torch.float64).to(device)
    expected = ops.attention(*plain, sort, block, causal, combine, window)
    for extra in (1, 3, 11):
        bigger = [torch.cat([x, randn(2, 2, extra, 8, seed=9, device=device)], 2) for x in plain]
        mask = torch.arange(length + extra, device=device).expand(2, -1) < length
        embedded = None
        if with_sort:
            size = num_blocks(length + extra, block)
            embedded = torch.full((2, 2, size, size), 7.0, dtype=torch.float64, device=device)
            embedded[:, :, :n, :n] = sort
        actual = ops.attention(*bigger, embedded, block, causal, combine, window, mask)
        torch.testing.assert_close(actual[:, :, :length], expected, rtol=1e-10, atol=1e-12)


@on_devices
def test_extra_right_padding_of_the_keys_leaves_sortcut_unchanged(device):
    q, k, v = (randn(2, 2, n, 8, seed=s, device=device) for s, n in ((1, 5), (2, 21), (3, 21)))
    sort = make_sort(allowed_for(None, 2, 21, 4, "none"), 2, torch.float64).to(device)
    expected = ops.sortcut(q, k, v, sort, 4, 2)
    k2, v2 = (torch.cat([x, x[:, :, :9]], 2) for x in (k, v))
    mask = torch.arange(30, device=device).expand(2, -1) < 21
    embedded = torch.full((2, 2, 8, 8), 7.0, dtype=torch.float64, device=device)
    embedded[:, :, :6, :6] = sort
    assert live_blocks(mask, 4).sum() == 12
    torch.testing.assert_close(ops.sortcut(q, k2, v2, embedded, 4, 2, mask), expected,
                               rtol=1e-10, atol=1e-12)
