"""What balancing promises: sums of 1, no harm from extremes, exact zeros, the property to know."""

from __future__ import annotations

import pytest
import torch

from cases import BALANCE_RULES, Balance
from comparison import assert_as_good_as_eager
from marks import on_devices
from support import allowed, randn

ops = torch.ops.sinkhorn
RULES = [(causal, columns) for causal, columns, window in BALANCE_RULES if window == 0]
on_rules = pytest.mark.parametrize("causal, columns", RULES)


def live_mask(n: int) -> torch.Tensor:
    """[3, N]: all live, a hole and pads, nothing live."""
    live = torch.ones(3, n, dtype=torch.bool)
    live[1, 2] = live[1, n - 2:] = False
    live[2] = False
    return live


def value_and_grad(logits: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logits.detach().requires_grad_()
    result = ops.balance(leaf, *args, **kwargs)
    upstream = randn(*result.shape, seed=3, dtype=result.dtype, device=str(result.device))
    (grad,) = torch.autograd.grad(result, leaf, upstream)
    return result.detach(), grad


@on_devices
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_rows_and_columns_of_live_blocks_sum_to_1_after_many_iterations(dtype, device):
    live = live_mask(12).to(device)
    logits = randn(3, 2, 12, 12, seed=1, dtype=dtype, device=device)
    result = ops.balance(logits, 300, 1.0, block_mask=live)
    expected = live[:, None].to(dtype).expand(3, 2, 12)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    for name, dim in (("rows", -1), ("columns", -2)):
        torch.testing.assert_close(result.sum(dim), expected, rtol=0, atol=tolerance,
                                   msg=lambda text, name=name: f"{name}: {text}")


@on_devices
@on_rules
@pytest.mark.parametrize("iterations", [1, 5])
def test_rows_with_a_source_sum_to_1_and_what_is_not_allowed_is_exactly_0(
        causal, columns, iterations, device):
    live = live_mask(9).to(device)
    for window in (0, 1, 2) if causal == "strict" else (0,):
        logits = randn(3, 2, 9, 9, seed=1, dtype=torch.float32, device=device)
        result = ops.balance(logits, iterations, 0.75, causal, columns, window, block_mask=live)
        where = allowed(live, causal, window)[:, None].expand_as(result)
        assert (result[~where] == 0).all()
        assert (result[where] > 0).all()
        torch.testing.assert_close(result.sum(-1), where.any(-1).float(), rtol=0, atol=1e-5)


EXTREMES = {
    "plus or minus 1e4": lambda n: randn(1, 2, n, n, seed=1, dtype=torch.float32).sign() * 1e4,
    "uniform up to 1e4": lambda n: 1e4 * randn(1, 2, n, n, seed=1, dtype=torch.float32).tanh(),
    "rows far apart": lambda n: torch.linspace(-1e4, 1e4, n)[:, None].expand(1, 2, n, n),
    "columns far apart": lambda n: torch.linspace(-1e4, 1e4, n).expand(1, 2, n, n),
    "all equal to 1e4": lambda n: torch.full((1, 2, n, n), 1e4),
    "all equal to -1e4": lambda n: torch.full((1, 2, n, n), -1e4),
    "all 0": lambda n: torch.zeros(1, 2, n, n),
}


@on_devices
@on_rules
@pytest.mark.parametrize("temperature", [1e-2, 1.0])
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extreme_logits_give_no_nan_and_no_overflow(causal, columns, extreme, temperature, device):
    for n in (1, 2, 17):
        for iterations in (1, 5, 20):
            logits = EXTREMES[extreme](n).contiguous().to(device)
            result, grad = value_and_grad(logits, iterations, temperature, causal, columns)
            where = f"N = {n}, {iterations} iterations"
            assert torch.isfinite(result).all(), f"values, {where}"
            assert torch.isfinite(grad).all(), f"gradients, {where}"
            assert result.min() >= 0 and result.max() <= 1 + 1e-5, where
            sources = n if causal == "none" else n - (causal == "strict")
            sums = result.sum(-1)[..., n - sources:]
            torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.03, 1e-2, 1e-3])
