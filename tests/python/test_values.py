"""Values a reader can check by hand or against PyTorch's own attention, sentence by sentence of
docs/spec.md."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from marks import on_devices
from support import randn

ops = torch.ops.sinkhorn


def qkv(batch, heads, length, width, device="cpu", dtype=torch.float64):
    return [randn(batch, heads, length, width, seed=s, dtype=dtype, device=device)
            for s in (1, 2, 3)]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


# pool --------------------------------------------------------------------------------------------

POOLED = {  # tokens 1..7 in blocks of 3, token 2 (value 3) masked
    ("sum", False): [3.0, 15.0, 7.0],
    ("mean", False): [1.5, 5.0, 7.0],
    ("sum", True): [1.0, 7.0, 25.0],
    ("mean", True): [1.0, 7.0 / 3, 25.0 / 6],
    ("recent", True): [1.0, 3.0, 6.0],
}


@on_devices
@pytest.mark.parametrize("mode, causal", POOLED, ids=str)
def test_pool_of_counting_numbers(mode, causal, device):
    x = torch.arange(1.0, 8.0, dtype=torch.float64, device=device).reshape(1, 7, 1)
    mask = torch.tensor([[True, True, False, True, True, True, True]], device=device)
    expected = torch.tensor(POOLED[mode, causal], dtype=torch.float64, device=device)
    close(ops.pool(x, 3, mode, causal, mask).flatten(), expected)


@pytest.mark.parametrize("mode, causal", POOLED, ids=str)
def test_pool_over_no_real_token_is_zero(mode, causal):
    x = torch.full((1, 7, 2), 5.0)
    mask = torch.zeros(1, 7, dtype=torch.bool)
    assert torch.equal(ops.pool(x, 3, mode, causal, mask), torch.zeros(1, 3, 2))


@on_devices
@pytest.mark.parametrize("causal", [False, True])
def test_pool_of_half_types_adds_in_float32(causal, device):
    """300 ones stick at 256 when added in bfloat16; 60000 twice overflows float16 on the way."""
    ones = torch.ones(1, 601, 1, dtype=torch.bfloat16, device=device)
    expected = torch.tensor(301.0 if causal else 300.0).bfloat16().item()
    assert ops.pool(ones, 300, "sum", causal)[0, 1, 0].item() == expected
    x = torch.tensor([60000.0, 60000.0, -60000.0, 0.0], dtype=torch.float16, device=device)
    total = ops.pool(x.reshape(1, 4, 1), 3, "sum", causal)
    assert total[0, -1 if causal else 0, 0] == 60000.0


# balance -----------------------------------------------------------------------------------------


def test_no_iterations_is_exp_of_the_scaled_logits_and_rows_only_is_a_softmax():
    logits, noise = randn(2, 2, 5, 5, seed=1), randn(2, 2, 5, 5, seed=2)
    close(ops.balance(logits, 0, 0.5, noise=noise), torch.exp((logits + noise) / 0.5))
    for iterations in (1, 4):
        close(ops.balance(logits, iterations, 0.5, columns="none", noise=noise),
              ((logits + noise) / 0.5).softmax(-1))


def test_window_matters_to_balance_under_strict_only():
    logits = randn(1, 2, 6, 6, seed=1)
    assert torch.equal(ops.balance(logits, 3, 0.75, window=2), ops.balance(logits, 3, 0.75))
    narrow, wide = (ops.balance(logits, 3, 0.75, "strict", "prefix", w) for w in (0, 2))
    assert not torch.equal(narrow, wide)


@pytest.mark.parametrize("noise_type", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_noise_of_any_float_type_is_converted_then_added(noise_type):
    logits = randn(2, 2, 5, 5, seed=1, dtype=torch.float32)
    noise = randn(2, 2, 5, 5, seed=2, dtype=noise_type)
    assert torch.equal(ops.balance(logits, 2, 0.75, noise=noise),
                       ops.balance(logits, 2, 0.75, noise=noise.float()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_logits_are_balanced_in_float32(dtype):
    logits = randn(2, 2, 20, 20, seed=1, dtype=dtype)
    actual = ops.balance(logits, 5, 0.75)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, ops.balance(logits.float(), 5, 0.75), rtol=1e-6, atol=1e-9)


# attention ---------------------------------------------------------------------------------------


def blocks_of(length, block, device):
    return torch.arange(length, device=device) // block


@on_devices
@pytest.mark.parametrize("causal", ["none", "strict", "inclusive"])
@pytest.mark.parametrize("window", [0, 1, 2])
def test_without_sort_it_is_sliding_window_attention_and_combine_is_ignored(causal, window, device):
    q, k, v = qkv(2, 2, 23, 8, device)
    at, token = blocks_of(23, 4, device), torch.arange(23, device=device)
    seen = (at[:, None] - at).abs() <= window
    if causal != "none":
        seen &= token <= token[:, None]
    expected = F.scaled_dot_product_attention(q, k, v, seen)
    results = [ops.attention(q, k, v, None, 4, causal, combine, window)
               for combine in ("concat", "logits", "outputs")]
    close(results[0], expected)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@on_devices
def test_a_hard_permutation_reads_exactly_the_tokens_of_the_chosen_block(device):
    """Blocks 0..3 of 3 tokens, the last one short, some tokens masked: concat is then PyTorch's
    attention over the real tokens of two blocks, pads and the missing offset included."""
    q, k, v = qkv(1, 2, 11, 8, device)
    order = [3, 0, 1, 2]
    sort = torch.eye(4, dtype=torch.float64, device=device)[order].expand(1, 2, 4, 4)
    mask = torch.ones(1, 11, dtype=torch.bool, device=device)
    mask[0, [4, 6]] = False
    at = blocks_of(11, 3, device)
    source = torch.tensor(order, device=device)[at]
    local, far = at[:, None] == at, source[:, None] == at
    both = torch.cat([far, local], 1) & mask[0].repeat(2)
    real = mask[0][:, None]
    doubled = [torch.cat([x, x], 2) for x in (k, v)]
    concat = F.scaled_dot_product_attention(q, *doubled, both) * real
    close(ops.attention(q, k, v, sort, 3, mask=mask), concat)
    outputs = sum(F.scaled_dot_product_attention(q, k, v, seen & mask[0]) for seen in (far, local))
    close(ops.attention(q, k, v, sort, 3, combine="outputs", mask=mask), outputs * real)


@pytest.mark.parametrize("factor", [0.25, 3.0])
def test_weights_are_shares_and_do_not_depend_on_the_size_of_the_row(factor):
    """With keys of 0 every term is its weight alone, so the count of visible weight shows."""
    q = torch.ones(1, 1, 6, 1, dtype=torch.float64)
    k, v = torch.zeros_like(q), torch.zeros_like(q)
    v[0, 0, 3:] = 1.0
    mask = torch.tensor([[True, True, False, True, True, True]])
    sort = factor * torch.tensor([[[[0.25, 0.75], [1.0, 0.0]]]], dtype=torch.float64)
    out = ops.attention(q, k, v, sort, 3, mask=mask)
    # Destination 0: offsets 0 and 1 weigh 1 and offset 2 weighs 0.75; V' = 0.75 * factor there; two
    # local tokens of value 0. Destination 1: offsets 0 and 1 weigh 1, offset 2 weighs 0; V' = 0;
    # three local tokens of value 1.
    first = 0.75 * factor * 2.75 / (2.75 + 2)
    expected = torch.tensor([first, first, 0, 0.6, 0.6, 0.6], dtype=torch.float64)
    close(out.flatten(), expected)


def test_scale_is_one_over_the_root_of_the_width_unless_given():
    q, k, v = qkv(1, 2, 9, 16)
    sort = torch.full((1, 2, 3, 3), 1 / 3, dtype=torch.float64)
    for extra in ({}, {"causal": "inclusive"}, {"combine": "logits"}):
        plain = ops.attention(q, k, v, sort, 3, **extra)
        close(plain, ops.attention(q, k, v, sort, 3, scale=0.25, **extra))
        close(ops.attention(q, k, v, sort, 3, scale=0.5, **extra),
              ops.attention(2 * q, k, v, sort, 3, **extra))
    close(ops.sortcut(q, k, v, sort, 3, 2), ops.sortcut(q, k, v, sort, 3, 2, scale=0.25))


def test_logits_combines_as_the_paper_prints_it():
    q, k, v = qkv(1, 1, 6, 4)
    sort = torch.tensor([[[[0.3, 0.7], [0.6, 0.4]]]], dtype=torch.float64)
    blocks = [x.reshape(2, 3, 4) for x in (q, k, v)]
    moved_k, moved_v = (torch.einsum("ij,jpd->ipd", sort[0, 0], x) for x in blocks[1:])
    scores = torch.einsum("itd,ipd->itp", blocks[0], moved_k + blocks[1]) / 2
    expected = (scores.softmax(-1) @ moved_v).reshape(1, 1, 6, 4)
    close(ops.attention(q, k, v, sort, 3, combine="logits"), expected)


@pytest.mark.parametrize("combine", ["concat", "outputs"])
def test_blocks_without_a_source_are_purely_local_under_strict(combine):
    q, k, v = qkv(2, 2, 16, 8)
    sort = torch.full((2, 2, 4, 4), 0.5, dtype=torch.float64)
    for window in (0, 1):
        first = 4 * (window + 1)
        routed = ops.attention(q, k, v, sort, 4, "strict", combine, window)
        local = ops.attention(q, k, v, None, 4, "strict", combine, window)
        close(routed[:, :, :first], local[:, :, :first])
        assert not torch.allclose(routed[:, :, first:], local[:, :, first:])


@on_devices
@pytest.mark.parametrize("op", ["attention", "sortcut"])
def test_a_mask_of_all_true_is_no_mask(op, device):
    q, k, v = qkv(2, 2, 11, 8, device)
    sort = randn(2, 2, 4, 4, seed=4, device=device).softmax(-1)
    more = {"budget": 2} if op == "sortcut" else {}
    mask = torch.ones(2, 11, dtype=torch.bool, device=device)
    function = getattr(ops, op)
    close(function(q, k, v, sort, 3, **more), function(q, k, v, sort, 3, mask=mask, **more))


# sortcut -----------------------------------------------------------------------------------------


@on_devices
def test_sortcut_with_the_identity_and_the_whole_budget_is_full_attention(device):
    q, k, v = randn(2, 2, 5, 8, seed=7, device=device), *qkv(2, 2, 11, 8, device)[1:]
    mask = torch.ones(2, 11, dtype=torch.bool, device=device)
    mask[1, 7:] = False
    sort = torch.eye(4, dtype=torch.float64, device=device).expand(2, 2, 4, 4)
    close(ops.sortcut(q, k, v, sort, 3, 4, mask),
          F.scaled_dot_product_attention(q, k, v, mask[:, None, None]))
    close(ops.sortcut(q, k, v, sort, 3, 2, mask),
          F.scaled_dot_product_attention(q, k[:, :, :6], v[:, :, :6]))


@on_devices
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [7, 9])
@pytest.mark.parametrize("op", ["attention", "sortcut"])
def test_a_query_that_sees_nothing_of_weight_gets_zero_and_sends_no_gradient(
        op, length, dtype, device):
    """`sort` of zeros: every weight is 0. Under combine=logits and in sortcut nothing is left."""
    leaves = [x.to(dtype).requires_grad_() for x in qkv(1, 2, length, 4, device)]
    leaves.append(torch.zeros(1, 2, 3, 3, dtype=dtype, device=device, requires_grad=True))
    more = {"budget": 2} if op == "sortcut" else {"combine": "logits"}
    out = getattr(ops, op)(*leaves, 3, **more)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert torch.equal(out, torch.zeros_like(out))
    for grad in grads:
        assert torch.equal(grad, torch.zeros_like(grad))