@pytest.mark.parametrize("causal", ["none", "strict"])
def test_full_columns_lose_no_more_of_large_logits_than_eager_code(causal, temperature):
    case = Balance(causal, "full", 10, N=32, temperature=temperature)
    assert_as_good_as_eager(case, torch.float32, "cpu")


@pytest.mark.parametrize("size", [1e9, 1e12, 1e30])
@pytest.mark.parametrize("causal", ["none", "strict"])
def test_full_columns_of_absurd_logits_give_finite_gradients(causal, size):
    for seed in range(5):
        logits = size * randn(1, 2, 8, 8, seed=seed, dtype=torch.float32)
        result, grad = value_and_grad(logits, 5, 1.0, causal, "full")
        assert torch.isfinite(result).all() and torch.isfinite(grad).all()


def test_one_block_is_its_own_source_and_has_none_under_strict():
    logits = torch.tensor([[[[-1e4]]]])
    for causal, columns in RULES:
        result, grad = value_and_grad(logits, 5, 1e-2, causal, columns)
        assert result.item() == pytest.approx(0.0 if causal == "strict" else 1.0, abs=1e-6)
        assert grad.item() == pytest.approx(0.0, abs=1e-4)


def test_equal_logits_give_the_uniform_average_where_the_rule_is_symmetric():
    result = ops.balance(torch.full((1, 1, 8, 8), 7.0), 5, 0.75)
    torch.testing.assert_close(result, torch.full_like(result, 1 / 8))


@pytest.mark.parametrize("causal, columns", [("none", "full"), ("strict", "prefix"),
                                             ("strict", "prior"), ("inclusive", "full")])
def test_4096_blocks_give_finite_values_gradients_and_row_sums(causal, columns):
    logits = torch.randn(1, 1, 4096, 4096).mul_(100)
    result, grad = value_and_grad(logits, 2, 1e-2, causal, columns)
    assert torch.isfinite(result).all() and torch.isfinite(grad).all()
    sums = result.sum(-1)[..., int(causal == "strict"):]
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-4)


# The property to know ----------------------------------------------------------------------------

NEWEST = {  # percent of the newest source after 1, 5, 20 iterations
    "prefix": {1: 51, 5: 83, 20: 95},
    "prior": {1: 28, 5: 55, 20: 100},
    "full": {1: 32, 5: 48, 20: 68},
    "none": {1: 22, 5: 22, 20: 22},
}


@pytest.mark.parametrize("columns", NEWEST)
@pytest.mark.parametrize("iterations", [1, 5, 20])
def test_share_of_the_newest_source_is_the_documented_one(columns, iterations):
    logits = randn(64, 8, 16, 16, seed=1, dtype=torch.float32)
    result = ops.balance(logits, iterations, 0.75, "strict", columns)
    share = 100 * result.diagonal(-1, -2, -1).mean().item()
    assert share == pytest.approx(NEWEST[columns][iterations], abs=3)


@pytest.mark.parametrize("window", [0, 1, 2])
@pytest.mark.parametrize("size", [1.0, 30.0, 1e4])
def test_under_prefix_the_newest_source_is_the_largest_of_its_row_whatever_the_logits(size, window):
    logits = size * randn(4, 2, 16, 16, seed=1, dtype=torch.float32)
    for iterations in (1, 2, 10):
        result = ops.balance(logits, iterations, 1.0, "strict", "prefix", window)
        newest = result.diagonal(-1 - window, -2, -1)
        largest = result[:, :, window + 1:].amax(-1)
        assert (newest >= largest * (1 - 1e-5)).all()


@on_devices
@pytest.mark.parametrize("causal", ["strict", "inclusive"])
def test_full_columns_leak_the_future_under_a_causal_rule(causal, device):
    """The warning in the docs is true: a changed last row shows in an earlier one."""
    logits = randn(1, 1, 8, 8, seed=1, device=device)
    changed = logits.clone()
    changed[:, :, 7] += 3 * randn(1, 1, 8, seed=2, device=device)
    before, after = (ops.balance(x, 5, 0.75, causal, "full") for x in (logits, changed))
    assert (before - after)[:, :, :7].abs().max() > 1e-2
